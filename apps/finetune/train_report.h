// The output of a `zero train` run: step lines or JSON on stdout, a progress line on terminals, and the files of the
// run folder. On ranks other than 0 all calls have no effect.
#pragma once
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zero/monitor.h>

#include "apps/finetune/task.h"
#include "apps/finetune/train.h"
#include "tools/report/page/expert_load.h"
#include "tools/report/text/axis_bytes.h"
#include "tools/report/text/memory_phases.h"
#include "tools/report/text/progress.h"
#include "tools/report/text/step_line.h"
#include "tools/support/console.h"

namespace zero::cli {

struct TrainSummary {
  std::int64_t steps = 0;  // reached
  std::int64_t skipped = 0;
  double final_loss = 0;    // mean over the last tenth of the run, at most 50 steps
  double seconds = 0;       // in steps of this start, without evaluation and saving
  double tokens_per_s = 0;  // over these seconds
  report::Degrees mesh;
  std::optional<report::AxisBytes> sent;  // by rank 0 in the last step, if ranks exchange activations
  std::optional<double> heldout;          // mean loss, in the unit of the training loss
  TaskMetrics metrics;                    // of the held-out part
  std::int64_t heldout_samples = 0;
  std::string loss_unit = "nats per byte";
  std::vector<TaskSample> samples;
  report::MemoryPhases memory;
  std::uint64_t peak_bytes = 0;  // of the whole run, on rank 0's device
  std::string checkpoint;        // path of the last checkpoint
  int stopped_by = 0;            // the signal that ended the run early, or 0
  std::optional<TraceSummary> trace;
};

class TrainReport {
 public:
  // Creates the run folder and config.json, later log.jsonl and other files. Throws IoError.
  TrainReport(const Global& global, const TrainPlan& plan, int rank);
  ~TrainReport();

  // Prints a line on stderr, from `level` on.
  void note(LogLevel level, const std::string& text);
  // Whether a step line is due after that step; the same on every rank.
  bool prints(std::int64_t step) const { return print_every_ > 0 && (step % print_every_ == 0 || step == total_); }
  // `samples`: of all ranks so far.
  void step(const report::StepRow& row, std::int64_t samples);
  // An evaluation between steps, or the last one.
  void evaluated(const report::HeldoutRow& row, std::int64_t samples);
  // How many tokens chose each expert in the last step.
  void load(const report::ExpertLoad& of_step);
  // Prints tables, loss curve and sample on stdout (nothing with --json); writes sample.txt and result.json.
  void finish(const TrainSummary& summary);
  // For signal handlers: whether a progress line may have to be erased.
  bool draws() const { return draws_; }
  const std::string& folder() const { return folder_; }

 private:
  void open_folder(const TrainPlan& plan);
  void write_file(const std::string& name, const std::string& text);
  void write_line(const std::string& object);
  void write_load();
  std::string result_json(const TrainSummary& summary) const;

  bool active_, json_, draws_ = false, lines_ = true;
  LogLevel least_;
  report::Terminal out_;
  std::int64_t print_every_ = 0, total_ = 0;
  std::string folder_;
  std::ofstream log_, load_log_;
  report::ExpertLoad load_;       // of the next line of load_log_
  report::ExpertLoad last_load_;  // of the last one
  std::unique_ptr<report::ProgressLine> progress_;
  double shown_tokens_per_s_ = 0;
  Monitor monitor_;
  std::vector<std::pair<std::int64_t, double>> curve_;
};

}  // namespace zero::cli
