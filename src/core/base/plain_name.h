// Names that files of checkpoints can hold.
#pragma once
#include <algorithm>
#include <cstddef>
#include <string_view>

namespace zero::base {

// The longest key of a tensor in a file, in bytes: a name, and what is said of it.
inline constexpr std::size_t kMostNameBytes = 4096;

// Not empty, not longer, and without control characters.
inline bool is_plain_name(std::string_view name, std::size_t most = kMostNameBytes) {
  return !name.empty() && name.size() <= most &&
         std::none_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; });
}

}  // namespace zero::base
