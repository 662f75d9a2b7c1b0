#include "tools/support/gpt_segments.h"

#include <algorithm>

#include <zero/activation_checkpoint.h>
#include <zero/plan.h>

#include "config/batch.h"
#include "config/settings.h"
#include "models/gpt_activations.h"
#include "tools/support/gpt_plan.h"

namespace zero::cli {

std::int64_t segments_of(const Options& options, std::int64_t layers) {
  const auto& activations = options.settings().activations;
  // A block whose keys have no effect here still enables checkpointing.
  const bool split = options.effective()["activation_checkpointing.partition_activations"] == "true";
  if (!activations.checkpointing && !split) return 0;
  return activations.num_checkpoints > 0 ? std::min(activations.num_checkpoints, layers) : layers;
}

std::int64_t segments_of(const Options& options, const models::GptConfig& model) {
  return segments_of(options, model.layers);
}

void place_segments(models::Gpt& model, std::int64_t segments) {
  if (segments == 0) return;
  model->run_layers_by(
      segments, [](const models::GptImpl::Part& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
}

namespace {

// Of the part that a rank of a mesh computes.
std::int64_t activations_on_mesh(const Options& options, int world) {
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = world;
  const auto unlimited = options.with({{"memory.device", "null", "zero train"},
                                       {"memory.host", "null", "zero train"},
                                       {"memory.file", "null", "zero train"}});
  const auto planned = plan(with_gpt_pass(PlanModel::of_options(options)), unlimited, machine);
  return static_cast<std::int64_t>(planned.memory.peak(MemoryReport::Tier::Device, MemoryReport::Purpose::Activations));
}

}  // namespace

Options with_room_for_activations(const Options& options, const models::GptConfig& model, std::int64_t segments,
                                  int world) {
  const auto& settings = options.settings();
  if (!settings.memory.device || settings.memory.activations) return options;
  const std::int64_t element = settings.precision == config::Precision::Fp32 ? 4 : 2;
  const auto bytes =
      settings.mesh.tensor * settings.mesh.sequence > 1 || settings.model.experts.num_experts > 0
          ? activations_on_mesh(options, world)
          : models::activations_of(model, config::resolve_batch(options, world).micro, element, segments).peak();
  return options.with("memory.activations", std::to_string(bytes), "rule: what the model keeps for backward");
}

}  // namespace zero::cli
