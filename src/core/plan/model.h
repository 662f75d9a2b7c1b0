// The parameters of the built-in model families, by name and size, in the order of registration. Names and sizes are
// as published, each layer is a unit; the GPT's names are those of models/gpt.h.
#pragma once
#include <vector>

#include <zero/plan.h>

#include "config/settings.h"
#include "plan/units.h"

namespace zero::planning {

std::vector<Parameter> parameters_of(const PlanModel& model);
// "AdamW", "SGD", ...: the name of the optimizer that a plan uses for `type`.
const char* name(config::OptimizerType type);
// The shape that represents a number of parameters: a GPT whose width is about 128 times its depth.
PlanModel shape_for(double parameters);

}  // namespace zero::planning
