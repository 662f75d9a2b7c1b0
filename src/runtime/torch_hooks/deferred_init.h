// Building a module without memory. Inside a scope the tensors a module makes get a storage
// object but no data, and their in-place initialisers are recorded; replayed later in program
// order they give the same bits, and leave the random generator in the same state, as an eager
// build.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zero::torch_hooks {

class DeferredTape;

// While it lives, this thread records.
class DeferredRecording {
 public:
  DeferredRecording();
  ~DeferredRecording();
  DeferredRecording(const DeferredRecording&) = delete;
  DeferredRecording& operator=(const DeferredRecording&) = delete;

 private:
  std::shared_ptr<DeferredTape> tape_;
};

// True when the tensor was made in a recording and has no data yet.
bool is_deferred(const at::Tensor& tensor);

// Where the generators of the recordings that `tensors` wait on stood at their start, as bytes; and
// putting them elsewhere before a replay, so that ranks whose programs were not seeded alike still
// draw the same values. A generator that was moved leaves the process's own one alone.
std::string deferred_generators(const std::vector<at::Tensor>& tensors);
void set_deferred_generators(const std::vector<at::Tensor>& tensors, const std::string& states);

// Replays every tape that any of `tensors` waits on. After the last initialiser of a tensor has
// run, finished(i) is called with its index in `tensors`: the callee takes the data and may free
// them. Tensors that no initialiser touches are allocated (as torch::empty leaves them) and
// finished at the end.
void replay_deferred(const std::vector<at::Tensor>& tensors, const std::function<void(std::size_t)>& finished);

}  // namespace zero::torch_hooks
