// The parameters of the model families that a plan knows, by name and size, in the order of registration. For the
// built-in GPT they are exactly those of models/gpt.h; for the others as published, a unit for each layer.
#pragma once
#include <vector>

#include <zero/plan.h>

#include "plan/units.h"

namespace zero::planning {

std::vector<Parameter> parameters_of(const PlanModel& model);
// The shape that stands for a number of parameters: a GPT whose width is about 128 times its depth.
PlanModel shape_for(double parameters);

}  // namespace zero::planning
