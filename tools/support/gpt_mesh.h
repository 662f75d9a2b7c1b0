// The built-in GPT on a mesh of data-, sequence- and tensor-parallel ranks: how its weights are cut, which tokens of a
// sample a rank has, and the exchanges of its attention.
#pragma once
#include <cstdint>

#include <zero/engine.h>
#include <zero/mesh.h>
#include <zero/options.h>

#include "models/gpt.h"

namespace zero::cli {

// Cuts the GPT between heads, unless the configuration says how to cut it. Throws ConfigError if there are fewer heads
// than ranks that divide them.
Options with_heads_whole(const Options& options, const models::GptConfig& model);

// Elements of the parameters; of an Engine's model, of this rank's parts.
std::int64_t elements_of(const torch::nn::Module& model);

// A rank's part of a forward and backward: its stretch of the tokens of every sample.
class GptShare {
 public:
  // `mesh` must outlive the share and the model. Divides the sequences.
  GptShare(models::Gpt model, const Mesh& mesh, const Options& options);

  // Whether sequence-parallel ranks see different parts of the samples.
  void divide_sequences(bool divide);
  // Mean loss over this rank's tokens. samples: int64 [n, sequence + 1].
  at::Tensor loss_of(const at::Tensor& samples);
  std::int64_t tokens_in(std::int64_t samples) const { return samples * (end_ - begin_); }
  // Gradients of the mean over the tokens of all ranks. `loss`: of `samples` samples; with experts, their auxiliary
  // losses in the same forward are added to it.
  void backward(Engine& engine, const at::Tensor& loss, std::int64_t samples);
  // The sum of these auxiliary losses, without their factor; undefined without experts.
  const at::Tensor& last_aux_loss() const { return aux_loss_; }

 private:
  models::Gpt model_;
  const Mesh& mesh_;
  std::int64_t begin_ = 0, end_ = 0;
  bool divided_logits_;  // over the vocabulary
  const double aux_factor_;
  at::Tensor aux_loss_;
};

}  // namespace zero::cli
