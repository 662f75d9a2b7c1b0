// Starts and ends an Engine's trace: agreement between ranks, and merging their parts into one file.
#pragma once
#include <string>

#include "engine/checks.h"

namespace zero::engine {

class EngineTrace {
 public:
  EngineTrace(Parts& parts, const Checks& checks) : p_(parts), checks_(checks) {}

  // Collective, between steps.
  void start(const std::string& file, TraceSteps steps);
  TraceSummary stop();
  // For a new Engine: ZERO_TRACE, ZERO_TRACE_STEPS. Collective.
  void start_of_environment();
  void end() noexcept;

 private:
  void begin(const std::string& file, TraceSteps steps);

  Parts& p_;
  const Checks& checks_;
  observe::Trace::Setup setup_;
};

}  // namespace zero::engine
