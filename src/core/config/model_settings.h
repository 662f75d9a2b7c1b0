// The typed values of `zero train`'s built-in model and its data. Plain data, as settings.h, which includes it.
#pragma once
#include <cstdint>
#include <string>

namespace zero::config {

// Experts (zero/moe.h has these names) in place of the MLP of every expert_interval-th block of the built-in GPT.
struct ExpertSettings {
  std::int64_t num_experts = 0;  // of a block; 0: none
  std::int64_t expert_interval = 2;
  int ep_size = 1, k = 1;
  double capacity_factor = 1, eval_capacity_factor = 1;
  std::int64_t min_capacity = 4;
  bool drop_tokens = true, use_rts = true, top2_2nd_expert_sampling = true, use_residual = false;
  std::string noisy_gate_policy = "None";
  double aux_loss = 0.01;  // factor of the sum of the auxiliary losses

  // Ranks that share the experts of a block.
  int degree() const { return num_experts > 0 ? ep_size : 1; }
};

// The built-in GPT of `zero train`. `size` names a preset ("gpt-1m" ... "gpt2-xl"); numbers other than 0 replace the
// preset's.
struct ModelSettings {
  std::string size = "gpt-1m";
  std::int64_t layers = 0, hidden = 0, heads = 0, seq_length = 0, vocabulary = 0;
  double dropout = 0;
  bool tied = true;  // the output layer shares the token embedding
  ExpertSettings experts;
};

struct DataSettings {
  std::string text;       // file; empty: given on the command line
  double holdout = 0.05;  // fraction at the end of the file that is not trained on
  std::int64_t eval_batches = 32;
};

}  // namespace zero::config
