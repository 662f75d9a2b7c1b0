// The papers' arithmetic as functions: bytes of model states, activations, volumes, bandwidths. Symbols as there:
// P parameters, N data-parallel degree, L layers, h hidden, a heads, s sequence, b micro-batch, t tensor-parallel
// degree. What libzero itself allocates is dry_run.h's; nothing here pads, rounds or prints.
// Sources: ZeRO arXiv:1910.02054, ZeRO-Infinity arXiv:2104.07857, Korthikanti+ arXiv:2205.05198, ZeRO++
// arXiv:2306.10209, FSDP arXiv:2304.11277.
#pragma once

namespace zero::planning {

// Bytes an element: of the compute copy, of the kept gradient, of the optimizer's states with the master copy.
struct StateWidths {
  double parameter = 2, gradient = 2, optimizer = 12;
};
inline constexpr StateWidths kMixedAdam{2, 2, 12}, kMixedAdamFp32Gradients{2, 4, 12}, kInfinity{2, 2, 16},
    kFp32Adam{4, 4, 8};

// Bytes of model states on one device (ZeRO, section 5): stage s shards the optimizer's states from 1, gradients from
// 2, parameters at 3.
double state_bytes(const StateWidths& widths, int stage, double parameters, double ranks);
// Parameters that fit into `bytes` of one device.
double most_parameters(const StateWidths& widths, int stage, double bytes, double ranks);

struct Transformer {
  double layers = 0, hidden = 0, heads = 0, sequence = 1024, batch = 1;
  double parameters() const { return 12 * layers * hidden * hidden; }
};

// Bytes that one layer keeps for backward, 16-bit, with dropout and materialised attention (Korthikanti+, section 4).
enum class Keeping { All, TensorParallel, SequenceParallel, Selective, LayerInput, SplitLayerInput };
double activation_bytes_of_layer(const Transformer& model, Keeping keeping, double tensor_parallel = 1);
// ZeRO's rule, section 6.1: 12*h*b*s*L elements of 2 bytes in all; and the inputs of every layer alone.
double activation_bytes_by_rule(const Transformer& model);
double checkpoint_bytes(const Transformer& model, double layers_per_checkpoint = 1);

// ZeRO-Infinity, section 3: model states, activations, working memories.
double infinity_state_bytes(const Transformer& model);
double infinity_activation_bytes(const Transformer& model);
double model_state_working_memory(const Transformer& model);
double activation_working_memory(const Transformer& model, double layers_per_checkpoint = 1);
// Section 4: FLOP per byte moved; efficiency for a bandwidth in bytes/s and a peak in FLOP/s, and the way back.
double intensity_of_parameters(double sequence, double batch);
double intensity_of_optimizer(double sequence, double batch);
double intensity_of_checkpoints(double hidden, double layers_per_checkpoint = 1);
double efficiency(double intensity, double bandwidth, double peak);
double bandwidth_for(double efficiency, double intensity, double peak);

// Bytes that one rank sends in one optimizer step of `micro_steps` micro-batches. parameter_bytes: the compute copy
// with its padding; gradient_bytes: the same elements on the wire.
enum class Scheme {
  Stage0,
  Stage1,
  Stage1AllReduce,  // early versions: an all-reduce and an all-gather
  Stage2,
  Stage2Local,  // gradients are summed over micro-batches before ranks
  Stage3,
  Stage3Kept,           // parameters stay gathered from forward to backward
  Stage3OncePerStep,    // and until the last micro-batch
  Stage3LocalGradients  // gradients are kept whole until the last micro-batch
};
struct Volume {
  double parameter_bytes = 0, gradient_bytes = 0;
  double ranks = 1, micro_steps = 1;
  double persistent_bytes = 0;  // stage 3: of parameters that are whole on every rank
};
double sent_bytes(Scheme scheme, const Volume& volume);
// Shards over `shard` ranks, the same on ranks / shard others: inside the group; across groups.
double hybrid_inside(const Volume& volume, double shard);
double hybrid_across(const Volume& volume, double shard);

// DeepSpeed's estimate_zero*_model_states_mem_needs: bytes, on a device and on its host.
struct Estimate {
  double device, host;
};
enum class EstimateOffload { None, Optimizer, All };
constexpr double kHostFactor = 1.5;  // "additional_buffer_factor"
Estimate deepspeed_estimate_zero2(double parameters, double gpus_per_node, double nodes, EstimateOffload offload);
Estimate deepspeed_estimate_zero2_documented(double parameters, double gpus_per_node, double nodes);
Estimate deepspeed_estimate_zero3(double parameters, double largest_layer, double gpus_per_node, double nodes,
                                  EstimateOffload offload);

}  // namespace zero::planning
