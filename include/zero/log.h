// The sink for the library's notices. Without a sink they are dropped: the library itself prints nothing.
#pragma once
#include <functional>
#include <string_view>

#include <zero/export.h>

namespace zero {

enum class LogLevel { Debug, Info, Warning, Error };

// Replaces the sink of this process; an empty function removes it. The sink may be called from any thread and must not
// throw.
ZERO_API void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

}  // namespace zero
