// The built-in GPT for the planner: its shape, and the description of its forward and backward (models/gpt_pass.h).
#pragma once
#include <zero/plan.h>

namespace zero::cli {

// Returns `model` with the description of models/gpt_pass.h if it is that GPT without
// experts, else unchanged.
PlanModel with_gpt_pass(PlanModel model);

}  // namespace zero::cli
