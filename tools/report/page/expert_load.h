// How many tokens chose each expert over a run: the file experts.jsonl of a run folder. A line is the sum of some
// steps, so that a run has at most about kMostLoadLines of them.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zero::report {

inline constexpr std::int64_t kMostLoadLines = 200;

// One layer with experts.
struct LayerLoad {
  std::int64_t block = 0;            // its number, from 0
  std::vector<std::int64_t> counts;  // by expert: choices of tokens of all ranks, before any were dropped
  std::int64_t kept = 0;             // choices that were not dropped

  std::int64_t sum() const;
  double over_mean(std::int64_t count) const;  // 1 if no token chose any
  double max_over_mean() const;                // 1: even; the number of experts: one takes all
  double min_over_mean() const;
  double dropped() const;  // share of the choices
};

// The sums over the steps first to last.
struct ExpertLoad {
  std::int64_t first = 0, last = 0;
  std::vector<LayerLoad> layers;

  // `later`: steps of the same layers.
  void add(const ExpertLoad& later);
  double max_over_mean() const;  // the highest of the layers'
  double dropped() const;        // of all layers
};

// Steps of a line, for a run of `steps` steps.
std::int64_t steps_of_load_line(std::int64_t steps);
// One line, without its end.
std::string load_json(const ExpertLoad& load);
// A line with the steps, then a line for each layer: "  block 1: the busiest has 1.21 x the mean, 3.1 % dropped".
std::string load_text(const ExpertLoad& load);
// The lines of a file, oldest first; empty without the file. An unfinished last line is dropped, and steps that a
// resumed run repeated replace the older ones. Throws ConfigError with file and line for invalid contents.
std::vector<ExpertLoad> read_loads(const std::filesystem::path& path);
// The same in at most `most` sums of neighbours.
std::vector<ExpertLoad> joined(const std::vector<ExpertLoad>& loads, std::size_t most);

}  // namespace zero::report
