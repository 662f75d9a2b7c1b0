// Passes a line to the program's log sink (include/zero/log.h).
#pragma once
#include <string_view>

#include <zero/log.h>

namespace zero::base {

void log(LogLevel level, std::string_view line);

}  // namespace zero::base
