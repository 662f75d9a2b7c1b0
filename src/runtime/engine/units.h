// Finds the units, whose parameters are communicated together: every entry of a ModuleList or Sequential that has
// parameters, or the modules that the user names. All other parameters form the root unit.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/settings.h"
#include "sharding/cut_plan.h"
#include "sharding/unit_cut.h"

namespace torch::nn {
class Module;
}

namespace zero::engine {

struct ModelParameter {
  std::string name;                  // where it is first registered
  std::vector<std::string> aliases;  // further names of a tied parameter
  at::Tensor tensor;
  std::string unit;                                 // path of its unit; empty: the root unit
  std::vector<std::int64_t> sizes;                  // of the whole parameter
  std::optional<sharding::ParameterCut> layer_cut;  // what its layer asks for (zero/nn.h)
  std::vector<std::int64_t> part_sizes;             // of `tensor`, once the Engine has adopted it
  sharding::ParameterCut cut = {};                  // over the tensor-parallel ranks
  std::int64_t padding_idx = -1;                    // of its torch::nn::Embedding
  const char* whole_only = nullptr;                 // an option of its torch::nn::Embedding that needs all rows

  bool is_cut() const { return cut.kind != sharding::CutKind::Whole; }
  std::int64_t numel() const { return c10::multiply_integers(part_sizes); }
};

// Every parameter once (tied ones by TensorImpl), in order of registration, with its unit. Throws ConfigError that
// lists all parameters and named units that are unsupported.
std::vector<ModelParameter> find_parameters(torch::nn::Module& model, const config::Settings& settings);
// Decides which parameters are cut over settings.mesh.tensor ranks, and what rank `part` of them holds. ConfigError
// with all faults.
void cut_parameters(std::vector<ModelParameter>& parameters, const config::Settings& settings, int part);

using sharding::Unit;  // parameters are indices into find_parameters' result
using sharding::UnitRules;
std::vector<Unit> find_units(const std::vector<ModelParameter>& parameters, const UnitRules& rules);

}  // namespace zero::engine
