// The gate of a mixture of experts: which experts take which tokens, and with which weights. Arithmetic on one rank's
// tensors, without communication. The choices, and the order and shape of random draws, are those of DeepSpeed's gate
// on a CPU (deepspeed/moe/sharded_moe.py of 0.19.8): with one seed and the same logits both make the same choices,
// except where two gates are equal: here the lowest expert and the lowest token come first.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sharding/expert_capacity.h"

namespace zero::parallel {

struct GateOptions {
  std::int64_t experts = 1, k = 1;
  double capacity_factor = 1;  // of the mode, training or evaluation
  std::int64_t min_capacity = 4;
  bool drop_tokens = true;
  bool training = true;          // with noise and random selection
  bool noisy_logits = false;     // RSample: k = 1
  bool random_selection = true;  // RTS: k = 1
  bool second_sampling = true;   // k = 2
  bool keep_likeliest = true;    // k > 2: "probs"; false: "position"
};

using sharding::capacity;

// The choices for n tokens. Rows are the kept choices, ordered by expert, then by slot.
struct Routing {
  at::Tensor place;                    // int32 [n, k], CPU: the row of a token's choice, first to last; -1: not kept
  at::Tensor choice_of_row;            // int32 [rows], CPU: token * k + choice
  std::vector<std::int64_t> chosen;    // [experts]: choices before any were dropped
  std::vector<std::int64_t> balanced;  // [experts]: those that the auxiliary loss counts
  std::vector<std::int64_t> kept;      // [experts]
  at::Tensor expert;                   // int32 [n, k], CPU: the expert of a kept choice; of others undefined
  std::int64_t rows() const { return choice_of_row.size(0); }
};

// Not differentiable. logits: fp32 [n, experts], of any device; gates: their softmax. used_token: defined: [n], tokens
// with 0 take no part. Draws from the default generator of the CPU.
Routing route(const at::Tensor& logits, const at::Tensor& gates, const GateOptions& options,
              const at::Tensor& used_token);

// The weights of all choices, fp32 [n, k], 0 where not kept. Differentiable in `gates`.
at::Tensor choice_weights(const at::Tensor& gates, const Routing& routing, const GateOptions& options);
// Differentiable in `gates`; a scalar. 0 for no tokens.
at::Tensor auxiliary_loss(const at::Tensor& gates, const Routing& routing, const GateOptions& options);

// What noise of policy "Jitter" multiplies the gate's inputs by: uniform in [0.99, 1.01).
at::Tensor jitter(at::IntArrayRef sizes, at::TensorOptions options);

}  // namespace zero::parallel
