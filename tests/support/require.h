// Checks for ranks and other code outside the reach of GoogleTest's macros: a failure throws an exception.
#pragma once
#include <stdexcept>
#include <string>

namespace zero::test {

inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace zero::test
