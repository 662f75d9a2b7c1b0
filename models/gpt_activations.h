// Bytes that the GPT of gpt.h saves for backward, by formula, with and without activation checkpointing, including the
// recomputation of a segment. Derived from what each operation saves (docs/activations.md); nothing is measured.
#pragma once
#include <algorithm>
#include <cstdint>

#include "models/gpt_config.h"

namespace models {

// Peaks within one forward and backward of `batch` samples of config.sequence tokens, in bytes, without parameters,
// their stored gradients and the tokens.
struct GptActivations {
  std::int64_t layers;  // during backward of the last segment: all saved tensors, that segment, its first gradients
  std::int64_t head;    // logits and their gradient, with all saved tensors
  std::int64_t tokens;  // at the end of backward: the gradients of the embeddings
  std::int64_t peak() const { return std::max({layers, head, tokens}); }
};

// `element`: bytes of an activation element (4 for fp32, 2 for fp16 and bf16). segments: as in run_layers_by(); 0: no
// recomputation. Without dropout, on the CPU, whose attention does not save scores. The workspace of libtorch's 16-bit
// matrix product on some CPUs is not included; at the peak of `layers` it is that of [tokens, hidden] times
// [hidden, 4 hidden].
GptActivations activations_of(const GptConfig& config, std::int64_t batch, std::int64_t element, std::int64_t segments);

}  // namespace models
