// The parameters of the model families that a plan knows, by name and size, in the order of registration. As
// published, a unit for each layer; the GPT's names are those of models/gpt.h.
#pragma once
#include <vector>

#include <zero/plan.h>

#include "config/settings.h"
#include "plan/units.h"

namespace zero::planning {

std::vector<Parameter> parameters_of(const PlanModel& model);
// "AdamW", ...: of an optimizer, and of the one that is planned where a configuration has none.
const char* name(config::OptimizerType type);
// The shape that stands for a number of parameters: a GPT whose width is about 128 times its depth.
PlanModel shape_for(double parameters);

}  // namespace zero::planning
