// Files that commands write for people and other programs: complete, or as they were.
#pragma once
#include <string>
#include <string_view>

namespace zero::cli {

// Atomic: leaves the complete new file or the previous one. Throws IoError that names `option`.
void write_whole(const std::string& option, const std::string& path, std::string_view text);

}  // namespace zero::cli
