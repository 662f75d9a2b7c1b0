// Master and moments of a group, fp32, where the configuration puts them: on the device, in host memory, in the rank's
// file; with a ratio the first part is offloaded and the rest stays on the device. Which updates they go through, and
// what of the model they belong to, is the group's.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "engine/file_regions.h"
#include "step/memory_ledger.h"

namespace zero::engine {

// Where the states of an Engine rest.
struct StatePlaces {
  step::Tier optimizer = step::Tier::Device;
  double ratio = 1;                             // of the elements, on that tier
  engine::ShardFile* optimizer_file = nullptr;  // for tier File
  bool pinned = false;                          // host memory, for copies from and to a GPU
  bool offloads() const { return optimizer != step::Tier::Device && ratio > 0; }
  bool in_file() const { return optimizer == step::Tier::File && ratio > 0; }
};

class GroupStates {
 public:
  static constexpr int kMaster = 0;  // slot k is state 1 + k
  static constexpr int kMostStates = 3;

  // Elements [begin, begin + numel) of the range that a rank owns, on one tier.
  struct Segment {
    step::Tier tier;
    std::int64_t begin, numel;
    bool aliases_master;  // the fp32 parameters on the device are the master
    engine::ShardStore stores[kMostStates];
    bool in_file() const { return tier == step::Tier::File; }
  };

  GroupStates() = default;
  // `alias`: the fp32 parameters of the owned range where they can be the master; undefined where they cannot.
  GroupStates(const StatePlaces& places, at::Device device, std::int64_t numel, int num_slots, const at::Tensor& alias);
  // Moments get their initial value. The file is there by now.
  void fill_slots(float value);

  int num_states() const { return num_states_; }
  const std::vector<Segment>& segments() const { return segments_; }

  // Elements [begin, begin + numel) of a state: a view where they lie together in memory, else a copy in host memory.
  at::Tensor read(int state, std::int64_t begin, std::int64_t numel) const;
  void write(int state, std::int64_t begin, const at::Tensor& values);

  // What rests where, for the ledger. Aliased masters are the parameters'.
  std::int64_t bytes(step::Tier tier, step::Purpose purpose) const;

 private:
  int num_states_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace zero::engine
