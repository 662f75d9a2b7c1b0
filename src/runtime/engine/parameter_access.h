// What a program reads and replaces of one parameter, by name: its master and its states of the optimizer between
// steps, and its reduced gradient between the last backward of a step and step().
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "engine/parts.h"
#include "engine/state_access.h"

namespace zero::engine {

class Checks;
class Stepper;

// The part of a member in [begin, begin + numel) of its group's flat vector; numel 0: none.
sharding::ShardLayout::Piece piece_of(const step::GroupFacts& facts, std::size_t member, std::int64_t begin,
                                      std::int64_t numel);
// In this rank's shard.
sharding::ShardLayout::Piece shard_of(const step::RunFacts& run, const step::GroupFacts& facts, std::size_t member);
// In the range whose states this rank owns.
sharding::ShardLayout::Piece owned_of(const step::RunFacts& run, const step::GroupFacts& facts, std::size_t member);

// ConfigError unless `values` are floating-point and of the parameter's shape, or have `numel` elements.
void require_whole(const std::string& where, const ModelParameter& parameter, const at::Tensor& values);
void require_shard(const std::string& where, const ModelParameter& parameter, std::int64_t numel,
                   const at::Tensor& values);

// The whole parameter, flat, fp32, on the engine's device, the same on every rank: rank 0's `values`, or each rank's
// shard. Collective.
at::Tensor values_of_rank_0(const Parts& parts, const ModelParameter& parameter, const at::Tensor& values);
at::Tensor values_of_shards(const Parts& parts, const step::GroupFacts& facts, std::size_t member,
                            const at::Tensor& values);
// `values` of a rank that has the parameter, which all ranks have the shape of. Collective.
at::Tensor values_of_owner(const Parts& parts, const ModelBinding::Located& parameter, const at::Tensor& values);

// This rank's part of the reduced gradient of one parameter, between backward and the update: the offset in the
// parameter of this rank's shard, in elements, and its values, flat, in the dtype they are stored in.
std::pair<std::int64_t, at::Tensor> reduced_gradient(const Parts& parts, int group, std::size_t member);

// Masters and states of the optimizer.
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
  // Without "master".
  std::vector<std::string> names(const std::string& parameter) const;

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

class ParameterGradients {
 public:
  ParameterGradients(const Parts& parts, const Checks& checks) : p_(parts), checks_(checks) {}

  // Collective.
  at::Tensor get(const std::string& parameter);
  void set(const std::string& parameter, const at::Tensor& values);
  void set_own(const std::string& parameter, const at::Tensor& values);
  // Local.
  OwnShard get_own(const std::string& parameter);

 private:
  struct Place {
    int group;
    std::size_t member;
    const ModelParameter& parameter;
    ModelBinding::Located located;
  };
  // None: the parameter is frozen. ConfigError where no reduced gradient awaits step().
  std::optional<Place> find(const char* call, const std::string& parameter) const;
  // Of a trained parameter; the same on every rank, or the same error, and its gradient is reduced. `check` throws
  // where a rank's values do not fit.
  Place agreed(const char* call, const std::string& parameter, const std::function<void(const Place&)>& check);
  bool is_trained(const std::string& parameter, const OwnShard& own) const;
  // Reduces the gradients where their accumulation ends with the call. Collective.
  void close(const char* call, const std::string& parameter);
  const step::GroupFacts& facts(const Place& place) const { return p_.groups[static_cast<std::size_t>(place.group)]; }
  // What the stored gradient, which is scaled, is multiplied by to become the gradient of the loss.
  double unscale() const { return static_cast<double>(p_.plan.run.postmultiply) / p_.scaler->scale(); }
  void replace(const Place& place, const at::Tensor& flat);

  const Parts& p_;
  const Checks& checks_;
};

}  // namespace zero::engine
