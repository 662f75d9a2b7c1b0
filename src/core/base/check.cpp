#include "base/check.h"

namespace zero::base {

void throw_internal(const char* file, int line, const std::string& message) {
  throw InternalError(
      join("[internal] ", message, " (", file, ":", line, "). Hint: this is a bug of libzero; please report it."));
}

}  // namespace zero::base
