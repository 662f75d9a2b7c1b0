// The command line of `zero plan` as plain values: model, machine, configuration, what to compare. Parsed by
// plan_options.cpp; plan.cpp computes and prints the plan.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include <zero/plan.h>

#include "tools/plan/measured_models.h"
#include "tools/support/expert_options.h"
#include "tools/support/options.h"

namespace zero::cli {

// Values of the flags; 0 or empty: not given.
struct PlanArguments {
  std::string config_positional, config, model, params, paper, write, nvme_path = "/tmp";
  std::vector<std::pair<std::string, std::string>> set;
  bool strict = false, untied = false, measure = false;
  std::int64_t layers = 0, hidden = 0, heads = 0, vocabulary = 0, sequence = 0;
  std::int64_t world = 0, hosts = 0, devices = 0, micro_batch_size = 0, accumulation = 0;
  std::int64_t tensor_parallel = 0, sequence_parallel = 0, pipeline = 0;
  std::int64_t data_parallel = 0;
  ExpertArguments experts;
  std::string budget;
  std::string memory, host_memory, nvme, reserve, device = "cuda", profile;
  std::string link, network, pcie, disk, flops;
  std::string stage = "all", offload = "all", checkpointing = "all", dtype, optimizer;
};

struct PlanQuestion {
  PlanModel model;
  Options options;
  PlanMachine machine;
  PlanChoices choices;
  bool from_file = false;  // a configuration file was given and is also planned unchanged
};

// What --measure asks for. Throws ConfigError.
MeasuredModels measured_of(const Command& command, const PlanArguments& arguments);

void declare_plan(Command& command, PlanArguments& arguments);
// Throws ConfigError, IoError.
PlanQuestion question_of(const Command& command, const PlanArguments& arguments);

}  // namespace zero::cli
