// The hyper-parameters in DeepSpeed's checkpoints: param_groups of the optimizer. No file access.
#pragma once
#include "interchange/pickle_view.h"
#include "interchange/source.h"

namespace zero::interchange {

// states: a dictionary with param_groups, or around one ("base_optimizer_state", "optimizer_state_dict"). "lr" is the
// rate that a schedule of torch began with ("initial_lr"), if there is one. What is not a number is left out.
SourceSettings read_deepspeed_settings(const PickleView& states);

}  // namespace zero::interchange
