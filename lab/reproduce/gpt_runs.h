// A GPT of `zero train` as the experiments run and plan it: one description gives the configuration that ranks train
// and the question that the planner answers, so that the two cannot differ.
#pragma once
#include <zero/plan.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lab/reproduce/experiments.h"
#include "models/gpt_config.h"

namespace zero::cli {

struct GptRun {
  models::GptConfig gpt;
  int ranks = 2, stage = 0;
  std::string recipe = "bf16";
  std::int64_t batch = 1, steps = 3;
  double lr = 1e-3;
  std::int64_t device_budget = 0;  // bytes of one rank; 0: none
  // With a budget: those of the lower tiers; without them nothing leaves the device.
  std::int64_t host_budget = 0, file_budget = 0;
  // The planner's share of device_budget for activations, and a quarter more (memory.activations), in the place of the
  // estimate that `zero train` makes. With lower tiers a plan fills the device up to that share.
  bool reserves = false;
  bool checkpoints = false;    // activation checkpointing, one segment a layer
  Json more = Json::object();  // further keys, merged into the configuration

  std::int64_t parameters() const;  // elements, without experts
  // files: folder of offloaded states.
  Json config(const std::string& files) const;
};

// What `zero train` printed and wrote.
struct Trained {
  bool refused = false;
  std::string reason;
  std::vector<Json> steps;  // its lines
  Json result;              // of result.json
  double seconds = 0, cpu_seconds = 0;

  // Without the first step, which makes buffers.
  double median_step_s() const;
  std::uint64_t peak_bytes() const { return result.at("peak_bytes").get<std::uint64_t>(); }
};

// Trains in study.folder/label. may_be_refused: a budget that is too small is a result.
Trained train(Study& study, const std::string& label, const GptRun& run, bool may_be_refused = false);

// The plan of the run on CPU ranks of this host. device_bytes: a limit that only the plan knows; 0: none.
Plan plan_of(const GptRun& run, const std::string& files, std::uint64_t device_bytes = 0);
// Whether the planner, which decides by the engine's code, accepts the budgets.
bool fits_by_plan(const GptRun& run, const std::string& files);

// The largest model of `run` by layers: by plan, then by training. `trained` is of the largest size, `refusal` the
// reason with which one layer more was refused.
struct Largest {
  std::int64_t planned_layers = 0, layers = 0, parameters = 0, next_parameters = 0;
  Trained trained;
  std::string refusal;
};
Largest find_largest(Study& study, const std::string& label, GptRun run, std::int64_t most);

// Bytes as megabytes with two decimals: "12.34".
std::string megabytes(double bytes);
// "4 layers, hidden 192, ...".
std::string shape_text(const models::GptConfig& gpt);
// Of model states on one rank, in bytes a parameter: docs/memory.md. fp32, or 16 bits with fp32 masters; Adam.
double bytes_per_parameter(const std::string& recipe, int stage, double ranks);

}  // namespace zero::cli
