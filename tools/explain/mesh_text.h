// What tensor and sequence parallelism add to a layer and a micro-batch (plan/mesh_parts.h), as tables and as JSON.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "plan/mesh_parts.h"
#include "tools/support/measurement.h"

namespace zero::cli {

// Which ranks have which experts, and over which ranks their states are sharded. ranks: that share the other states.
std::string experts_text(const PlanExperts& experts, std::int64_t layers, int ranks, bool data_before_experts);
std::string products_text(const std::vector<planning::SplitProduct>& products, std::size_t columns);
std::string exchanges_text(const std::vector<planning::Exchange>& exchanges, std::size_t columns);

Json products_json(const std::vector<planning::SplitProduct>& products);
Json exchanges_json(const std::vector<planning::Exchange>& exchanges);

}  // namespace zero::cli
