// What `zero bench optimizer` holds its results against: the update rules one element at a time, written from
// docs/numerics.md ("Updates") with std::fma where the documents fuse, and knowing none of libzero's kernels. Plain
// fp32 memory; no torch, no SIMD, no threads. The same bits are expected, so a difference is an error, not a tolerance.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::optim {

// The words of --rules; sgd has a momentum.
const std::vector<std::string>& update_rules();

// The rule as the configuration file says it: {"optimizer": {...}}.
std::string update_configuration(const std::string& rule);

// fp32 values of an update's tensors; `states` as many as the rule keeps.
struct UpdateValues {
  std::vector<float> master;
  std::vector<std::vector<float>> states;
};

// Updates 1 to `steps` with the same gradient, multiplied by `factor` first; states begin at zero. Elements are
// independent of each other.
UpdateValues reference_update(const std::string& rule, std::vector<float> master, const std::vector<float>& gradient,
                              float factor, std::int64_t steps);

// The first i < elements at which got[i] differs in a bit from expected[i % period], or -1. Elements of `width` bytes.
std::int64_t first_difference(const void* got, const void* expected, std::int64_t elements, std::int64_t period,
                              std::int64_t width);

}  // namespace zero::optim
