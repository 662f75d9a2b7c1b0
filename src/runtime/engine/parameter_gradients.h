// Reads and replaces the reduced gradient of one parameter, between the last backward of a step and step().
#pragma once
#include <functional>
#include <optional>
#include <string>

#include "engine/checks.h"

namespace zero::engine {

class ParameterGradients {
 public:
  ParameterGradients(Parts& parts, const Checks& checks) : p_(parts), checks_(checks) {}

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
  double unscale() const { return static_cast<double>(p_.run.postmultiply) / p_.scaler->scale(); }
  void replace(const Place& place, const at::Tensor& flat);

  Parts& p_;
  const Checks& checks_;
};

}  // namespace zero::engine
