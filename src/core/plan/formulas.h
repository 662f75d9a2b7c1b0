// Formulas of the papers as functions: bytes of model states, activations, volumes, bandwidths. Symbols as in the
// papers: P parameters, N data-parallel degree, L layers, h hidden, a heads, s sequence, b micro-batch, t
// tensor-parallel degree. Results are not padded or rounded. dry_run.h computes what libzero itself allocates.
// Sources: ZeRO arXiv:1910.02054, ZeRO-Infinity arXiv:2104.07857, Korthikanti+ arXiv:2205.05198, ZeRO++
// arXiv:2306.10209, FSDP arXiv:2304.11277.
#pragma once

namespace zero::planning {

// Bytes per element: of the parameter, of the stored gradient, of the optimizer states including the fp32 master.
struct StateWidths {
  double parameter = 2, gradient = 2, optimizer = 12;
};
inline constexpr StateWidths kMixedAdam{2, 2, 12}, kMixedAdamFp32Gradients{2, 4, 12}, kInfinity{2, 2, 16},
    kFp32Adam{4, 4, 8};

// Bytes of model states on one device (ZeRO, section 5). Stage 1 shards optimizer states, stage 2 also gradients,
// stage 3 also parameters.
double state_bytes(const StateWidths& widths, int stage, double parameters, double ranks);
// The same of a model with experts, of which a rank has 1/ep: `dense` parameters over all ranks, `experts` (of all
// experts together) / ep over ranks / ep.
double expert_state_bytes(const StateWidths& widths, int stage, double dense, double experts, double ranks, double ep);
// The number of parameters that fit into `bytes` of one device.
double most_parameters(const StateWidths& widths, int stage, double bytes, double ranks);

struct Transformer {
  double layers = 0, hidden = 0, heads = 0, sequence = 1024, batch = 1;
  double parameters() const { return 12 * layers * hidden * hidden; }
};

// Bytes that one layer saves for backward, 16-bit, with dropout and materialised attention (Korthikanti+, section 4).
enum class Keeping { All, TensorParallel, SequenceParallel, Selective, LayerInput, SplitLayerInput };
double activation_bytes_of_layer(const Transformer& model, Keeping keeping, double tensor_parallel = 1);
// ZeRO, section 6.1: 12*h*b*s*L elements of 2 bytes for all activations; the second counts only the layers' inputs.
double activation_bytes_by_rule(const Transformer& model);
double checkpoint_bytes(const Transformer& model, double layers_per_checkpoint = 1);

// ZeRO, section 8: bytes that a rank sends for one layer in a forward and backward. Tensor parallelism with
// recomputation all-reduces six times an activation of batch * sequence * hidden elements: 12 * that * (t-1)/t. ZeRO
// sends the bytes of the layer's parameters 2 times, at stage 3 3 times.
double tensor_parallel_bytes_of_layer(const Transformer& model, double element, double tensor_parallel);
double zero_bytes_of_layer(int stage, double parameter_bytes, double tensor_parallel);

// ZeRO-Infinity, section 3: model states, activations, working memory of both.
double infinity_state_bytes(const Transformer& model);
double infinity_activation_bytes(const Transformer& model);
double model_state_working_memory(const Transformer& model);
double activation_working_memory(const Transformer& model, double layers_per_checkpoint = 1);
// ZeRO-Infinity, section 4: FLOP per byte moved; efficiency for a bandwidth in bytes/s and a peak in FLOP/s; the
// bandwidth that an efficiency needs.
double intensity_of_parameters(double sequence, double batch);
double intensity_of_optimizer(double sequence, double batch);
double intensity_of_checkpoints(double hidden, double layers_per_checkpoint = 1);
double efficiency(double intensity, double bandwidth, double peak);
double bandwidth_for(double efficiency, double intensity, double peak);

// Bytes that one rank sends in one optimizer step of `micro_steps` micro-batches. parameter_bytes: all parameters with
// their padding; gradient_bytes: the same elements in the reduce dtype.
enum class Scheme {
  Stage0,
  Stage1,
  Stage1AllReduce,  // early versions: an all-reduce and an all-gather
  Stage2,
  Stage2Local,  // gradients are summed over micro-batches first, then over ranks
  Stage3,
  Stage3Kept,           // parameters stay unsharded from forward to backward
  Stage3OncePerStep,    // parameters stay unsharded until the last micro-batch ends
  Stage3LocalGradients  // gradients stay unsharded until the last micro-batch
};
struct Volume {
  double parameter_bytes = 0, gradient_bytes = 0;
  double ranks = 1, micro_steps = 1;
  double persistent_bytes = 0;  // stage 3: bytes of the parameters that are never sharded
};
double sent_bytes(Scheme scheme, const Volume& volume);
// Hybrid sharding: shards over `shard` ranks, replicated ranks / shard times. Bytes inside a group; across groups.
double hybrid_inside(const Volume& volume, double shard);
double hybrid_across(const Volume& volume, double shard);

// DeepSpeed's estimate_zero*_model_states_mem_needs: bytes on a device and on its host.
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
