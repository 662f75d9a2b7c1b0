// One forward and backward of the GPT of gpt.h as what they do to memory: which operator reads which parameters, what
// it allocates, what is saved for backward and when autograd lets go of it, operator by operator (gpt.cpp beside
// libtorch's CPU kernels). For whoever plans a run without torch; nothing is computed here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "models/gpt_config.h"

namespace models {

// Is told of a pass, event after event. Tensors are numbered in the order of their making, parameters in the order of
// registration.
class PassListener {
 public:
  virtual ~PassListener() = default;
  virtual void allocated(std::int64_t tensor, std::int64_t bytes) = 0;
  virtual void released(std::int64_t tensor) = 0;
  // An operator reads the parameters first .. first + count - 1.
  virtual void used(std::size_t first, std::size_t count) = 0;
  // Layers that run again in backward (run_layers_by()) run for the first time; their input is kept for the second.
  virtual void segment_begins(std::int64_t input) = 0;
  virtual void segment_ends() = 0;
  // The last of the segments that are left is about to run again; its input comes back as that tensor.
  virtual void segment_runs_again(std::int64_t input) = 0;
  virtual void backward_begins() = 0;
  // The whole gradient, which the model does not hold any more.
  virtual void gradient(std::size_t parameter, std::int64_t tensor) = 0;
  virtual void backward_ends() = 0;
};

struct GptBatch {
  std::int64_t samples = 1;   // of config.sequence tokens
  std::int64_t segments = 0;  // as in run_layers_by(); 0: no layer runs again
  std::int64_t element = 4;   // bytes of an activation
  bool gpu = false;
};

// Without dropout, with fused attention.
void describe_pass(const GptConfig& config, const GptBatch& batch, PassListener& listener);

}  // namespace models
