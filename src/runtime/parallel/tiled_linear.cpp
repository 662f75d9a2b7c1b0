#include <zero/tiled_linear.h>

#include <ATen/ATen.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <cmath>
#include <string>

#include "base/check.h"

namespace zero {
namespace {

// Sizes of `count` parts of `total`; the first ones are larger by one where it does not divide.
std::vector<std::int64_t> tile_sizes(std::int64_t total, std::int64_t count) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < count; ++i) sizes.push_back(total / count + (i < total % count ? 1 : 0));
  return sizes;
}

}  // namespace

void TiledLinearOptions::check() const {
  std::string faults;
  const auto features = [&](const char* name, std::int64_t value) {
    if (value < 1) faults += base::join("\n  ", name, ": got ", value, ", expected at least 1");
  };
  features("in_features", in_features);
  features("out_features", out_features);
  const auto splits = [&](const char* name, std::int64_t value, std::int64_t most) {
    if (most >= 1 && (value < 1 || value > most))
      faults += base::join("\n  ", name, ": got ", value, ", expected 1 to ", most);
  };
  splits("in_splits", in_splits, in_features);
  splits("out_splits", out_splits, out_features);
  if (!faults.empty()) throw ConfigError("[TiledLinear] got invalid options:" + faults);
}

TiledLinearImpl::TiledLinearImpl(TiledLinearOptions o) : options(o) {
  options.check();
  reset();
}

void TiledLinearImpl::reset() {
  in_sizes = tile_sizes(options.in_features, options.in_splits);
  out_sizes = tile_sizes(options.out_features, options.out_splits);
  linears = register_module("linears", torch::nn::ModuleList());
  // The bound of torch::nn::Linear, which follows the features of the whole layer, not of a tile.
  const double bound = 1 / std::sqrt(static_cast<double>(options.in_features));
  for (const auto rows : out_sizes) {
    torch::nn::ModuleList row;
    for (std::int64_t c = 0; c < options.in_splits; ++c) {
      const bool has_bias = options.bias && c == options.in_splits - 1;  // added once
      torch::nn::Linear one(torch::nn::LinearOptions(in_sizes[static_cast<std::size_t>(c)], rows).bias(has_bias));
      if (options.in_splits > 1) {
        torch::nn::init::uniform_(one->weight, -bound, bound);
        if (has_bias) torch::nn::init::uniform_(one->bias, -bound, bound);
      }
      row->push_back(one);
    }
    linears->push_back(row);
  }
}

torch::nn::LinearImpl& TiledLinearImpl::tile(std::int64_t row, std::int64_t column) {
  return linears[static_cast<std::size_t>(row)]->as<torch::nn::ModuleListImpl>()->at<torch::nn::LinearImpl>(
      static_cast<std::size_t>(column));
}

std::vector<at::Tensor> TiledLinearImpl::forward_parts(const std::vector<at::Tensor>& x) {
  const auto parts = x.size() == 1 && options.in_splits > 1 ? x[0].split_with_sizes(in_sizes, /*dim=*/-1) : x;
  if (static_cast<std::int64_t>(parts.size()) != options.in_splits)
    throw ConfigError(base::join("[TiledLinear] got ", parts.size(), " parts of the input, expected ",
                                 options.in_splits, ", or one whole tensor"));
  std::vector<at::Tensor> rows;
  for (std::int64_t r = 0; r < options.out_splits; ++r) {
    at::Tensor sum;
    for (std::int64_t c = 0; c < options.in_splits; ++c) {
      auto out = tile(r, c).forward(parts[static_cast<std::size_t>(c)]);
      sum = c == 0 ? std::move(out) : sum + out;
    }
    rows.push_back(std::move(sum));
  }
  return rows;
}

at::Tensor TiledLinearImpl::forward(const at::Tensor& x) {
  auto rows = forward_parts({x});
  return rows.size() == 1 ? rows[0] : at::cat(rows, /*dim=*/-1);
}

void TiledLinearImpl::copy_params_from(const torch::nn::LinearImpl& whole) {
  const auto& from = whole.options;
  if (from.in_features() != options.in_features || from.out_features() != options.out_features ||
      from.bias() != options.bias)
    throw ConfigError(base::join("[TiledLinear::copy_params_from] got ", from.in_features(), " x ", from.out_features(),
                                 from.bias() ? " with" : " without", " bias, expected ", options.in_features, " x ",
                                 options.out_features, options.bias ? " with" : " without", " bias"));
  const torch::NoGradGuard no_grad;
  const auto rows = whole.weight.split_with_sizes(out_sizes, 0);
  const auto biases = options.bias ? whole.bias.split_with_sizes(out_sizes, 0) : std::vector<at::Tensor>();
  for (std::int64_t r = 0; r < options.out_splits; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const auto weights = rows[row].split_with_sizes(in_sizes, 1);
    for (std::int64_t c = 0; c < options.in_splits; ++c) tile(r, c).weight.copy_(weights[static_cast<std::size_t>(c)]);
    if (options.bias) tile(r, options.in_splits - 1).bias.copy_(biases[row]);
  }
}

}  // namespace zero
