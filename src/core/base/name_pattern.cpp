// See name_pattern.h.
#include "base/name_pattern.h"

#include <algorithm>

namespace zero::base {
namespace {

// Greedy, backtracks to the last * only.
bool matches(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    const bool literal = p + 1 < pattern.size() && pattern[p] == '\\';
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (literal ? pattern[p + 1] == text[t]
                       : p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      p += literal ? 2 : 1;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace

bool pattern_names(std::string_view pattern, std::string_view name, const std::vector<std::string>& aliases) {
  return matches(pattern, name) ||
         std::any_of(aliases.begin(), aliases.end(), [&](const std::string& alias) { return matches(pattern, alias); });
}

std::string exact_pattern(std::string_view name) {
  std::string pattern;
  for (const char c : name) {
    if (c == '*' || c == '?' || c == '\\') pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace zero::base
