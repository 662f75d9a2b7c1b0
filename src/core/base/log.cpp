#include "base/log.h"

#include <memory>
#include <mutex>

namespace zero {
namespace {
using Sink = std::function<void(LogLevel, std::string_view)>;
std::mutex mutex;
std::shared_ptr<const Sink> current;
}  // namespace

void set_log_sink(Sink sink) {
  auto next = sink ? std::make_shared<const Sink>(std::move(sink)) : nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  current = std::move(next);
}

namespace base {
void log(LogLevel level, std::string_view line) {
  std::shared_ptr<const Sink> sink;
  {
    std::lock_guard<std::mutex> lock(mutex);
    sink = current;
  }
  if (sink) (*sink)(level, line);
}
}  // namespace base
}  // namespace zero
