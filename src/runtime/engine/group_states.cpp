// See group_states.h.
#include "engine/group_states.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "step/tiers.h"

namespace zero::engine {

GroupStates::GroupStates(const StatePlaces& places, at::Device device, std::int64_t numel, int num_slots,
                         const at::Tensor& alias)
    : num_states_(1 + num_slots) {
  const auto offloaded = places.offloads() ? step::moved_numel(numel, places.ratio) : std::int64_t{0};
  const auto add = [&](step::Tier tier, std::int64_t begin, std::int64_t count) {
    Segment segment{.tier = tier, .begin = begin, .numel = count, .aliases_master = false, .stores = {}};
    auto options = at::TensorOptions().dtype(at::kFloat).device(tier == step::Tier::Host ? at::kCPU : device);
    if (tier == step::Tier::Host) options = options.pinned_memory(places.pinned);
    for (int state = 0; state < num_states_; ++state) {
      if (tier == step::Tier::File) {
        segment.stores[state] = {places.optimizer_file, count, at::kFloat};
      } else if (state == kMaster && alias.defined() && tier == step::Tier::Device) {
        segment.aliases_master = true;
        segment.stores[state] = {tier, alias.narrow(0, begin, count)};
      } else {
        segment.stores[state] = {tier, at::zeros({count}, options)};
      }
    }
    segments_.push_back(std::move(segment));
  };
  if (offloaded > 0) add(places.optimizer, 0, offloaded);
  if (offloaded < numel || numel == 0) add(step::Tier::Device, offloaded, numel - offloaded);
}

void GroupStates::fill_slots(float value) {
  if (value == 0.0f) return;
  for (auto& segment : segments_)
    for (int state = 1; state < num_states_; ++state) segment.stores[state].write(0, at::full({segment.numel}, value));
}

at::Tensor GroupStates::read(int state, std::int64_t begin, std::int64_t numel) const {
  std::vector<at::Tensor> parts;
  for (const auto& segment : segments_) {
    const auto first = std::max(begin, segment.begin), last = std::min(begin + numel, segment.begin + segment.numel);
    if (first < last) parts.push_back(segment.stores[state].read(first - segment.begin, last - first));
  }
  if (parts.empty()) return at::empty({0}, at::kFloat);
  if (parts.size() == 1) return parts[0];
  for (auto& part : parts) part = part.cpu();
  return at::cat(parts);
}

void GroupStates::write(int state, std::int64_t begin, const at::Tensor& values) {
  const auto numel = values.numel();
  for (auto& segment : segments_) {
    const auto first = std::max(begin, segment.begin), last = std::min(begin + numel, segment.begin + segment.numel);
    if (first < last) segment.stores[state].write(first - segment.begin, values.narrow(0, first - begin, last - first));
  }
}

std::int64_t GroupStates::bytes(step::Tier tier, step::Purpose purpose) const {
  std::int64_t sum = 0;
  for (const auto& segment : segments_) {
    if (segment.tier != tier) continue;
    for (int state = 0; state < num_states_; ++state) {
      const bool master = state == kMaster;
      if (master ? segment.aliases_master || purpose != step::Purpose::MasterParameters
                 : purpose != step::Purpose::OptimizerStates)
        continue;
      sum += segment.stores[state].bytes();
    }
  }
  return sum;
}

}  // namespace zero::engine
