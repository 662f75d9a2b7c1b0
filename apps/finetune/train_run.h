// One training run on this rank: the loop, agreements between ranks (loss, stop signals), held-out loss, sample,
// checkpoints. Reads a TrainPlan, writes through a TrainReport.
#pragma once
#include <memory>

#include <zero/library.h>

#include "apps/finetune/run_recorder.h"
#include "apps/finetune/task.h"
#include "apps/finetune/train.h"
#include "apps/finetune/train_report.h"

namespace zero::cli {

class TrainRun {
 public:
  // device: of the model.
  TrainRun(const TrainPlan& plan, TrainTask& task, Engine& engine, c10::Device device, TrainReport& report);

  // Loads the checkpoint of --resume, trains, evaluates, samples, saves. Returns the exit code.
  int run();

 private:
  void resume();
  void take_initial_weights();
  void import_weights();
  // One optimizer step.
  void step(StepResult& result, report::StepRow& row);
  // Seconds, after the device has finished its work.
  double now() const;
  std::uint64_t peak_bytes() const;
  void note_position();  // in the data, in the text that checkpoints store
  void keep_snapshot();
  void save();
  void save_weights();
  void save_under(const std::string& tag, const SaveOptions& options);
  void note_saved();
  void complete_save();
  void save_last();
  bool prunes() const { return plan_.keep > 0 || plan_.keep_weights > 0; }
  void remove_old();
  void end_trace();
  void evaluate();
  void evaluate_between_steps();
  void report_evaluation();
  std::int64_t samples_per_step() const;
  double evaluations_left(std::int64_t step) const;  // after that step, with the last one
  void write_samples();
  void export_weights();

  const TrainPlan& plan_;
  TrainTask& task_;
  c10::Device device_;
  Engine& engine_;
  TrainReport& report_;
  Communicator& comm_;
  const Mesh& mesh_;
  const TaskFacts facts_;
  TrainSummary summary_;
  std::int64_t saved_step_ = -1;
  std::string saving_;  // tag of the checkpoint that is being written; empty: none
  bool saving_weights_ = false;
  double save_begun_ = 0, evaluation_seconds_ = 0;
  std::string resumed_tag_;  // stays when older ones are removed; empty: none
  RunRecorder recorder_;
  std::int64_t measured_step_ = 0;  // the step whose memory is shown
};

}  // namespace zero::cli
