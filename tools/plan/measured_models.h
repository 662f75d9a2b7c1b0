// `zero plan --paper table2 --measure`: the largest GPT that real ranks train within a budget, for each stage and
// degree of tensor parallelism, next to the formula of ZeRO's Table 2. measured_models.cpp searches and prints, with
// ranks as processes; measured_rank.cpp trains one shape on one rank. Both are in `zero-torch` only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <zero/options.h>

#include "models/gpt_config.h"
#include "tools/support/console.h"
#include "tools/support/measurement.h"

namespace zero::cli {

struct MeasuredModels {
  std::uint64_t budget = 64'000'000;  // bytes of one rank
  std::int64_t data = 2;              // data-parallel ranks, for each tensor-parallel one
  std::vector<int> tensor{1, 2}, stages{0, 1, 2, 3};
};

struct MeasuredText {
  Json json;
  std::string text;  // tables with notes
};

// Weak, because `zero` without libtorch cannot train. Takes minutes; progress is on stderr. Throws ConfigError for a
// budget that one layer exceeds, and InternalError with the exit code of failed ranks.
[[gnu::weak]] MeasuredText measure_models(const MeasuredModels& asked, const Global& global, std::size_t columns);

// One training: mixed precision with Adam, 16 bytes a parameter (kMixedAdam of plan/formulas.h).
struct MeasuredTask {
  models::GptConfig gpt;
  int stage = 0, tensor = 1;

  Options options() const;
  Json json() const;
  static MeasuredTask from(const Json& json);
};

// Runs one of these ranks as a process, started as `zero-torch plan-rank`. Rank 0 hands over {"states_bytes",
// "peak_bytes": the most of any rank, "tensor_parallel_bytes", "zero_bytes": sent by rank 0 in the last step}.
int plan_rank(int argc, char** argv);

}  // namespace zero::cli
