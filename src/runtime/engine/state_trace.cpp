// Starting and ending the trace of an Engine: what the ranks have to agree on for it, and whose parts become one file.
#include <unistd.h>

#include <cstdlib>

#include "base/check.h"
#include "base/log.h"
#include "engine/state.h"

namespace zero::engine {

void State::start_trace(const std::string& file, TraceSteps steps) {
  relay_.keeping([&] {
    require_boundary("start_trace");
    if (file.empty()) throw ConfigError(where("start_trace") + "got no file, expected its path");
    if (steps.first < 1 || steps.last < steps.first)
      throw ConfigError(where("start_trace") +
                        base::join("got steps ", steps.first, " to ", steps.last, ", expected 1 <= first <= last"));
  });
  relay_.telling([&] { begin_trace(file, steps); });
}

void State::begin_trace(const std::string& file, TraceSteps steps) {
  const auto clock = observe::trace_clock_id();
  const auto first = comm_->all_gather_bytes(base::join(clock, " ", observe::trace_now(), " ", ::getpid())).front();
  // Ranks that share rank 0's clock show its moment as 0, others the one at which they all had met.
  const auto space = first.find(' ');
  ZERO_CHECK(space != std::string::npos, "a trace's start");
  const auto origin = first.substr(0, space) == clock ? std::atoll(first.c_str() + space) : observe::trace_now();
  observe::Trace::Setup setup{file, comm_->rank(), comm_->size(), origin, first};
  trace_.start(setup, steps);
  trace_setup_ = std::move(setup);
}

void State::start_trace_of_environment() {
  const char* file = std::getenv("ZERO_TRACE");
  if (file == nullptr || *file == '\0') return;
  const char* steps = std::getenv("ZERO_TRACE_STEPS");
  const auto chosen = steps && *steps ? TraceSteps::parse(steps, "ZERO_TRACE_STEPS") : TraceSteps::after_warmup();
  try {
    begin_trace(file, chosen);
  } catch (const ConfigError& error) {  // the file is another Engine's, of a program that has several
    base::log(LogLevel::Warning, std::string(error.what()) + "; this Engine is not traced");
  }
}

TraceSummary State::stop_trace() {
  return relay_.telling([&] {
    TraceSummary summary;
    if (!trace_.started()) return summary;
    trace_.stop(&summary);
    bool joined = false;
    try {
      joined = observe::merge_trace_parts(trace_setup_);
    } catch (const IoError& error) {
      base::log(LogLevel::Warning, error.what());
    }
    // The rank that came last has joined them.
    for (const auto& text : comm_->all_gather_bytes(joined ? "joined" : "")) summary.joined |= !text.empty();
    summary.file = summary.joined ? trace_setup_.file : observe::Trace::part_name(trace_setup_.file, comm_->rank());
    return summary;
  });
}

void State::end_trace() noexcept {
  try {
    if (!trace_.started()) return;
    trace_.stop(nullptr);
    if (observe::merge_trace_parts(trace_setup_)) base::log(LogLevel::Info, "[trace] written to " + trace_setup_.file);
  } catch (const std::exception& error) {
    base::log(LogLevel::Warning, error.what());
  }
}

void State::count_bytes_on() {
  const auto gathered = prefetcher_->gathered_numel() * static_cast<std::int64_t>(at::elementSize(recipe_.parameter));
  trace_.count(*ledger_, gathered);
}

}  // namespace zero::engine
