// Formats error messages: "[where] got X, expected Y (context). Hint: ...". Internal checks are enabled in every build.
#pragma once
#include <sstream>
#include <string>
#include <utility>

#include <zero/errors.h>

namespace zero::base {

template <class... Parts>
std::string join(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return out.str();
}

[[noreturn]] void throw_internal(const char* file, int line, const std::string& message);

}  // namespace zero::base

// An internal invariant: throws InternalError with file and line.
#define ZERO_CHECK(condition, ...)                                                                          \
  do {                                                                                                      \
    if (!(condition)) ::zero::base::throw_internal(__FILE__, __LINE__, ::zero::base::join("" __VA_ARGS__)); \
  } while (false)
