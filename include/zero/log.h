// Where the library's notices go. It prints nothing itself: without a sink they are dropped.
#pragma once
#include <functional>
#include <string_view>

#include <zero/export.h>

namespace zero {

enum class LogLevel { Debug, Info, Warning, Error };

// Replaces the process's sink; an empty function removes it. The sink may be called from any
// thread and must not throw.
ZERO_API void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

}  // namespace zero
