// The parsers that read what others have written, as targets of a fuzzer: one function each, which takes any bytes. An
// error of the classes that the parser promises is fine; anything else ends the process: another exception, a crash,
// and a text that is accepted but does not come back the same when it is written and read again.
#pragma once
#include <span>
#include <string_view>
#include <vector>

namespace zero::test {

struct FuzzTarget {
  const char* name;  // also of its folder in tests/fuzz/corpus
  void (*run)(std::string_view bytes);
};
std::vector<FuzzTarget> fuzz_targets();
// Of these, those of files of other libraries.
std::span<const FuzzTarget> interchange_fuzz_targets();
// Those that read several files, or memory.
std::span<const FuzzTarget> checkpoint_fuzz_targets();
// Those of training data, tokenizers and models.
std::span<const FuzzTarget> data_fuzz_targets();

}  // namespace zero::test
