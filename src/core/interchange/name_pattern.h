// Patterns of tensor names: "{i}" is a decimal number without leading zeros, "*" any text; "\*", "\{" and "\\" are the
// characters themselves.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>

namespace zero::interchange {

using Captures = std::map<std::string, std::string>;  // "{i}" or "*" -> the text there

// The places of a pattern that captures something.
std::set<std::string> captures_of(const std::string& pattern);
// What a name has at them; nullopt if it does not fit. A capture that occurs twice must be equal.
std::optional<Captures> match(const std::string& pattern, const std::string& name);
// The pattern with its captures filled in.
std::string fill(const std::string& pattern, const Captures& captures);

}  // namespace zero::interchange
