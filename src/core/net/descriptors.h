// File descriptors of this process: how many it uses and may use. Opens none.
#pragma once
#include <string>

namespace zero::net {

// Raises the soft limit (RLIMIT_NOFILE) up to the hard one. Throws CommError if that does not leave room for `needed`
// more descriptors; `purpose` and `place` are for its text.
void reserve_descriptors(int needed, const std::string& purpose, const std::string& place);

// Number of open descriptors.
int open_descriptors();

}  // namespace zero::net
