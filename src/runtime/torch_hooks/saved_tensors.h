// Selects per thread what happens to a tensor that autograd saves: a checkpointed segment drops it
// (activation_checkpoint.cpp); otherwise the thread's policy, if any, handles it. Implemented by replacing libtorch's
// autograd engine, whose virtual function autograd queries.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace zero::torch_hooks {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

// The inputs of one segment, from the end of its first run until its graph is freed.
class CheckpointFrame {
 public:
  virtual ~CheckpointFrame() = default;
  // Hooks for the next input, in order; nullptr: autograd saves it as usual.
  virtual std::unique_ptr<SavedTensorHooks> input(const at::Tensor& tensor) = 0;
  // Called around a recomputation, including its inputs. end_again() is not called after an exception.
  virtual void begin_recompute() = 0;
  virtual void end_again() = 0;
};

// Policy for tensors saved between forward and backward. Called by the thread that installed it; hooks and frames may
// be called by any thread.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  // Hooks for a tensor saved outside of segments; nullptr: autograd saves it as usual.
  virtual std::unique_ptr<SavedTensorHooks> saved() = 0;
  // Called when an outermost segment begins and ends its first run. May throw; nullptr: the inputs are not managed.
  virtual void begin_segment() = 0;
  virtual std::shared_ptr<CheckpointFrame> end_segment() = 0;
};

// This thread's policy; nullptr: none.
const std::shared_ptr<SavedTensorPolicy>& saved_tensor_policy();
// Throws ConfigError if another autograd engine is installed (install_engine).
void set_saved_tensor_policy(std::shared_ptr<SavedTensorPolicy> now);

// Called around every run of a checkpointed segment in this thread: the first one and recomputations.
class SegmentListener {
 public:
  virtual ~SegmentListener() = default;
  virtual void begin_run() = 0;
  virtual void end_run() noexcept = 0;
};
// Sets this thread's listener, as long as the object exists.
void set_segment_listener(std::weak_ptr<SegmentListener> listener);
// RAII guard of one run.
class SegmentRun {
 public:
  SegmentRun();
  ~SegmentRun() {
    if (listener_) listener_->end_run();
  }
  SegmentRun(const SegmentRun&) = delete;
  SegmentRun& operator=(const SegmentRun&) = delete;

 private:
  const std::shared_ptr<SegmentListener> listener_;
};

// RAII guard: overrides this thread's policy by `now`; nullptr disables it.
class Recorder {
 public:
  virtual ~Recorder() = default;
  virtual std::unique_ptr<SavedTensorHooks> hooks() = 0;
};
class Recording {
 public:
  explicit Recording(Recorder* now);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  // Whether a Recording is active in this thread.
  static bool active();

 private:
  Recorder* before_;
  bool silent_before_;
};

// Whether libtorch's autograd engine is its own or that of install_engine(); in Python programs it is Python's.
bool may_install_engine();
// Permanently replaces libtorch's autograd engine. Throws ConfigError if another replacement is installed.
void install_engine();

// Whether this is a parameter or a view of one, of an Engine or not; it exists in backward anyway.
bool is_parameter(const at::Tensor& tensor);

// A tensor's version when it was saved. Autograd does not check tensors with hooks for in-place writes.
class SavedVersion {
 public:
  SavedVersion() = default;
  explicit SavedVersion(const at::Tensor& tensor);
  bool unchanged() const { return !counter_.enabled() || counter_.current_version() == version_; }
  std::uint32_t value() const { return version_; }

 private:
  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
};

}  // namespace zero::torch_hooks
