// What tensor parallelism does with each parameter of a model: names and shapes matched with the configuration's plan.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/settings.h"
#include "sharding/tensor_cut.h"

namespace zero::sharding {

enum class CutKind : std::uint8_t {
  Whole,   // every rank of the axis has all of it
  Column,  // dim 0 is cut: outputs of a product, a bias, or the rows of an embedding
  Row,     // dim 1 is cut: inputs of a product
};

struct ParameterCut {
  CutKind kind = CutKind::Whole;
  TensorCut cut;               // unless Whole
  bool gather_output = false;  // Column: products are all-gathered
  bool head = false;           // Column: products are logits
  bool scatter_input = false;  // Row: the input is whole
  bool sum_gradient = false;   // Whole: gradients are summed over the axis
  bool sequence = false;       // outside of the pair of layers, tensors are divided along dim 1
};

struct NamedShape {
  std::string name;
  std::vector<std::string> aliases;  // further names of a tied parameter
  std::vector<std::int64_t> sizes;
  std::optional<ParameterCut> given{};  // by its layer; the plan does not apply. `cut` lacks sizes and parts
};

// One result per parameter, for settings.mesh.tensor parts. Throws ConfigError that lists all faults: entries that
// match nothing, weights that cannot be cut, and, without any plan, the model's weights that could be.
std::vector<ParameterCut> cut_plan(const config::Settings& settings, const std::vector<NamedShape>& parameters);

}  // namespace zero::sharding
