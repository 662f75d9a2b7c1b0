// Runs of `zero run -n RANKS zero train` on a small GPT, with what they print and write.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace zero::test {

struct TrainedRun {
  int code = -1;
  std::string out, err, folder;  // folder: of the run's text, and of its folder "out"
  std::vector<double> losses;
  double heldout = 0;
  std::vector<nlohmann::json> log;
  nlohmann::json record, result;  // run.json, result.json
};

// A GPT of 2 layers and 5 heads on sequences of 33 tokens, so that heads and tokens divide unevenly; stage 3, fp32.
// folder: empty: a new one.
TrainedRun train_command(int ranks, const std::vector<std::string>& options, int steps = 12, std::string folder = "");

}  // namespace zero::test
