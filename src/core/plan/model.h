// The parameters of the built-in model families, by name and size, in the order of registration. Names and sizes are
// as published, each layer is a unit; the GPT's names are those of models/gpt.h.
#pragma once
#include <vector>

#include <zero/plan.h>

#include "config/settings.h"
#include "plan/units.h"

namespace zero::planning {

std::vector<Parameter> parameters_of(const PlanModel& model);
// Checks the patterns of libzero.keep_fp32, for the planned model only; the search also tries models of other sizes.
// Throws ConfigError for one that matches no parameter of a GPT. Names of other models are the planner's own: returns a
// notice for each pattern that matches none of them.
std::vector<std::string> check_patterns(const PlanModel& model, const config::Settings& settings);
// Whether a layer of the model, counted from 0, has experts; how many have some.
bool has_experts(const PlanModel& model, std::int64_t layer);
std::int64_t expert_layers(const PlanModel& model);
// Rows that the experts of a layer compute for `tokens` tokens of a rank if all are chosen equally often: choices that
// are not dropped.
std::int64_t kept_rows(const PlanExperts& experts, std::int64_t tokens);
PlanExperts experts_of(const config::ExpertSettings& settings);
// "AdamW", "SGD", ...: the name of the optimizer that a plan uses for `type`.
const char* name(config::OptimizerType type);
// The shape that represents a number of parameters: a GPT whose width is about 128 times its depth.
PlanModel shape_for(double parameters);

}  // namespace zero::planning
