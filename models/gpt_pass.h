// The memory behaviour of one forward and backward of the GPT of gpt.h, operator by operator: which parameters an
// operator reads, what it allocates, what is saved for backward and when autograd releases it. It follows gpt.cpp and
// libtorch's CPU kernels. Used to plan runs without torch; nothing is computed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "models/gpt_config.h"

namespace models {

// Receives the events of a pass in order. Tensors are numbered in the order of allocation, parameters in the order of
// registration.
class PassListener {
 public:
  virtual ~PassListener() = default;
  virtual void allocated(std::int64_t tensor, std::int64_t bytes) = 0;
  virtual void released(std::int64_t tensor) = 0;
  // An operator reads the parameters first .. first + count - 1.
  virtual void used(std::size_t first, std::size_t count) = 0;
  // The first run of a checkpointed segment (run_layers_by()) begins; its input is kept for recomputation.
  virtual void segment_begins(std::int64_t input) = 0;
  virtual void segment_ends() = 0;
  // The last remaining segment is about to be recomputed; `input` is the number of its restored input.
  virtual void segment_runs_again(std::int64_t input) = 0;
  virtual void backward_begins() = 0;
  // The complete gradient; the listener now owns the tensor.
  virtual void gradient(std::size_t parameter, std::int64_t tensor) = 0;
  virtual void backward_ends() = 0;
};

struct GptBatch {
  std::int64_t samples = 1;   // of config.sequence tokens
  std::int64_t segments = 0;  // as in run_layers_by(); 0: no recomputation
  std::int64_t element = 4;   // bytes of an activation element
  bool gpu = false;
  // Of what one rank of a mesh computes: tokens of a sample, attention heads, inner columns of the MLP, rows of the
  // vocabulary. 0: all. gathered_logits: a cut vocabulary's logits are gathered, else the loss takes the part.
  std::int64_t tokens = 0, heads = 0, inner = 0, vocabulary = 0;
  bool gathered_logits = true;
  std::vector<bool> fp32{};  // of each parameter, in the order of registration: it is fp32; empty: none of 16 bits is
};

// Without dropout, with fused attention. Gradients of cut weights have their parts' sizes.
void describe_pass(const GptConfig& config, const GptBatch& batch, PassListener& listener);

}  // namespace models
