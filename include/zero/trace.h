// A trace of what a run does in time: which steps of it, and what its slices add up to. Engine::start_trace() writes
// it, docs/trace.md tells how to read it.
#pragma once
#include <cstdint>
#include <limits>
#include <string>

#include <zero/export.h>

namespace zero {

// Optimizer steps that a trace shows, counted from its start: 1 is the first that begins after it. Both are shown.
struct ZERO_API TraceSteps {
  std::int64_t first = 1, last = std::numeric_limits<std::int64_t>::max();

  // For programs that cannot choose: the first two steps learn the order of the groups and make what later ones keep.
  static constexpr TraceSteps after_warmup() { return {3, 22}; }
  // "A:B", "A:" or "A". Throws ConfigError that names `source`.
  static TraceSteps parse(const std::string& text, const std::string& source);
};

// Seconds of this rank since its Engine began; what each number means is said below. Engine::times() fills it when the
// configuration's wall_clock_breakdown is true; take differences.
struct StepTimes {
  double compute_s = 0, gather_wait_s = 0, reduce_wait_s = 0, optimizer_s = 0;
};

// Medians over the traced steps of this rank (the first 1,024 of them), in seconds.
struct TraceSummary {
  std::int64_t steps = 0;
  double step_s = 0;           // from the first use of a parameter to the end of Engine::step()
  double compute_s = 0;        // forward and backward, less the waits within them
  double gather_wait_s = 0;    // this thread stood still for a gather, a file, or the publication of new parameters
  double reduce_wait_s = 0;    // for a reduction; sums that the waiting thread takes itself are in it
  double optimizer_s = 0;      // updates of the groups
  double communication_s = 0;  // gathers, publications and reductions from begin to end; those at once count each
  // 1 - waited / communication, over all traced steps together; 1 where there was none. An operation that nobody had
  // to wait for counts until it was asked for, so this is an upper bound (docs/trace.md).
  double hidden = 1;
  std::string file;     // the trace: of all ranks, or this rank's part
  bool joined = false;  // `file` has all ranks
};

}  // namespace zero
