// Low-rank adaptation (Hu et al., "LoRA", 2106.09685): a linear layer keeps its weight and adds B A x * alpha / rank.
// Plain torch::nn. Names and first values are those of PEFT: the factors of the layer `q_proj` are
// q_proj.lora_A.weight [rank, in] and q_proj.lora_B.weight [out, rank].
#pragma once
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace models {

struct LoraOptions {
  std::int64_t rank = 8;
  double alpha = 8;    // the sum is multiplied by alpha / rank
  double dropout = 0;  // of the factors' input, in training mode
  double scale() const { return alpha / static_cast<double>(rank); }
};

// The layers that were given factors, and what holds for all of them.
class Lora {
 public:
  // Gives factors to every layer (adaptable.h) of `model` whose path ("model.layers.0.self_attn.q_proj") `chosen`
  // accepts, and freezes all parameters of the model except the factors and those whose name `kept` accepts. A is drawn
  // from U(-1/sqrt(in), 1/sqrt(in)), which is Kaiming's with a = sqrt(5), in the order of the paths; B is zero, so that
  // the model computes what it did. Throws std::invalid_argument for a rank below 1, a dropout that is no probability,
  // if no layer is chosen, and for a layer whose weight has another name too (a tied output).
  Lora(torch::nn::Module& model, const LoraOptions& options, const std::function<bool(const std::string&)>& chosen,
       const std::function<bool(const std::string&)>& kept = nullptr);

  const std::vector<std::string>& layers() const { return paths_; }
  const LoraOptions& options() const;
  // For one layer: weight += B A * alpha / rank, in fp32, rounded to the weight's dtype. From then on the layer
  // computes with its weight alone. Its weight and factors must be readable and the weight writable.
  void merge(const std::string& path);
  // Adds elements [begin, begin + values.size()) of the flattened B A * alpha / rank to `values`. a: [rank, in],
  // b: [out, rank], in fp32 on the CPU, contiguous. Each element is summed in the order of the rank's index, so that
  // its bits do not depend on the range.
  static void add_change(const at::Tensor& a, const at::Tensor& b, double scale, std::int64_t begin,
                         std::span<float> values);
  // Names of the factors' parameters.
  std::vector<std::string> parameters() const;

  // Whether a parameter's name is that of a factor.
  static bool is_factor(const std::string& name);

 private:
  struct Layer;
  struct State;
  std::shared_ptr<State> state_;
  std::vector<std::string> paths_;
};

}  // namespace models
