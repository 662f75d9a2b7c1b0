// Which parameters are communicated together. A unit is a module whose parameters form a group:
// every entry of a ModuleList or Sequential that has parameters, or the modules the user names;
// what is left belongs to the root.
#pragma once
#include <ATen/core/Tensor.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "config/settings.h"

namespace torch::nn {
class Module;
}

namespace zero::engine {

struct ModelParameter {
  std::string name;                  // of the first place it is registered at
  std::vector<std::string> aliases;  // of further places (tied parameters)
  at::Tensor tensor;
  std::string unit;  // path of its unit; empty: the root
};

// Every parameter once (tied ones by TensorImpl), in order of registration, with its unit.
// Throws ConfigError naming every parameter or named unit that cannot be taken.
std::vector<ModelParameter> find_parameters(torch::nn::Module& model, const config::Settings& settings);

struct Unit {
  std::string name;  // path, or "root"
  bool root = false, trainable = true;
  bool persistent = false;              // never released
  std::vector<std::size_t> parameters;  // indices into find_parameters' result
};

// Units in order of registration, the root first; the frozen parameters of a unit are a unit of
// their own, since they have neither gradients nor optimizer states. Neighbours of fewer than
// min_numel elements are merged; what then has more than max_numel is cut between parameters ("name", "name/2", ...), a
// larger parameter being one by itself. Parameters of at most `persistent_numel` elements, in order of registration
// until their sum would exceed `persistent_total`, are the last unit, "persistent".
struct UnitRules {
  std::int64_t min_numel = 0, max_numel = std::numeric_limits<std::int64_t>::max();
  std::int64_t persistent_numel = 0, persistent_total = 0;
};
std::vector<Unit> find_units(const std::vector<ModelParameter>& parameters, const UnitRules& rules);

}  // namespace zero::engine
