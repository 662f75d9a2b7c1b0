// Builds a module without memory. Inside a recording, the tensors that a module creates have a storage object without
// data, and their in-place initializers are recorded. Replay in program order gives the same bits, and the same state
// of the random number generator, as an eager build.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zero::torch_hooks {

class DeferredTape;

// RAII guard: records in this thread.
class DeferredRecording {
 public:
  // device: of deferred_device().
  explicit DeferredRecording(at::Device device = at::kCPU);
  ~DeferredRecording();
  DeferredRecording(const DeferredRecording&) = delete;
  DeferredRecording& operator=(const DeferredRecording&) = delete;

 private:
  std::shared_ptr<DeferredTape> tape_;
};

// Of a recording in this thread, if there is one: runs what was recorded, so that the default generator is where an
// eager run has it; and continues from where the program has left it.
void lend_generator();
void take_generator();

// Whether the tensor was created in a recording and has no data yet.
bool is_deferred(const at::Tensor& tensor);
// Where the values of a tensor that was created in a recording go, also if it has them already; else its device.
at::Device deferred_device(const at::Tensor& tensor);

// A tensor without data whose values others have, until replay_deferred() calls fill(tensor), which writes all of them.
// device: where they go, as of deferred_device(). Those of one replay are filled in the order of `place`, one at a
// time, so that fill() may be collective if all ranks have the same places.
at::Tensor deferred_values(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, std::int64_t place,
                           std::function<void(const at::Tensor&)> fill);

// The initial states of the random number generators of the recordings of `tensors`, as bytes; and their replacement
// before a replay, so that ranks with different seeds draw the same values. After a replacement, the replay does not
// change the process's own generator.
std::string deferred_generators(const std::vector<at::Tensor>& tensors);
void set_deferred_generators(const std::vector<at::Tensor>& tensors, const std::string& states);

// Replays all recordings that `tensors` belong to, then fills those of deferred_values(). After the last initializer of
// a tensor, calls finished(i) with its index in `tensors`; the callee takes the data and may free it. Tensors without
// an initializer are allocated uninitialized, as by torch::empty, and finished last.
void replay_deferred(const std::vector<at::Tensor>& tensors, const std::function<void(std::size_t)>& finished);

}  // namespace zero::torch_hooks
