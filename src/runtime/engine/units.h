// Finds the units, whose parameters are communicated together: every entry of a ModuleList or Sequential that has
// parameters, or the modules that the user names, and every tile of a zero/tiled_linear.h. All other parameters form
// the root unit.
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

// Of a parameter of an expert of a layer with expert parallelism.
struct ExpertParameter {
  std::string layer;         // path of the layer
  std::int64_t index = 0;    // number of the expert
  std::int64_t experts = 1;  // of the layer
  int ep_size = 1;
  std::string rest;  // the parameter's name within the expert

  std::int64_t per_rank() const { return experts / ep_size; }
  // The rank of the expert group that has it.
  int place() const { return static_cast<int>(index / per_rank()); }
  // The name, own or an alias, of the parameter that the rank at `place` has at the same position.
  std::string at(int place, const std::string& own) const;
};

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
  std::optional<ExpertParameter> expert = {};       // null: every rank has it, or a part of it
  int axis = 0;                                     // index into step::RunTopology::axes
  bool here = true;                                 // false: an expert of another rank
  bool fp32 = false;                                // it stays fp32 in a run in 16 bits
  bool table = false;                               // the weight of an embedding
  bool is_matrix = false;                           // of Muon
  std::vector<std::string> states = {};             // names of its optimizer states besides the master
  std::string kind = {};                            // as sharding::UnitMember::kind

  bool is_cut() const { return cut.kind != sharding::CutKind::Whole; }
  std::int64_t numel() const { return c10::multiply_integers(part_sizes); }
  // Elements in the parts of the tensor-parallel ranks before `part`; 0 for a parameter that is not cut.
  std::int64_t elements_before(int part) const;
};

// Every parameter once (tied ones by TensorImpl), in order of registration, with its unit. Throws ConfigError that
// lists all parameters and named units that are unsupported.
std::vector<ModelParameter> find_parameters(torch::nn::Module& model, const config::Settings& settings);
// Decides which parameters are cut over settings.mesh.tensor ranks, and what rank `part` of them holds. ConfigError
// with all faults.
void cut_parameters(std::vector<ModelParameter>& parameters, const config::Settings& settings, int part);

// The expert-parallel degrees of the model's layers above 1, in ascending order. ConfigError with all faults: a degree
// that does not divide its experts, or `ranks`; experts of other shapes than the layer's first.
std::vector<int> expert_degrees(const torch::nn::Module& model, const std::vector<ModelParameter>& parameters,
                                int ranks);

using sharding::Unit;  // parameters are indices into find_parameters' result
using sharding::UnitRules;
// Of the parameters that are here. Experts of a layer form their own, equally many on
// all ranks.
std::vector<Unit> find_units(const std::vector<ModelParameter>& parameters, const UnitRules& rules);

}  // namespace zero::engine
