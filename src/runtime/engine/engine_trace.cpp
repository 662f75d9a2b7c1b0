// See engine_trace.h.
#include <unistd.h>

#include <cstdlib>

#include "base/check.h"
#include "base/log.h"
#include "engine/engine_trace.h"

namespace zero::engine {

void EngineTrace::start(const std::string& file, TraceSteps steps) {
  p_.relay.keeping([&] {
    checks_.require_boundary("start_trace");
    if (file.empty()) throw ConfigError(p_.where("start_trace") + "got no file, expected its path");
    if (steps.first < 1 || steps.last < steps.first)
      throw ConfigError(p_.where("start_trace") +
                        base::join("got steps ", steps.first, " to ", steps.last, ", expected 1 <= first <= last"));
  });
  p_.relay.reporting([&] { begin(file, steps); });
}

void EngineTrace::begin(const std::string& file, TraceSteps steps) {
  const auto clock = observe::trace_clock_id();
  const auto first =
      p_.job.comm->all_gather_bytes(base::join(clock, " ", observe::trace_now(), " ", ::getpid())).front();
  // Ranks that share rank 0's clock use its origin; others use the time at which all ranks synchronized.
  const auto space = first.find(' ');
  ZERO_CHECK(space != std::string::npos, "a trace's start");
  const auto origin = first.substr(0, space) == clock ? std::atoll(first.c_str() + space) : observe::trace_now();
  observe::Trace::Setup setup{file, p_.job.comm->rank(), p_.job.comm->size(), origin, first};
  p_.trace.start(setup, steps);
  setup_ = std::move(setup);
}

void EngineTrace::start_of_environment() {
  const char* file = std::getenv("ZERO_TRACE");
  if (file == nullptr || *file == '\0') return;
  const char* steps = std::getenv("ZERO_TRACE_STEPS");
  const auto chosen = steps && *steps ? TraceSteps::parse(steps, "ZERO_TRACE_STEPS") : TraceSteps::after_warmup();
  try {
    begin(file, chosen);
  } catch (const ConfigError& error) {  // another Engine of this program uses the file
    base::log(LogLevel::Warning, std::string(error.what()) + "; this Engine is not traced");
  }
}

TraceSummary EngineTrace::stop() {
  return p_.relay.reporting([&] {
    TraceSummary summary;
    if (!p_.trace.started()) return summary;
    p_.trace.stop(&summary);
    bool joined = false;
    try {
      joined = observe::merge_trace_parts(setup_);
    } catch (const IoError& error) {
      base::log(LogLevel::Warning, error.what());
    }
    // The last rank to arrive merges the parts.
    for (const auto& text : p_.job.comm->all_gather_bytes(joined ? "joined" : "")) summary.joined |= !text.empty();
    summary.file = summary.joined ? setup_.file : observe::Trace::part_name(setup_.file, p_.job.comm->rank());
    return summary;
  });
}

void EngineTrace::end() noexcept {
  try {
    if (!p_.trace.started()) return;
    p_.trace.stop(nullptr);
    if (observe::merge_trace_parts(setup_)) base::log(LogLevel::Info, "[trace] written to " + setup_.file);
  } catch (const std::exception& error) {
    base::log(LogLevel::Warning, error.what());
  }
}

}  // namespace zero::engine
