// What every measurement of `zero bench` says in the same way: lists of words in an option, spreads of
// samples, and the machine they were taken on. Knows no libtorch, no model and no ranks.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::cli {

using Json = nlohmann::ordered_json;

// The parts of a list option, with commas between: each one of `allowed`, none twice, in the user's
// order. Throws ConfigError.
std::vector<std::string> list_of(const std::string& option, const std::string& text,
                                 const std::vector<std::string>& allowed);

// What stands between commas; one empty part of an empty text.
std::vector<std::string> parts_of(const std::string& text);

// Linear between the two nearest; q from 0 to 1, at least one value.
double quantile(std::vector<double> values, double q);

// {"median": ..., "min": ..., "p99": ...}, in the unit of the values.
Json spread_of(const std::vector<double>& values);

// The value with `digits` digits after the point.
std::string fixed(double value, int digits);

// The processor's name, as the kernel gives it.
std::string processor();
// {"processor", "cores", "memory_bytes", "system", "libzero"}; who measures adds what it depends on.
Json machine();
// The same for people: "NAME, 2 cores, 24.0GiB, Linux 6.1.0".
std::string machine_line();

}  // namespace zero::cli
