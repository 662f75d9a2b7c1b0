// Patterns of parameters' names, as the keys of a configuration and the calls of an Engine have them: * matches any
// text, ? one character, and \ makes the next character literal. Checkpoints and name maps have their own
// (interchange/names.h).
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace zero::base {

// Whether the pattern matches the full name of a parameter, or of one tied to it.
bool pattern_names(std::string_view pattern, std::string_view name, const std::vector<std::string>& aliases);
// The pattern that matches this name alone: keys of a ModuleDict may contain * and ?.
std::string exact_pattern(std::string_view name);

}  // namespace zero::base
