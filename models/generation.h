// Generation of text: how the next token is chosen, and the loop that all models share. Models keep keys and values of
// earlier tokens (models/decoding.h), so a step reads the newest tokens only.
#pragma once
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace models {

// How generate() chooses the next token, and when it ends.
struct Sampling {
  double temperature = 1;  // 0: the most likely token
  std::int64_t top_k = 0;  // choose among the k most likely; 0: among all
  // Choose among the most likely tokens that have this probability together (Holtzman et al., 1904.09751), at least
  // one; 1: among all. After temperature and top_k.
  double top_p = 1;
  std::uint64_t seed = 1;  // of a separate generator; torch's generators are not used
  // A row ends with any of them; then pad_token fills it. Empty: rows do not end.
  std::vector<std::int64_t> eos_tokens = {};
  std::int64_t pad_token = 0;
  // Asked after every token whether to stop; gets whether all rows have ended; null: stop then. At stage 3 all ranks
  // must run a model equally often: ranks with rows of their own agree here, by the smallest of their answers.
  std::function<bool(bool ended)> stop = nullptr;

  // Throws std::invalid_argument that names every field at fault.
  void validate() const;
};

// logits [batch, vocabulary] in fp32, divided by the temperature; minus infinity for tokens that top_k and top_p leave
// out. temperature > 0.
at::Tensor filtered_logits(const at::Tensor& logits, const Sampling& sampling);

// The logits [batch, vocabulary] of what follows all tokens so far; gets those that it has not got yet, first the
// prompt.
using NextLogits = std::function<at::Tensor(const at::Tensor& newest)>;
// tokens: int64 [batch, time >= 1]. Returns them followed by at most `count` tokens. Without gradients; `model` is in
// evaluation mode meanwhile. Throws std::invalid_argument for bad arguments.
at::Tensor generate_by(torch::nn::Module& model, const NextLogits& next, at::Tensor tokens, std::int64_t count,
                       const Sampling& sampling);

}  // namespace models
