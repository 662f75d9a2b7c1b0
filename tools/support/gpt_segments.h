// The block `activation_checkpointing` for the built-in GPT: the number of segments its layers are divided into. The
// Engine reads from the same block how the segments' inputs are stored.
#pragma once
#include <cstdint>

#include <zero/options.h>

#include "models/gpt.h"

namespace zero::cli {

// 0: no checkpointing, because every key of the block has its default.
std::int64_t segments_of(const Options& options, const models::GptConfig& model);
// The same of any model with that many layers.
std::int64_t segments_of(const Options& options, std::int64_t layers);
// Runs the model's layers as that many checkpointed segments. No effect for 0.
void place_segments(models::Gpt& model, std::int64_t segments);

// If the device has a budget without memory.activations, sets that key by the model's formula, for the micro-batch with
// `world` ranks. Otherwise returns the options unchanged.
Options with_room_for_activations(const Options& options, const models::GptConfig& model, std::int64_t segments,
                                  int world);

}  // namespace zero::cli
