// See formulas.h.
#include "plan/formulas.h"

#include <algorithm>

namespace zero::planning {
namespace {

double sent_of(double ranks) { return (ranks - 1) / ranks; }
double on(bool sharded, double ranks) { return sharded ? ranks : 1; }

}  // namespace

double state_bytes(const StateWidths& w, int stage, double parameters, double ranks) {
  return w.parameter * parameters / on(stage >= 3, ranks) + w.gradient * parameters / on(stage >= 2, ranks) +
         w.optimizer * parameters / on(stage >= 1, ranks);
}

double expert_state_bytes(const StateWidths& w, int stage, double dense, double experts, double ranks, double ep) {
  return state_bytes(w, stage, dense, ranks) + state_bytes(w, stage, experts / ep, ranks / ep);
}

double most_parameters(const StateWidths& widths, int stage, double bytes, double ranks) {
  return bytes / state_bytes(widths, stage, 1, ranks);
}

double activation_bytes_of_layer(const Transformer& m, Keeping keeping, double t) {
  const double sbh = m.sequence * m.batch * m.hidden, scores = 5 * m.heads * m.sequence / m.hidden;
  switch (keeping) {
    case Keeping::All:
      return sbh * (34 + scores);
    case Keeping::TensorParallel:
      return sbh * (10 + 24 / t + scores / t);
    case Keeping::SequenceParallel:
      return sbh / t * (34 + scores);
    case Keeping::Selective:
      return 34 * sbh / t;
    case Keeping::LayerInput:
      return 2 * sbh;
    case Keeping::SplitLayerInput:
      return 2 * sbh / t;
  }
  return 0;
}

double activation_bytes_by_rule(const Transformer& m) { return 2 * 12 * m.hidden * m.batch * m.sequence * m.layers; }

double checkpoint_bytes(const Transformer& m, double layers_per_checkpoint) {
  return 2 * m.batch * m.sequence * m.hidden * m.layers / layers_per_checkpoint;
}

double tensor_parallel_bytes_of_layer(const Transformer& m, double element, double t) {
  return 12 * m.batch * m.sequence * m.hidden * element * sent_of(t);
}

double zero_bytes_of_layer(int stage, double parameter_bytes, double t) {
  return (stage >= 3 ? 3 : 2) * parameter_bytes / t;
}

double infinity_state_bytes(const Transformer& m) { return state_bytes(kInfinity, 0, m.parameters(), 1); }

double infinity_activation_bytes(const Transformer& m) {
  return m.batch * m.sequence * m.layers * (16 * m.hidden + 2 * m.heads * m.sequence);
}

double model_state_working_memory(const Transformer& m) { return 16 * m.hidden * m.hidden; }

double activation_working_memory(const Transformer& m, double layers_per_checkpoint) {
  return m.batch * m.sequence * layers_per_checkpoint * (16 * m.hidden + 2 * m.heads * m.sequence);
}

double intensity_of_parameters(double sequence, double batch) { return sequence * batch; }
double intensity_of_optimizer(double sequence, double batch) { return sequence * batch / 4; }
double intensity_of_checkpoints(double hidden, double layers_per_checkpoint) {
  return 24 * hidden * layers_per_checkpoint;
}
double efficiency(double intensity, double bandwidth, double peak) {
  return intensity * bandwidth / (intensity * bandwidth + peak);
}
double bandwidth_for(double e, double intensity, double peak) { return peak / intensity * e / (1 - e); }

double sent_bytes(Scheme scheme, const Volume& v) {
  const double f = sent_of(v.ranks), k = v.micro_steps, p = v.parameter_bytes, r = v.gradient_bytes;
  switch (scheme) {
    case Scheme::Stage0:
      return 2 * f * r;
    case Scheme::Stage1:
    case Scheme::Stage2Local:
      return f * r + f * p;
    case Scheme::Stage1AllReduce:
      return 2 * f * r + f * p;
    case Scheme::Stage2:
      return k * f * r + f * p;
    case Scheme::Stage3:
      return 2 * k * f * (p - v.persistent_bytes) + f * v.persistent_bytes + k * f * r;
    case Scheme::Stage3Kept:
      return k * f * p + k * f * r;
    case Scheme::Stage3OncePerStep:
      return f * p + k * f * r;
    case Scheme::Stage3LocalGradients:
      return 2 * k * f * p + f * r;
  }
  return 0;
}

double hybrid_inside(const Volume& v, double shard) {
  return sent_of(shard) * v.micro_steps * (2 * v.parameter_bytes + v.gradient_bytes);
}

double hybrid_across(const Volume& v, double shard) { return 2 * sent_of(v.ranks / shard) * v.gradient_bytes / shard; }

Estimate deepspeed_estimate_zero2(double parameters, double gpus, double nodes, EstimateOffload offload) {
  if (offload != EstimateOffload::None) return {2 * parameters, parameters * std::max(4 * gpus, 16.0) * kHostFactor};
  return {2 * parameters + 18 * parameters / (gpus * nodes), parameters * 4 * gpus * kHostFactor};
}

Estimate deepspeed_estimate_zero2_documented(double parameters, double gpus, double nodes) {
  return {4 * parameters + 16 * parameters / (gpus * nodes), parameters * 4 * gpus * kHostFactor};
}

Estimate deepspeed_estimate_zero3(double parameters, double largest_layer, double gpus, double nodes,
                                  EstimateOffload offload) {
  const double live = 4 * largest_layer, n = gpus * nodes;
  switch (offload) {
    case EstimateOffload::None:
      return {live + 18 * parameters / n, parameters * 4 * gpus * kHostFactor};
    case EstimateOffload::Optimizer:
      return {live + 2 * parameters / n, parameters * std::max(4 * gpus, 16 / nodes) * kHostFactor};
    case EstimateOffload::All:
      break;
  }
  return {live, 18 * parameters / nodes * kHostFactor};
}

}  // namespace zero::planning
