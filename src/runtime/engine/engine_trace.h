// Starting and ending the trace of an Engine: what the ranks have to agree on for it, and whose parts become one file.
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
  // ZERO_TRACE, ZERO_TRACE_STEPS: of a new Engine. Collective.
  void start_of_environment();
  void end() noexcept;

 private:
  void begin(const std::string& file, TraceSteps steps);

  Parts& p_;
  const Checks& checks_;
  observe::Trace::Setup setup_;
};

}  // namespace zero::engine
