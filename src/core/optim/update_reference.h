// Reference results for `zero bench optimizer`: the update rules for one element at a time, written from
// docs/numerics.md ("Updates") with std::fma where the document fuses, independent of libzero's kernels. Plain fp32; no
// torch, SIMD or threads. Results must be bit-identical.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::optim {

// The values of --rules. sgd has a momentum.
const std::vector<std::string>& update_rules();

// The rule as a configuration file: {"optimizer": {...}}.
std::string update_configuration(const std::string& rule);

// fp32 values of an update's tensors, with the rule's number of states.
struct UpdateValues {
  std::vector<float> master;
  std::vector<std::vector<float>> states;
};

// Performs updates 1 to `steps` with gradient * factor. States begin at zero; elements are independent.
UpdateValues reference_update(const std::string& rule, std::vector<float> master, const std::vector<float>& gradient,
                              float factor, std::int64_t steps);

// The first i < elements where got[i] and expected[i % period] differ in a bit, or -1. Elements of `width` bytes.
std::int64_t first_difference(const void* got, const void* expected, std::int64_t elements, std::int64_t period,
                              std::int64_t width);

}  // namespace zero::optim
