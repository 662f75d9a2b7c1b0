// A linear layer as tiles (memory-centric tiling, ZeRO-Infinity, Rajbhandari et al., arXiv:2104.07857, section 5.1.3),
// for layers that are larger than a unit should be. The words are those of DeepSpeed's zero.TiledLinear. Not part of
// zero.h: it needs torch's modules.
#pragma once
#include <cstdint>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <zero/export.h>

namespace zero {

// Of a module with a child "linears", lists of tiles: to an Engine every tile "linears.R.C" is a unit, also below a
// module that is one, and with libzero.units. Stage 3 then unshards one tile at a time, and the next while it computes.
// Tiles of experts that are divided over ranks belong to the unit of the experts.
struct ZERO_API TiledLayer {
  virtual ~TiledLayer() = default;
};

struct ZERO_API TiledLinearOptions {
  std::int64_t in_features, out_features;
  bool bias = true;
  std::int64_t in_splits = 1, out_splits = 1;  // from 1 to the features

  // ConfigError that lists all invalid options.
  void check() const;
};

// torch::nn::Linear as out_splits x in_splits layers: outputs of a row of tiles are added, rows are concatenated.
// Output and gradients are those of the whole layer up to rounding, since sums over in_features have in_splits parts.
// Where features do not divide, the first tiles have one more. Parameters: linears.R.C.weight, R from 0 to out_splits -
// 1, C from 0 to in_splits - 1, and linears.R.{in_splits - 1}.bias. Initial values have the distribution of the whole
// layer's.
class ZERO_API TiledLinearImpl : public torch::nn::Cloneable<TiledLinearImpl>, public TiledLayer {
 public:
  explicit TiledLinearImpl(TiledLinearOptions options);  // ConfigError
  void reset() override;

  // x: [.., in_features] -> [.., out_features].
  at::Tensor forward(const at::Tensor& x);
  // DeepSpeed's input_is_already_split and combine_out_splits=False: in_splits tensors [.., in_sizes[C]], or one whole
  // tensor -> out_splits tensors [.., out_sizes[R]]. ConfigError for another number of tensors.
  std::vector<at::Tensor> forward_parts(const std::vector<at::Tensor>& x);

  // Takes over the values of a layer of the same size, with or without a bias as this one. ConfigError for another.
  // Call it before an Engine has the parameters, or in a scope that modifies them.
  void copy_params_from(const torch::nn::LinearImpl& whole);
  void copy_params_from(const torch::nn::Linear& whole) { copy_params_from(*whole); }

  TiledLinearOptions options;
  std::vector<std::int64_t> in_sizes, out_sizes;  // features of the tiles
  torch::nn::ModuleList linears;                  // rows, each a ModuleList of torch::nn::Linear

 private:
  torch::nn::LinearImpl& tile(std::int64_t row, std::int64_t column);
};
TORCH_MODULE(TiledLinear);

}  // namespace zero
