// The shape of GPT (gpt.h), for code without torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch::nn {
class AnyModule;
}

namespace models {

struct GptConfig {
  std::int64_t layers = 4, hidden = 128, heads = 4;
  std::int64_t sequence = 128;    // longest input, in tokens
  std::int64_t vocabulary = 256;  // 256: bytes
  double dropout = 0;             // after embeddings, attention and each residual branch
  bool tied_output = true;        // the output layer's weight is the token embedding
  double deviation = 0.02;        // of initial weights; of projections into the residual stream: / sqrt(2 layers)
  // Makes the second half of a layer, which reads the normalised residual stream, in place of the MLP; an empty module:
  // the layer keeps its MLP. Its forward(x, at::Tensor()), x of shape [.., hidden], returns a std::tuple of three
  // tensors: the result, of x's shape; an auxiliary loss, a scalar in fp32; and one that the model ignores. Null: MLPs.
  std::function<torch::nn::AnyModule(const GptConfig&, std::int64_t layer)> mlp = nullptr;

  // "gpt-1m" and "gpt-10m" have a vocabulary of bytes; "gpt2" (also "gpt2-small"), "gpt2-medium", "gpt2-large" and
  // "gpt2-xl" have the published shapes. Throws std::invalid_argument for another name.
  static GptConfig preset(const std::string& name);
  static std::vector<std::string> preset_names();

  // Elements of all parameters, by formula, without `mlp`; a tied output layer counts once.
  std::int64_t num_parameters() const;
  // Throws std::invalid_argument that names the field.
  void validate() const;
};

// Elements of logits that cross_entropy() converts to fp32 at a time. 1 MiB stays in a CPU's cache between passes; a
// GPU needs longer kernels and uses 256 MiB.
constexpr std::int64_t loss_row_elements(bool gpu) { return gpu ? 1 << 26 : 1 << 18; }
constexpr std::int64_t loss_rows(std::int64_t vocabulary, bool gpu) {
  return std::max<std::int64_t>(1, loss_row_elements(gpu) / std::max<std::int64_t>(1, vocabulary));
}

}  // namespace models
