// What `zero train` keeps for `zero report`: run.json in the run folder, written at the start without a step, and again
// with one step in detail when that step is done (bytes by phase, samples and slices from a trace of it, traffic).
// Every rank goes through the same calls, for a trace is collective; rank 0 writes. Off that step it costs nothing.
#pragma once
#include <cstdint>
#include <string>

#include <zero/zero.h>

#include "cli/train/train.h"
#include "report/page/run_record.h"
#include "report/text/memory_phases.h"

namespace zero::cli {

class RunRecorder {
 public:
  // `folder` is rank 0's, empty elsewhere.
  RunRecorder(const TrainPlan& plan, Engine& engine, c10::Device device, const std::string& folder);

  // Steps done before are `first`; the step that will be recorded is the third after it, or the last. Collective.
  void begin(std::int64_t first);
  // Counted from 0.
  std::int64_t step() const { return step_; }
  // Memory of the recorded step; peaks are those since the step before began. Resetting them lets go of what an engine
  // keeps for the next step, so the recorded one must not.
  void note(report::Phase phase, const MemoryReport& memory);
  // The recorded step begins, and is done. end_step() is collective.
  void begin_step();
  void end_step();
  // The trace that --trace asked for is complete: its first step becomes the timeline. Not collective.
  void take_trace(const std::string& file);

 private:
  void write() const;
  void read_timeline(const std::string& file);

  const TrainPlan& plan_;
  Engine& engine_;
  Communicator& comm_;
  std::string folder_, trace_file_;
  bool tracing_ = false, trace_is_own_ = false;
  std::int64_t step_ = -1;
  CommStats before_;
  report::RunRecord record_;
};

}  // namespace zero::cli
