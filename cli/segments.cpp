#include "cli/segments.h"

#include <algorithm>

#include <zero/activation_checkpoint.h>

#include "config/settings.h"

namespace zero::cli {

std::int64_t segments_of(const Options& options, const models::GptConfig& model) {
  const auto& activations = options.settings().activations;
  // A block that asks only for what has no effect here asks for checkpointing all the same.
  const bool split = options.effective()["activation_checkpointing.partition_activations"] == "true";
  if (!activations.checkpointing && !split) return 0;
  return activations.num_checkpoints > 0 ? std::min(activations.num_checkpoints, model.layers) : model.layers;
}

void place_segments(models::Gpt& model, std::int64_t segments) {
  if (segments == 0) return;
  model->run_layers_by(segments, [](const models::GptImpl::Part& part, const at::Tensor& x) {
    return activation_checkpoint(part, x);
  });
}

}  // namespace zero::cli
