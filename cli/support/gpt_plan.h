// The built-in GPT as the planner knows it: a shape and its published parameters, with the model's own description of
// what a forward and backward does.
#pragma once
#include <zero/plan.h>

namespace zero::cli {

// `model` with the description of models/gpt_pass.h where it is that GPT; else as it is.
PlanModel with_gpt_pass(PlanModel model);

}  // namespace zero::cli
