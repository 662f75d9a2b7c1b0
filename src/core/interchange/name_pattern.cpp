// See name_pattern.h.
#include "interchange/name_pattern.h"

#include <cctype>
#include <string_view>

#include "interchange/names.h"

namespace zero::interchange {
namespace {

// The length of an escaped character, of which the second one is meant: "\*", "\{", "\\".
std::size_t escape_at(const std::string& pattern, std::size_t at) {
  const bool escapes = pattern[at] == '\\' && at + 1 < pattern.size();
  return escapes && std::string_view("*{\\").find(pattern[at + 1]) != std::string_view::npos ? 2 : 0;
}

// The length of the capture at the beginning of a text, 0 for none: "*", "{letters}".
std::size_t capture_at(const std::string& pattern, std::size_t at) {
  if (pattern[at] == '*') return 1;
  if (pattern[at] != '{') return 0;
  auto end = at + 1;
  while (end < pattern.size() && std::islower(static_cast<unsigned char>(pattern[end]))) ++end;
  return end > at + 1 && end < pattern.size() && pattern[end] == '}' ? end + 1 - at : 0;
}

bool fits(const std::string& pattern, std::size_t p, const std::string& name, std::size_t n, Captures& captures) {
  while (p < pattern.size()) {
    const auto length = capture_at(pattern, p);
    if (length == 0) {
      if (escape_at(pattern, p) != 0) ++p;
      if (n == name.size() || pattern[p] != name[n]) return false;
      ++p, ++n;
      continue;
    }
    const auto key = pattern.substr(p, length);
    const auto known = captures.find(key);
    if (known != captures.end() && key != "*") {
      if (name.compare(n, known->second.size(), known->second) != 0) return false;
      n += known->second.size();
      p += length;
      continue;
    }
    auto end = n;
    if (key != "*") {
      while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end]))) ++end;
      if (end == n || (name[n] == '0' && end > n + 1)) return false;
      captures[key] = name.substr(n, end - n);
      n = end;
      p += length;
      continue;
    }
    for (end = n; end <= name.size(); ++end) {
      auto tried = captures;
      tried[key] = name.substr(n, end - n);
      if (fits(pattern, p + length, name, end, tried)) {
        captures = std::move(tried);
        return true;
      }
    }
    return false;
  }
  return n == name.size();
}

}  // namespace

std::set<std::string> captures_of(const std::string& pattern) {
  std::set<std::string> result;
  for (std::size_t at = 0; at < pattern.size(); ++at)
    if (escape_at(pattern, at) != 0)
      ++at;
    else if (const auto length = capture_at(pattern, at); length > 0)
      result.insert(pattern.substr(at, length));
  return result;
}

std::optional<Captures> match(const std::string& pattern, const std::string& name) {
  Captures captures;
  if (!fits(pattern, 0, name, 0, captures)) return std::nullopt;
  return captures;
}

std::string fill(const std::string& pattern, const Captures& captures) {
  std::string result;
  for (std::size_t at = 0; at < pattern.size();) {
    if (escape_at(pattern, at) != 0) {
      result += pattern[at + 1];
      at += 2;
      continue;
    }
    const auto length = capture_at(pattern, at);
    result += length == 0 ? std::string(1, pattern[at]) : captures.at(pattern.substr(at, length));
    at += length == 0 ? 1 : length;
  }
  return result;
}

bool name_matches(const std::string& pattern, const std::string& name) { return match(pattern, name).has_value(); }

}  // namespace zero::interchange
