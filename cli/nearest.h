// The name a misspelt word was meant to be. Rule of docs/cli.md: the smallest Damerau-Levenshtein
// distance, ignoring case, of at most max(2, length / 3).
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zero::cli {

// Empty when nothing is near enough. Of equals, the first wins.
std::string nearest(std::string_view word, const std::vector<std::string>& names);

}  // namespace zero::cli
