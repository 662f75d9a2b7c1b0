// What the block `activation_checkpointing` says about the built-in GPT: into how many segments its layers are split.
// How a segment's inputs are kept is the Engine's, from the same block.
#pragma once
#include <cstdint>

#include <zero/options.h>

#include "models/gpt.h"

namespace zero::cli {

// 0: no checkpointing, since every key of the block has its default.
std::int64_t segments_of(const Options& options, const models::GptConfig& model);
// Has the model's layers run as that many checkpointed segments; nothing for 0.
void place_segments(models::Gpt& model, std::int64_t segments);

// With a budget for the device and none set for activations: memory.activations by the model's formula, for the
// micro-batch of a world of `world` ranks. Otherwise the same options.
Options with_room_for_activations(const Options& options, const models::GptConfig& model, std::int64_t segments,
                                  int world);

}  // namespace zero::cli
