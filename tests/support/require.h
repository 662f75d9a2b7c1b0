// Checks for ranks and other code outside the reach of GoogleTest's macros: a failure throws an exception. Texts of
// errors.
#pragma once
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace zero::test {

inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The error's text; empty when there is none. One of another class passes.
template <class Error = std::exception>
std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace zero::test
