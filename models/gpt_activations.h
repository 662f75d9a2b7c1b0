// Bytes that the GPT of gpt.h keeps for backward, by formula: what activation checkpointing leaves, and what it takes
// to run a segment again. Derived from what each operation saves (docs/activations.md); nothing is measured here.
#pragma once
#include <algorithm>
#include <cstdint>

#include "models/gpt_config.h"

namespace models {

// Peaks within one forward and backward of `batch` samples of config.sequence tokens, in bytes. Parameters, their
// gradients at rest and the tokens themselves are not in it.
struct GptActivations {
  std::int64_t layers;  // while backward passes the last segment: all that is kept, that segment, its first gradients
  std::int64_t head;    // logits and their gradient, with all that is kept
  std::int64_t tokens;  // at the end of backward: the gradients of the embeddings
  std::int64_t peak() const { return std::max({layers, head, tokens}); }
};

// `element`: bytes of an activation (4 for fp32, 2 for fp16 and bf16). segments: as in run_layers_by(); 0: no layer
// runs again. Without dropout, on the CPU, whose attention keeps no scores. What libtorch's matrix product of 16-bit
// numbers takes for itself on some CPUs is not in it; at the peak of `layers` it is that of [tokens, hidden] times
// [hidden, 4 hidden].
GptActivations activations_of(const GptConfig& config, std::int64_t batch, std::int64_t element, std::int64_t segments);

}  // namespace models
