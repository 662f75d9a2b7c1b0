// Reads and replaces one state of one parameter, between steps: its master or a state of the optimizer, by name.
#pragma once
#include <string>

#include "engine/state_access.h"
#include "engine/stepper.h"

namespace zero::engine {

// A state of all ranks, flat, fp32, with the padding. state kMaster of a frozen group: its parameters. Collective.
at::Tensor gather_state(const Parts& parts, const step::Group& group, int state);

// `state` is "master", or the optimizer's name of it.
class ParameterStates {
 public:
  ParameterStates(Parts& parts, const Checks& checks, Stepper& stepper)
      : p_(parts), checks_(checks), stepper_(stepper), states_(parts.memory->buffers) {}

  // Collective.
  at::Tensor get(const std::string& parameter, const std::string& state);
  void set(const std::string& parameter, const std::string& state, const at::Tensor& values);
  void set_own(const std::string& parameter, const std::string& state, const at::Tensor& values);
  // Local.
  OwnShard get_own(const std::string& parameter, const std::string& state);

 private:
  struct Place {
    const step::Group& group;
    const ModelParameter& parameter;
    std::size_t member;
    int state;
    sharding::ShardLayout::Piece own;  // the part in this rank's shard; numel 0: none
  };
  Place find(const char* call, const std::string& parameter, const std::string& state) const;
  at::Tensor read_own(const Place& place) const;
  void replace(const char* call, const Place& place, const at::Tensor& flat);

  Parts& p_;
  const Checks& checks_;
  Stepper& stepper_;
  StateAccess states_;
};

}  // namespace zero::engine
