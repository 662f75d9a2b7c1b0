#include "torchglue/allocation_observer.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <vector>

namespace zero::torchglue {
namespace {

using Report = std::function<void(long)>;

// What libtorch asks on every allocation of this thread.
struct Listener final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    for (const auto* report : reports) (*report)(static_cast<long>(bytes));
  }
  bool memoryProfilingEnabled() const override { return !paused; }
  std::vector<const Report*> reports;
  bool paused = false;
};

// One listener a thread, installed while at least one observer lives.
thread_local std::shared_ptr<Listener> listener;

}  // namespace

struct AllocationObserver::State {
  Report report;
  std::shared_ptr<Listener> listener;
};

AllocationObserver::AllocationObserver(std::function<void(long)> report) : state_(std::make_shared<State>()) {
  state_->report = std::move(report);
  if (!listener) {
    listener = std::make_shared<Listener>();
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, listener);
  }
  state_->listener = listener;
  listener->reports.push_back(&state_->report);
}

AllocationObserver::~AllocationObserver() {
  std::erase(state_->listener->reports, &state_->report);
  if (listener != state_->listener || !listener->reports.empty()) return;
  // Someone may have pushed above us since: then the empty listener stays, and reports to nobody.
  try {
    if (c10::ThreadLocalDebugInfo::_peek(c10::DebugInfoKind::PROFILER_STATE) == listener) {
      c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::PROFILER_STATE);
      listener.reset();
    }
  } catch (const std::exception&) {
  }
}

AllocationObserver::Pause::Pause() {
  if (!listener || listener->paused) return;
  listener->paused = true;
  saved_ = listener;
}

AllocationObserver::Pause::~Pause() {
  if (saved_) static_cast<Listener*>(saved_.get())->paused = false;
}

}  // namespace zero::torchglue
