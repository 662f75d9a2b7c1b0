// Which steps a trace covers, and a summary of it. Engine::start_trace() writes a trace; docs/trace.md explains how to
// read it.
#pragma once
#include <cstdint>
#include <limits>
#include <string>

#include <zero/export.h>

namespace zero {

// The optimizer steps in a trace, inclusive. Step 1 is the first that begins after start_trace().
struct ZERO_API TraceSteps {
  std::int64_t first = 1, last = std::numeric_limits<std::int64_t>::max();

  // Skips the first two steps, which learn the order of the groups and allocate buffers.
  static constexpr TraceSteps after_warmup() { return {3, 22}; }
  // Parses "A:B", "A:" or "A". Throws ConfigError that names `source`.
  static TraceSteps parse(const std::string& text, const std::string& source);
};

// Seconds of this rank since its Engine was constructed; the fields are those of TraceSummary. Engine::times() fills it
// if the configuration's wall_clock_breakdown is true. Take differences between calls.
struct StepTimes {
  double compute_s = 0, gather_wait_s = 0, reduce_wait_s = 0, optimizer_s = 0;
};

// Medians over the traced steps of this rank (at most the first 1,024), in seconds.
struct TraceSummary {
  std::int64_t steps = 0;
  double step_s = 0;           // from the first use of a parameter to the end of Engine::step()
  double compute_s = 0;        // forward and backward, without the waits within them
  double gather_wait_s = 0;    // this thread waited for an all-gather, a file, or updated parameters
  double reduce_wait_s = 0;    // this thread waited for a reduction, including sums that it computes itself
  double optimizer_s = 0;      // optimizer update of the groups
  double communication_s = 0;  // all-gathers and reductions from start to end; concurrent ones each count
  // Overlapped fraction: 1 - waited / communication, over all traced steps; 1 without communication. An operation that
  // needed no wait counts until it was used, so this is an upper bound (docs/trace.md).
  double hidden = 1;
  std::string file;     // the trace of all ranks, or this rank's part
  bool joined = false;  // `file` contains all ranks
};

}  // namespace zero
