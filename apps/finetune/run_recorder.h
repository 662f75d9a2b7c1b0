// The record that `zero train` keeps for `zero report`: run.json in the run folder, written at the start without a
// step, and again after one step with its details (bytes by phase, samples and slices of its trace, traffic). All ranks
// make the same calls, because a trace is collective; rank 0 writes. No cost in other steps.
#pragma once
#include <cstdint>
#include <string>

#include <zero/library.h>

#include "apps/finetune/task.h"
#include "apps/finetune/train.h"
#include "tools/report/page/run_record.h"
#include "tools/report/text/memory_phases.h"

namespace zero::cli {

class RunRecorder {
 public:
  // `folder`: rank 0's; empty on other ranks.
  RunRecorder(const TrainPlan& plan, const TaskFacts& facts, Engine& engine, c10::Device device,
              const std::string& folder);

  // first: steps completed before. Records the third step after it, or the last. Collective.
  void begin(std::int64_t first);
  // Counted from 0.
  std::int64_t step() const { return step_; }
  // Memory of the recorded step; peaks since the previous step began. Resetting peaks frees buffers that an engine
  // keeps for the next step, so the recorded step must not reset them.
  void note(report::Phase phase, const MemoryReport& memory);
  // Begin and end of the recorded step. end_step() is collective.
  void begin_step();
  void end_step();
  // The trace of --trace is complete: its first step becomes the timeline. Local.
  void take_trace(const std::string& file);
  // Of the held-out part, the same on all ranks. Local.
  void take_metrics(const TaskMetrics& metrics);

 private:
  void write() const;
  void read_timeline(const std::string& file);
  // Collective.
  void collect_ranks();

  const TrainPlan& plan_;
  Engine& engine_;
  Communicator& comm_;
  const report::Degrees mesh_;
  std::string folder_, trace_file_;
  bool tracing_ = false, trace_is_own_ = false;
  std::int64_t step_ = -1;
  CommStats before_;
  report::RankRow own_;
  report::RunRecord record_;
};

}  // namespace zero::cli
