// See reduced_gradient.h.
#include "engine/reduced_gradient.h"

#include <ATen/ATen.h>

#include "engine/dtypes.h"

namespace zero::engine {

std::pair<std::int64_t, at::Tensor> reduced_gradient(const Parts& parts, int index, std::size_t member) {
  const auto& group = *parts.program->groups()[static_cast<std::size_t>(index)];
  const auto& facts = group.facts;
  const auto shard_begin = parts.run.shard_begin(facts);
  const auto options = at::TensorOptions().dtype(scalar_type(facts.precision.grad)).device(parts.device);
  for (const auto& piece : facts.layout.pieces(shard_begin, facts.shard())) {
    if (piece.parameter != member) continue;
    auto view = group.grads->sum();
    auto begin = piece.range_begin;
    if (!view) {
      view = group.grads->kept(static_cast<int>(member));
      begin = piece.parameter_begin;
    } else if (view.numel != facts.shard()) {
      begin += shard_begin;
    }
    return {piece.parameter_begin,
            view ? parts.memory->buffers.tensor(view.part(begin, piece.numel)) : at::zeros({piece.numel}, options)};
  }
  return {0, at::empty({0}, options)};
}

}  // namespace zero::engine
