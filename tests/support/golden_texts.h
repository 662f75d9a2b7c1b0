// Whole texts of errors, compared with tests/golden/mesh_errors.txt: the name of an entry on a line of its own, then
// its text, indented; sorted by name. ZERO_WRITE_GOLDEN=1 writes the entries of the tests that run, one program at a
// time.
#pragma once
#include <string>

namespace zero::test {

// `name` is a literal of the test's source, which golden_test.py looks for. Throws with both texts, where they differ.
// `writes`: false on all ranks but one.
void require_golden(const std::string& name, const std::string& text, bool writes = true);

}  // namespace zero::test
