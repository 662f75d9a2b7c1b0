// Metrics of a run for TensorBoard and as CSV, as the configuration's blocks `tensorboard` and `csv_monitor` ask for.
// `zero train` uses it; a program with a loop of its own calls it after Engine::step().
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// Tags that DeepSpeed's monitors write, and TensorBoard pages made for them expect.
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
}  // namespace monitor_tag

class ZERO_API Monitor {
 public:
  // Opens what the options ask for, in output_path/job_name; on another rank than 0, or with both blocks off, nothing
  // is opened and write() does nothing. Throws IoError.
  Monitor(const Options& options, int rank);
  ~Monitor();
  Monitor(Monitor&&) noexcept;
  Monitor& operator=(Monitor&&) noexcept;

  bool active() const;
  // Values by tag at `samples`, the samples that all ranks have trained on so far (global step x train_batch_size).
  // In the files when it returns. Throws IoError.
  void write(const std::vector<std::pair<std::string, double>>& values, std::int64_t samples);

 private:
  struct Files;
  std::unique_ptr<Files> files_;
};

}  // namespace zero
