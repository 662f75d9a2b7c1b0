// How many tokens an expert takes (zero/moe.h). Arithmetic only; the gate and the planner share it.
#pragma once
#include <cstdint>

namespace zero::sharding {

// max(ceil(tokens / experts * factor * k), minimum), exact for the shortest decimal that is `factor`.
std::int64_t capacity(std::int64_t tokens, std::int64_t experts, double factor, std::int64_t k, std::int64_t minimum);

}  // namespace zero::sharding
