// See gathered_state.h.
#include "engine/gathered_state.h"

#include <ATen/ATen.h>

namespace zero::engine {

at::Tensor gathered_state(const Parts& parts, const step::Group& group, int state) {
  const StateAccess states(parts.memory->buffers);
  const auto& facts = group.facts;
  const bool frozen = !facts.trainable;
  const auto resting = [&] { return states.read_params(group, 0, facts.resting()); };
  if (frozen ? !facts.sharding.params : !facts.sharding.optimizer)
    return (frozen ? resting() : states.read(group, state, 0, facts.owned())).to(at::kFloat);
  if (facts.padded() == 0) return at::empty({0}, at::kFloat);
  const auto part = (frozen ? resting() : states.shard(group, state)).to(parts.device, at::kFloat);
  auto whole = at::empty({facts.padded()}, part.options());
  parts.ranks_of(facts).all_gather(whole, part.contiguous())->wait();
  return whole;
}

}  // namespace zero::engine
