// Which parameters are communicated together. A unit is a module whose parameters form a group:
// every entry of a ModuleList or Sequential that has parameters, or the modules the user names;
// what is left belongs to the root.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "config/settings.h"
#include "sharding/unit_cut.h"

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

using sharding::Unit;  // its parameters: indices into find_parameters' result
using sharding::UnitRules;
std::vector<Unit> find_units(const std::vector<ModelParameter>& parameters, const UnitRules& rules);

}  // namespace zero::engine
