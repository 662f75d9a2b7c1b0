// Who answers when autograd saves a tensor. libtorch asks its engine, a virtual function, each time; here the answer is
// a matter of the thread: a segment that drops what is saved in it (activation_checkpoint.cpp), else the keeping that
// was installed in the thread, else nobody. What a keeping does with a tensor is not known here.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace zero::torch_hooks {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

// The inputs of one segment from the end of its first run until its graph is gone.
class CheckpointFrame {
 public:
  virtual ~CheckpointFrame() = default;
  // Hooks for an input, given in order; nullptr: autograd keeps it as it is.
  virtual std::unique_ptr<SavedTensorHooks> input(const at::Tensor& tensor) = 0;
  // Around a second run, inputs included; of an end after an exception nothing is told.
  virtual void begin_recompute() = 0;
  virtual void end_again() = 0;
};

// How what is between forward and backward is kept. Called by the thread it is installed in; hooks and segments by
// any thread.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  // Hooks for a tensor that is saved outside of segments; nullptr: autograd keeps it as it is.
  virtual std::unique_ptr<SavedTensorHooks> saved() = 0;
  // A segment, not one inside another, begins and ends its first run. May throw; nullptr: nothing to do.
  virtual void begin_segment() = 0;
  virtual std::shared_ptr<CheckpointFrame> end_segment() = 0;
};

// This thread's keeping; nullptr: none.
const std::shared_ptr<SavedTensorPolicy>& saved_tensor_policy();
// Throws ConfigError when another autograd engine is in use (install_engine).
void set_saved_tensor_policy(std::shared_ptr<SavedTensorPolicy> now);

// While it lives, `now` answers in this thread instead of the keeping; nullptr: nobody does.
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
  // Whether someone does in this thread.
  static bool active();

 private:
  Recorder* before_;
  bool silent_before_;
};

// Puts an engine that asks here in the place of libtorch's, for good. Throws ConfigError when someone else did that.
void install_engine();

// A parameter or a view of one, taken over by an Engine or not: it is there in backward anyway.
bool is_parameter(const at::Tensor& tensor);

// A tensor's version when it was saved. Tensors with hooks lose autograd's own check for writes in place.
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
