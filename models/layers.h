// What the models for Hugging Face's weights are made of: linear layers, RMSNorm, rotary positions, attention with
// masks and kept keys and values, and segments of layers. Plain torch::nn and tensors.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "models/adaptable.h"
#include "models/model_configs.h"

namespace models {

// y = x weight^T + bias. weight: [out, in]; bias: [out] or undefined.
struct LinearImpl : torch::nn::Module, Adaptable {
  // Weight from normal(0, deviation), bias zero.
  LinearImpl(std::int64_t in, std::int64_t out, bool with_bias, double deviation);
  // Shares parameters with another module: a tied output layer. bias: may be undefined.
  LinearImpl(const at::Tensor& shared_weight, const at::Tensor& shared_bias);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;
};
TORCH_MODULE(Linear);

// rms_norm() of models/fused.h with a weight that starts at `initial`.
struct RmsNormImpl : torch::nn::Module {
  RmsNormImpl(std::int64_t width, double epsilon, double initial = 1);
  at::Tensor forward(const at::Tensor& x);

 private:
  double epsilon_;
  at::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

// torch::nn::LayerNorm for an input and parameters of one dtype. If they differ it computes in fp32, and the result has
// the narrowest of their dtypes: libtorch has kernels for that on a CPU only, and only for 16-bit inputs.
struct LayerNormImpl : torch::nn::LayerNormImpl {
  LayerNormImpl(std::int64_t width, double epsilon);
  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(LayerNorm);

// A parameter's first values, from normal(0, deviation) in the default dtype.
at::Tensor drawn(at::IntArrayRef sizes, double deviation);
// Rows from normal(0, deviation); that of `padding` is zero and gets no gradient by lookups (-1: none).
torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t width, double deviation, std::int64_t padding = -1);
// The same parameter under another name.
torch::nn::Embedding share_embedding(const at::Tensor& weight);
LayerNorm make_layer_norm(std::int64_t width, double epsilon = 1e-5);
// An empty module `name` below `parent`, for the names of its children.
std::shared_ptr<torch::nn::Module> make_path(torch::nn::Module& parent, const std::string& name);

at::Tensor activate(Activation activation, const at::Tensor& x);

// Cosines and sines of rotary positions (Su et al., 2104.09864) in fp32: [.., width], the two halves equal, as
// transformers lays them out. positions: int64 [..].
struct Rotary {
  at::Tensor cos, sin;
};
Rotary rotary_of(const LlamaConfig& config, const at::Tensor& positions);

// Which keys a query may see. added: a float tensor that is added to scores, broadcastable to [batch, heads, queries,
// keys], or undefined.
struct Visible {
  at::Tensor added;
  bool causal = false;  // without `added`: a query sees its own and earlier keys
};
// mask: [batch, keys], 0 or false where a token is padding, or [batch, queries, keys], true where a query may see a
// key; undefined: all. What is masked entirely sees everything instead, so that its rows, which nobody reads, stay
// finite. causal: the queries are the last of the keys. like: has the result's dtype and device. Throws c10::Error for
// other shapes.
Visible visible(const at::Tensor& mask, std::int64_t queries, std::int64_t keys, bool causal, const at::Tensor& like);

// [batch, time, heads * width] as [batch, heads, time, width], and back.
at::Tensor split_heads(const at::Tensor& x, std::int64_t heads);
at::Tensor merge_heads(const at::Tensor& x);
// Scaled dot-product attention. k, v: [batch, kv heads, keys, width] with kv heads that divide q's heads. scale: none:
// width^-0.5.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Visible& visible, double dropout,
                  std::optional<double> scale = {});

// Keys and values of one attention layer at earlier time steps, for generation. Without gradients.
class KeyValues {
 public:
  // k, v: [batch, heads, new, width]. Returns all so far, views of the kept ones.
  std::pair<at::Tensor, at::Tensor> append(const at::Tensor& k, const at::Tensor& v);
  std::int64_t length() const { return length_; }

 private:
  at::Tensor k_, v_;
  std::int64_t length_ = 0;
};

// Layers in consecutive segments, each passed to a runner that may call it again in backward: the hook for activation
// checkpointing. A segment takes and returns [batch, time, hidden].
using Segment = std::function<at::Tensor(const at::Tensor& x)>;
using Runner = std::function<at::Tensor(const Segment& segment, const at::Tensor& x)>;
class Segments {
 public:
  // count segments of nearly equal length, at most one a layer; a null runner: none. Throws std::invalid_argument.
  void run_by(std::int64_t count, Runner runner);
  // Calls layer(i, x) for i = 0 .. layers - 1.
  at::Tensor run(std::int64_t layers, at::Tensor x,
                 const std::function<at::Tensor(std::int64_t layer, const at::Tensor& x)>& layer) const;

 private:
  std::int64_t count_ = 1;
  Runner runner_;
};

// Throws c10::Error unless tokens are integers [batch, 1 <= time <= longest].
void check_tokens(const char* where, const at::Tensor& tokens, std::int64_t longest);
// Throws std::invalid_argument with all lines of `faults`, if any.
void throw_faults(const char* where, const std::string& faults);

}  // namespace models
