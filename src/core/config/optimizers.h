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

// torch's names of the fp32 states per element besides the master, at most 3. Checkpoints have them as "opt.NAME".
std::vector<std::string> states_of(const OptimizerSettings& optimizer);
// Before keys are read; None: of AdamW.
OptimizerSettings default_optimizer(OptimizerType type);

}  // namespace zero::config
