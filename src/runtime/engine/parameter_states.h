// Reads and replaces one state of one parameter, between steps: its master or a state of the optimizer, by name.
#pragma once
#include <functional>
#include <string>

#include "engine/state_access.h"
#include "engine/stepper.h"

namespace zero::engine {

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
    ModelBinding::Located located;
  };
  Place find(const char* call, const std::string& parameter, const std::string& state) const;
  // The same place on every rank, or the same error. `check` throws where a rank's values do not fit.
  Place agreed(const char* call, const std::string& parameter, const std::string& state,
               const std::function<void(const Place&)>& check);
  void require_replaceable(const char* call) const;
  void replace(const char* call, const Place& place, const at::Tensor& flat);

  Parts& p_;
  const Checks& checks_;
  Stepper& stepper_;
  StateAccess states_;
};

}  // namespace zero::engine
