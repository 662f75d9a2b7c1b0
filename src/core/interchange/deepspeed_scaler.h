// DeepSpeed's loss scaler of fp16, read from its checkpoints and written into them: the objects LossScaler and
// DynamicLossScaler of deepspeed/runtime/fp16/loss_scaler.py. They count from the last overflow's step, and libzero
// counts steps without one: the scale and the next step that doubles it are the same. No file access.
#pragma once
#include <cstdint>
#include <optional>

#include "interchange/pickle_view.h"
#include "interchange/pickle_writer.h"
#include "interchange/source.h"

namespace zero::interchange {

// The scaler in a dictionary of an optimizer's states: the object "loss_scaler" of stages 1 to 3, or the numbers that
// stage 0 has next to the states. Nothing if there is none, or if the run was not in fp16: `fp16` says what is known of
// it. Throws IoError (kCheckpoint) for impossible numbers.
std::optional<SourceScaler> read_deepspeed_scaler(const PickleView& states, bool fp16);

// The entries "loss_scaler", "dynamic_loss_scale" and "overflow" of a dictionary. steps: the number of all steps.
void write_deepspeed_scaler(PickleWriter& pickle, const SourceScaler& scaler, std::int64_t steps);

}  // namespace zero::interchange
