// Which numbers of ranks can train with a configuration. The ranks publish it, so that `zero run` starts a job again
// only on a number that fits.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::base {

struct WorldRule {
  std::int64_t batch_parts = 0;    // the number of data-parallel ranks divides it; 0: any number does
  std::int64_t data_parallel = 0;  // the only number of data-parallel ranks; 0: not fixed
  std::int64_t copy = 1;           // ranks that share one copy of the model: tensor- times sequence-parallel
  std::int64_t tensor = 1;
  std::int64_t experts = 1;  // divides ranks / tensor

  bool allows(std::int64_t ranks) const;
  // All from 1 to `most`, ascending.
  std::vector<std::int64_t> allowed(std::int64_t most) const;
  bool operator==(const WorldRule&) const = default;
};

// "1, 2 or 4"; "none" of no numbers.
std::string one_of(const std::vector<std::int64_t>& numbers);

}  // namespace zero::base
