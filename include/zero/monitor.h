// Writes metrics for TensorBoard and as CSV, as the configuration's blocks `tensorboard` and `csv_monitor` specify.
// `zero train` uses it; other programs call it after Engine::step(). All calls are local.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// The tags of DeepSpeed's monitors.
namespace monitor_tag {
inline constexpr const char* kLr = "Train/Samples/lr";
inline constexpr const char* kLossScale = "Train/Samples/loss_scale";
inline constexpr const char* kTrainLoss = "Train/Samples/train_loss";
inline constexpr const char* kGradNorm = "Train/Samples/grad_norm";
inline constexpr const char* kForwardMs = "Train/Samples/elapsed_time_ms_forward";
inline constexpr const char* kBackwardMs = "Train/Samples/elapsed_time_ms_backward";
inline constexpr const char* kBackwardInnerMs = "Train/Samples/elapsed_time_ms_backward_inner";
inline constexpr const char* kBackwardAllreduceMs = "Train/Samples/elapsed_time_ms_backward_allreduce";
inline constexpr const char* kStepMs = "Train/Samples/elapsed_time_ms_step";
// Of evaluations of the held-out part; "Eval/f1" and others are a task's metrics.
inline constexpr const char* kEvalPrefix = "Eval/";
inline constexpr const char* kEvalLoss = "Eval/heldout_loss";
}  // namespace monitor_tag

class ZERO_API Monitor {
 public:
  // Opens the files in output_path/job_name. On ranks other than 0, or with both blocks disabled, opens nothing and
  // write() has no effect. Throws IoError.
  Monitor(const Options& options, int rank);
  ~Monitor();
  Monitor(Monitor&&) noexcept;
  Monitor& operator=(Monitor&&) noexcept;

  bool active() const;
  // Writes values by tag. `samples`: samples trained on by all ranks so far (global step x train_batch_size). The
  // values are in the files when it returns. Throws IoError.
  void write(const std::vector<std::pair<std::string, double>>& values, std::int64_t samples);

 private:
  struct Files;
  std::unique_ptr<Files> files_;
};

}  // namespace zero
