// The update rules that libzero has, in one table: names, states, and what differs from the common defaults.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/settings.h"

namespace zero::config {

// All but None, in the order of documents.
const std::vector<OptimizerType>& optimizer_types();
// As in optimizer.type; None: "none".
const char* name_of(OptimizerType type);
// In upper or lower case.
std::optional<OptimizerType> optimizer_named(std::string_view name);
// "Adam, AdamW, .. or Lion", for messages.
std::string optimizer_names();

// torch's names of the states per element besides the master, at most 3. Checkpoints have them as "opt.NAME". matrix:
// of a parameter that is_muon_matrix().
std::vector<std::string> states_of(const OptimizerSettings& optimizer, bool matrix = false);
// Those of all parameters together.
std::vector<std::string> all_states_of(const OptimizerSettings& optimizer);
// Whether Muon orthogonalizes the updates of a parameter with so many dimensions. AdamW updates the others: vectors,
// tables (weights of an embedding), outputs, which their names tell, and what adam_parameters names.
bool is_muon_matrix(const OptimizerSettings& optimizer, std::string_view name, std::size_t dimensions, bool table);
// Before keys are read; None: of AdamW.
OptimizerSettings default_optimizer(OptimizerType type);

}  // namespace zero::config
