// Shared by the measurements of `zero bench` and `zero reproduce`: list options, statistics of samples, and the machine
// description. Independent of libtorch, models and ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::cli {

using Json = nlohmann::ordered_json;

// The parts of a comma-separated list option, in the user's order. Throws ConfigError unless each is one of `allowed`
// and none is repeated.
std::vector<std::string> list_of(const std::string& option, const std::string& text,
                                 const std::vector<std::string>& allowed);

// Splits at commas; an empty text gives one empty part.
std::vector<std::string> parts_of(const std::string& text);

// Linear interpolation; q from 0 to 1, at least one value.
double quantile(std::vector<double> values, double q);

// {"median": ..., "min": ..., "p99": ...}, in the unit of the values.
Json spread_of(const std::vector<double>& values);

// The largest whole number from 1 to `most` for which `fits` holds, 0: none. It must hold below any for which it does.
std::int64_t largest_whole(std::int64_t most, const std::function<bool(std::int64_t)>& fits);

// The value with `digits` decimals.
std::string fixed(double value, int digits);

// The processor's name from the kernel.
std::string processor();
// {"processor", "cores", "memory_bytes", "system", "libzero"}; measurements add further fields.
Json machine();
// The same as text: "NAME, 2 cores, 24.0GiB, Linux 6.1.0".
std::string machine_line();

}  // namespace zero::cli
