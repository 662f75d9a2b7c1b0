// Converts entries to Settings: every key sets its field; then what follows from several keys.
#include <algorithm>

#include "config/document.h"
#include "config/optimizers.h"

namespace zero::config {
namespace {

void read_plan(const Document& document, MeshSettings& mesh) {
  const Entry* config = document.find("tensor_parallel.partition_config");
  const bool vocab_parallel_lm_head = mesh.plan.vocab_parallel_lm_head;
  Faults checked;  // by document_checks.cpp
  // The value has its place, which messages about the model name.
  mesh.plan = read_tp_plan(config ? config->value : Value{}, mesh.preset_model, mesh.tensor, checked);
  mesh.plan.vocab_parallel_lm_head = vocab_parallel_lm_head;
}

}  // namespace

Settings default_settings(OptimizerType optimizer) {
  Settings s;
  s.optimizer = default_optimizer(optimizer);
  return s;
}

Settings typed_settings(const Document& document) {
  Settings s = default_settings(document.optimizer_type());
  for (const auto& [path, entry] : document.entries)
    if (entry.key->read && !entry.automatic) entry.key->read(entry.value, s);
  // DeepSpeed's two schedules differ in what a missing maximum means.
  if (s.schedule.warmup_max_lr.empty() && s.schedule.type == ScheduleType::WarmupDecayLR)
    s.schedule.warmup_max_lr = {1e-3};
  // DeepSpeed's Muon has one rate unless it is given two.
  if (s.optimizer.type == OptimizerType::Muon && document.is_set("optimizer.params.lr") &&
      !document.is_set("optimizer.params.adam_lr"))
    s.optimizer.adam_lr = s.optimizer.lr;
  if (s.optimizer.muon_lr) s.optimizer.lr = *s.optimizer.muon_lr;
  read_plan(document, s.mesh);
  s.zero.hpz_ranks = std::clamp(s.zero.hpz_ranks, 1, 1 << 20);
  if (s.zero.delayed_param_update.enabled) s.zero.delayed_update = s.zero.delayed_param_update;
  for (const auto& other : {s.zero.offload_optimizer.path, s.zero.offload_param.path})
    if (s.memory.path.empty()) s.memory.path = other;
  auto& a = s.activations;
  a.checkpointing =
      a.num_checkpoints > 0 || a.to_host || a.contiguous || a.synchronize || a.profile || !a.file_path.empty();
  s.checkpoint.export_weights = s.zero.gather_16bit_weights && s.zero.stage == 3;
  return s;
}

}  // namespace zero::config
