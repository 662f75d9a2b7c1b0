#include "engine/tensor_parts.h"

#include <ATen/ATen.h>

#include "comm/group.h"

namespace zero::engine {
namespace {

// Narrows of the whole tensor, in the order in which a part holds them.
std::vector<at::Tensor> ranges_of(const sharding::TensorCut& cut, const at::Tensor& whole, int part) {
  std::vector<at::Tensor> result;
  for (const auto& range : cut.ranges(part)) result.push_back(whole.narrow(cut.dim, range.begin, range.numel()));
  return result;
}

}  // namespace

at::Tensor part_of(const ModelParameter& parameter, const at::Tensor& whole, int part) {
  if (!parameter.is_cut()) return whole;
  const auto& cut = parameter.cut.cut;
  return at::cat(ranges_of(cut, whole.view(cut.sizes), part), cut.dim);
}

at::Tensor whole_of(const ModelParameter& parameter, const at::Tensor& part, comm::Group& tensor_group) {
  if (!parameter.is_cut()) return part.view(parameter.sizes);
  const auto& cut = parameter.cut.cut;
  std::vector<std::int64_t> in_numels, out_numels;
  for (int j = 0; j < cut.parts; ++j) {
    in_numels.push_back(part.numel());
    out_numels.push_back(cut.part_numel(j));
  }
  const auto sent = part.reshape({1, -1}).expand({cut.parts, part.numel()}).reshape({-1});
  auto received = at::empty({cut.numel()}, part.options());
  tensor_group.all_to_all(received, sent, out_numels, in_numels)->wait();
  auto whole = at::empty(cut.sizes, part.options());
  std::int64_t begin = 0;
  for (int j = 0; j < cut.parts; ++j) {
    const auto sizes = cut.part_sizes(j);
    const auto theirs = received.narrow(0, begin, out_numels[static_cast<std::size_t>(j)]).view(sizes);
    std::int64_t at = 0;
    for (auto& target : ranges_of(cut, whole, j)) {
      const auto length = target.size(cut.dim);
      target.copy_(theirs.narrow(cut.dim, at, length));
      at += length;
    }
    begin += out_numels[static_cast<std::size_t>(j)];
  }
  return whole;
}

}  // namespace zero::engine
