// See state_access.h.
#include "engine/state_access.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "engine/dtypes.h"
#include "engine/parts.h"
#include "kernels/blocks8.h"

namespace zero::engine {
namespace {

const step::View& view_of(const step::UpdateTarget& states, int state) {
  return state == kMaster ? states.master : states.slots[state - 1];
}

// For the part of [begin, begin + numel) in each segment, calls fn(stored state, begin in the segment, numel, offset in
// the range).
template <class Fn>
void for_each_part(const step::Group& group, int state, std::int64_t begin, std::int64_t numel, const Fn& fn) {
  for (std::size_t s = 0; s < group.states.size(); ++s) {
    const auto& segment = group.facts.segments[s];
    const auto first = std::max(begin, segment.begin), last = std::min(begin + numel, segment.begin + segment.numel);
    if (first < last) fn(view_of(group.states[s], state), first - segment.begin, last - first, first - begin);
  }
}

bool is_in_blocks(const step::View& stored, int state) { return state != kMaster && stored.dtype == step::Dtype::U8; }

}  // namespace

at::ScalarType dtype_of_state(const step::GroupFacts& facts, int state) {
  const auto dtype = state == kMaster ? facts.precision.master : facts.precision.slots;
  return dtype == step::Dtype::U8 ? at::kFloat : scalar_type(dtype);
}

at::Tensor StateAccess::read(const step::View& view) const {
  if (view.numel == 0) return at::empty({0}, scalar_type(view.dtype));
  if (!buffers_.is_file(view.buffer)) return buffers_.tensor(view);
  auto values = at::empty({view.numel}, scalar_type(view.dtype));
  buffers_.region(view.buffer).read(view.begin * width(view.dtype), values.mutable_data_ptr(), view.bytes());
  return values;
}

void StateAccess::write(const step::View& view, const at::Tensor& values) {
  if (view.numel == 0) return;
  if (!buffers_.is_file(view.buffer)) {
    buffers_.wait_read(view.buffer);
    buffers_.tensor(view).copy_(values);
    return;
  }
  const auto here = values.to(at::kCPU, scalar_type(view.dtype)).contiguous();
  buffers_.region(view.buffer).write(view.begin * width(view.dtype), here.const_data_ptr(), view.bytes());
}

at::Tensor StateAccess::read_state(const step::View& stored, int state, std::int64_t begin, std::int64_t numel) const {
  if (!is_in_blocks(stored, state)) return read(stored.part(begin, numel));
  const auto codes = read(step::slot_part(stored, begin, numel)).cpu().contiguous();
  const auto inside = begin % kernels::kStateBlock;
  const auto values = at::empty({inside + numel}, at::kFloat);
  kernels::decode_blocks(values.mutable_data_ptr<float>(), kernels::state_map(state - 1), codes.const_data_ptr(),
                         values.numel());
  return values.narrow(0, inside, numel);
}

void StateAccess::write_state(const step::View& stored, int state, std::int64_t begin, const at::Tensor& values) {
  if (!is_in_blocks(stored, state)) return write(stored.part(begin, values.numel()), values);
  const auto blocks = step::slot_part(stored, begin, values.numel());
  const auto inside = begin % kernels::kStateBlock;
  auto whole = at::empty({blocks.numel / kernels::kStateBlockBytes * kernels::kStateBlock}, at::kFloat);
  auto codes = read(blocks).cpu().clone();
  const auto map = kernels::state_map(state - 1);
  // The elements around keep their values, as far as the maxima of their blocks stay.
  kernels::decode_blocks(whole.mutable_data_ptr<float>(), map, codes.const_data_ptr(), whole.numel());
  whole.narrow(0, inside, values.numel()).copy_(values);
  kernels::encode_blocks(codes.mutable_data_ptr(), map, whole.const_data_ptr<float>(), whole.numel());
  write(blocks, codes);
}

at::Tensor StateAccess::read(const step::Group& group, int state, std::int64_t begin, std::int64_t numel) const {
  std::vector<at::Tensor> parts;
  for_each_part(group, state, begin, numel,
                [&](const step::View& stored, std::int64_t first, std::int64_t count, std::int64_t) {
                  parts.push_back(read_state(stored, state, first, count));
                });
  if (parts.empty()) return at::empty({0}, dtype_of_state(group.facts, state));
  if (parts.size() == 1) return parts[0];
  for (auto& part : parts) part = part.cpu();
  return at::cat(parts);
}

void StateAccess::write(const step::Group& group, int state, std::int64_t begin, const at::Tensor& values) {
  for_each_part(group, state, begin, values.numel(),
                [&](const step::View& stored, std::int64_t first, std::int64_t count, std::int64_t at) {
                  write_state(stored, state, first, values.narrow(0, at, count));
                });
}

at::Tensor StateAccess::shard(const step::Group& group, int state) const {
  const auto& run = group.context.facts;
  return read(group, state, run.shard_begin(group.facts) - run.owned_begin(group.facts), group.facts.shard());
}

at::Tensor StateAccess::read_params(const step::Group& group, std::int64_t begin, std::int64_t numel) const {
  return read(group.params->resting().part(begin, numel));
}

void StateAccess::write_params(const step::Group& group, std::int64_t begin, const at::Tensor& values) {
  write(group.params->resting().part(begin, values.numel()), values);
}

at::Tensor gathered_state(const Parts& parts, const step::Group& group, int state) {
  const StateAccess states(parts.memory->buffers);
  const auto& facts = group.facts;
  const bool frozen = !facts.trainable;
  const auto resting = [&] { return states.read_params(group, 0, facts.resting()); };
  if (frozen ? !facts.sharding.params : !facts.sharding.optimizer)
    return (frozen ? resting() : states.read(group, state, 0, facts.owned())).to(at::kFloat);
  if (facts.padded() == 0) return at::empty({0}, at::kFloat);
  const auto part = (frozen ? resting() : states.shard(group, state)).to(parts.plan.device, at::kFloat);
  auto whole = at::empty({facts.padded()}, part.options());
  parts.ranks.of(facts).all_gather(whole, part.contiguous())->wait();
  return whole;
}

}  // namespace zero::engine
