// Names of units as a reader sees them.
#pragma once
#include <string>
#include <vector>

namespace zero::cli {

// "blocks.0 to blocks.3, root": units in order, with consecutive numbers joined. Those with a mark, "blocks.0 (fp32)",
// are listed apart.
std::string joined_units(const std::vector<std::string>& units);

}  // namespace zero::cli
