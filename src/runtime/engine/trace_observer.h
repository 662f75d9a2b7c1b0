// Records the operations of the step program in a trace. When tracing is off, an operation costs one relaxed load.
#pragma once
#include <memory>
#include <vector>

#include "observe/trace.h"
#include "step/observer.h"

namespace zero::engine {

class TraceObserver final : public step::Observer {
 public:
  // Both must outlive it.
  TraceObserver(observe::Trace& trace, const std::vector<step::GroupFacts>& groups) : trace_(trace), groups_(groups) {}
  std::unique_ptr<step::Observed> issued(const step::Op& op) override;

 private:
  class Slice;
  observe::Trace& trace_;
  const std::vector<step::GroupFacts>& groups_;
};

}  // namespace zero::engine
