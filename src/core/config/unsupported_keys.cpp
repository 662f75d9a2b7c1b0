// Keys of DeepSpeed that do nothing here or are refused, with the reason.
#include <algorithm>

#include "base/check.h"
#include "config/key_rows.h"

namespace zero::config {
namespace {

constexpr Effect kNoEffect = Effect::NoEffect, kNotBuilt = Effect::NotBuilt, kRefused = Effect::Refused;

// The type and the default of a key without a field.
struct Constant {
  Type type;
  std::string_view json, choices{};

  constexpr Constant(bool on) : type(Type::Bool), json(on ? "true" : "false") {}  // NOLINT(google-explicit-constructor)
  constexpr Constant(Type null_of) : type(null_of), json(kNull) {}                // NOLINT(google-explicit-constructor)
  constexpr Constant(Type of, std::string_view value, std::string_view words = {})
      : type(of), json(value), choices(words) {}
};

// A heading of the list: the next keys are displayed after this one.
struct After {
  std::string_view key;
};

struct Unsupported {
  std::string_view after{}, path{};
  Effect effect = kNoEffect;
  Constant constant{Type::Any};
  std::string_view help{}, reason{};
  Rules rules{};

  constexpr Unsupported(After heading) : after(heading.key) {}  // NOLINT(google-explicit-constructor)
  template <class... Rule>
  constexpr Unsupported(Effect what, std::string_view key, Constant value, std::string_view text, std::string_view why,
                        Rule... more)
      : path(key), effect(what), constant(value), help(text), reason(why), rules(rules_of({}, more...)) {}
};

constexpr std::string_view kOne = "one implementation of every optimizer";
constexpr std::string_view kInPlace = "all-gathers write in place, without a coalescing copy";
constexpr std::string_view kUnits = "libzero.units names units by path";
constexpr std::string_view kNoSubGroups = "sub-group sharding is not implemented";
constexpr std::string_view kLayerSpecs = "\"multiple\" of a layer_specs entry decides";
constexpr std::string_view kWriter = "every rank writes its own bytes through one writer";
constexpr std::string_view kProfiler = "use `zero bench`";
constexpr std::string_view kNoService = "only libzero.deepspeed logs to it";
constexpr std::string_view kModel = "it changes the model";

constexpr Unsupported kUnsupported[] = {
    After{"optimizer.params.fp32_optimizer_states"},
    {kNoEffect, "optimizer.params.torch_adam", false, "DeepSpeed: torch's Adam", kOne},
    {kNoEffect, "optimizer.params.set_grad_none", true, "DeepSpeed: set gradients to None instead of zero", kOne},
    {kNoEffect, "optimizer.legacy_fusion", false, "DeepSpeed: old fused kernels", kOne},
    {kNoEffect, "zero_allow_untested_optimizer", false, "allow optimizer classes defined by the program",
     "all optimizers are built in"},
    After{"fp16.enabled"},
    {kNotBuilt, "fp16.auto_cast", false, "cast floating-point inputs of the top module",
     "cast inputs in the program: x.to(torch::kHalf)"},
    After{"bf16.check_grad_overflow"},
    {kNoEffect, "bf16.immediate_grad_update", false, "accumulate each gradient immediately",
     "every gradient is always accumulated immediately"},
    After{"libzero.timeout_s"},
    {kNoEffect, "libzero.deterministic", false, "deterministic device kernels, fixed order of sums",
     "on CPUs sums already have a fixed order"},
    After{"zero_optimization.stage"},
    {kNoEffect, "zero_optimization.reduce_scatter", true, "false: all-reduce, then keep the rank's own shard",
     "gradients are always reduce-scattered; the result is bitwise identical", needs(When::StagesFrom1)},
    After{"zero_optimization.overlap_comm"},
    {kNoEffect, "zero_optimization.round_robin_gradients", false, "spread gradient copies over ranks",
     "each rank copies only its own shard to the host, so the load is already balanced"},
    {kNoEffect, "zero_optimization.contiguous_gradients", true, "gradients in one contiguous buffer",
     "gradients are always stored in one contiguous buffer"},
    {kNoEffect, "zero_optimization.use_multi_rank_bucket_allreduce", true,
     "one reduction for the shards of several ranks", "a real reduce-scatter is used"},
    {kNoEffect, "zero_optimization.allgather_partitions", true,
     "all-gather (true) or broadcasts (false) after the update", "always an all-gather"},
    {kNoEffect, "zero_optimization.elastic_checkpoint", false, "DeepSpeed: checkpoints for another number of ranks",
     "every checkpoint loads on any number of ranks, at any stage and on any tier"},
    After{"zero_optimization.ignore_unused_parameters"},
    {kNotBuilt, "zero_optimization.load_from_fp32_weights", true,
     "on load, compute 16-bit weights from the fp32 masters", "weights are always computed from the masters"},
    After{"zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {kNoEffect, "zero_optimization.stage3_module_granularity_threshold", Constant(Type::Int, "0"),
     "smallest module that is unsharded as one", "all-gathers follow units, not modules", at_least(0)},
    {kNoEffect, "zero_optimization.stage3_use_all_reduce_for_fetch_params", false, "unshard parameters by all-reduce",
     kInPlace},
    {kNoEffect, "zero_optimization.stage3_allgather_sequential", false, "all-gather parameters one by one", kInPlace},
    After{"zero_optimization.zero_hpz_partition_size"},
    {kNotBuilt, "zero_optimization.leaf_module.names", Constant(Type::TextList, "[]"),
     "modules unsharded as one unit, by path", kUnits, needs(When::Stage3)},
    {kNotBuilt, "zero_optimization.leaf_module.name_suffixes", Constant(Type::TextList, "[]"),
     "modules unsharded as one unit, by the end of their path", kUnits, needs(When::Stage3)},
    {kNotBuilt, "zero_optimization.leaf_module.classes", Constant(Type::TextList, "[]"),
     "modules unsharded as one unit, by C++ type", kUnits, needs(When::Stage3)},
    After{"zero_optimization.enable_sanity_checks"},
    {kNoEffect, "zero_optimization.memory_efficient_linear", true, "DeepSpeed: replace torch.nn.functional.linear",
     "unsharded weights are freed after forward for every layer"},
    {kNoEffect, "zero_optimization.override_module_apply", true, "DeepSpeed: replace torch.nn.Module.apply",
     "applies to DeepSpeed's Python modules"},
    {kNoEffect, "zero_optimization.pipeline_loading_checkpoint", false, "load layer by layer",
     "each rank reads only its own bytes"},
    {kNoEffect, "zero_optimization.save_muon_momentum_buffer_in_memory", false, "Muon optimizer",
     "states rest where offload_optimizer puts them"},
    {kNoEffect, "zero_optimization.grad_hooks", true, "documented by DeepSpeed, not used",
     "gradients are always collected by hooks"},
    {kRefused, "zero_optimization.legacy_stage1", false, "DeepSpeed's first implementation of stage 1",
     "not available; DeepSpeed refuses it as well"},
    After{"zero_optimization.zero_quantized_gradients"},
    {kRefused, "zero_optimization.zeropp_loco_param", Type::Any, "ZeRO++ LoCo",
     "quantized gradients are reduced without error feedback; remove the key"},
    {kRefused, "zero_optimization.mics_shard_size", Constant(Type::Int, "-1"), "MiCS", kNoSubGroups, at_least(-1)},
    {kRefused, "zero_optimization.mics_hierarchical_params_gather", false, "MiCS", kNoSubGroups},
    {kRefused, "zero_optimization.zenflow", Type::Any, "ZenFlow", "it changes the update rule"},
    After{"zero_optimization.offload_optimizer.ratio"},
    {kNoEffect, "zero_optimization.offload_optimizer.fast_init", false, "DeepSpeed: faster first write",
     "states are written once, without reading"},
    {kRefused, "zero_optimization.offload_optimizer.super_offload", false, "SuperOffload",
     "specific to one type of machine"},
    {kNoEffect, "zero_optimization.offload_optimizer.cpuadam_cores_perc", Constant(Type::Num, "0.8"),
     "fraction of the cores for SuperOffload", "only used by super_offload", at_least(0), at_most(1)},
    After{"aio.overlap_events"},
    {kRefused, "aio.use_gds", false, "GPU direct storage", "direct transfers between GPU and disk are not implemented"},
    After{"libzero.activation_offload.min_bytes"},
    {kRefused, "pipeline.stages", Constant(Type::Any, "\"auto\""), "pipeline stages",
     "ZeRO shards what a pipeline would split, on any module; a pipeline needs a Sequential and its own training loop. "
     "Use stage 3, or tensor_parallel.autotp_size",
     automatic("1")},
    {kNoEffect, "pipeline.partition", Type::Any, "pipeline", "no pipeline"},
    {kNoEffect, "pipeline.seed_layers", false, "pipeline", "no pipeline"},
    {kNoEffect, "pipeline.activation_checkpoint_interval", Constant(Type::Int, "0"), "pipeline", "no pipeline"},
    After{"tensor_parallel.vocab_parallel_lm_head"},
    {kNoEffect, "tensor_parallel.tp_overlap_comm", false, "overlap sums with products",
     "sums of split products are waited for"},
    {kNoEffect, "tensor_parallel.dtype", Type::Any, "dtype of the model", "bf16 and fp16 select the dtype"},
    {kNoEffect, "tensor_parallel.keep_module_on_host", false, "DeepSpeed: cut on the host",
     "deferred initialisation builds each part where it stays"},
    {kRefused, "tensor_parallel.replace_with_kernel_inject", false, "DeepSpeed: replace modules by its kernels",
     "modules are not replaced"},
    {kRefused, "tensor_parallel.injection_policy_tuple", Type::Any, "DeepSpeed: modules to replace",
     "modules are not replaced; use partition_config"},
    {kNoEffect, "tensor_parallel.tp.tp_size", Constant(Type::Int, "1"), "must equal autotp_size", "autotp_size decides",
     at_least(1)},
    {kNoEffect, "tensor_parallel.tp.tp_grain_size", Constant(Type::Int, "1"),
     "DeepSpeed: multiple at which its old injection cuts", kLayerSpecs, at_least(1)},
    {kNoEffect, "tensor_parallel.tensor_parallel.tp_size", Constant(Type::Int, "1"), "must equal autotp_size",
     "autotp_size decides", at_least(1)},
    {kNoEffect, "tensor_parallel.tensor_parallel.tp_grain_size", Constant(Type::Int, "1"),
     "DeepSpeed: multiple at which its old injection cuts", kLayerSpecs, at_least(1)},
    After{"use_data_before_expert_parallelism"},
    {kRefused, "expert_parallel", Type::Block, "DeepSpeed: replaces expert layers", "it rewrites Hugging Face models",
     refused_if("enabled")},
    After{"checkpoint.tag_validation"},
    {kNoEffect, "checkpoint.use_node_local_storage", false, "a directory per host", "checkpoints use one directory"},
    {kNoEffect, "checkpoint.load_universal", false, "DeepSpeed: load a universal checkpoint",
     "every checkpoint loads on any number of ranks at any stage; DeepSpeed's come in by `zero checkpoint import`"},
    {kNoEffect, "checkpoint.checkpoint_serialization", true, "pickling of checkpoints", "nothing is pickled"},
    {kNoEffect, "checkpoint.parallel_write.pipeline_stage", false, "writers per pipeline stage", "no pipeline"},
    {kNoEffect, "checkpoint.writer.type", Constant(Type::Enum, "\"FAST\"", "FAST PYTHON MOCK"),
     "DeepSpeed: type of the checkpoint writer", "one writer"},
    After{"checkpoint.writer.decoupled"},
    {kNoEffect, "checkpoint.writer.io_buffer_size", Constant(Type::Int, "67108864"), "bytes per write buffer", kWriter,
     at_least(4096), unit("bytes")},
    {kNoEffect, "checkpoint.writer.io_buffer_double", true, "two write buffers", kWriter},
    {kNoEffect, "checkpoint.writer.io_multiplier", Constant(Type::Int, "1"), "DeepSpeed: writers per rank", kWriter,
     at_least(1)},
    {kNoEffect, "checkpoint.writer.data_parallel", Type::Any, "DeepSpeed: which ranks write", kWriter},
    After{"log_level"},
    {kNoEffect, "timers.throughput.enabled", true, "print tokens per second", "always shown"},
    {kNoEffect, "timers.throughput.synchronized", true, "synchronize the device before reading the clock",
     "a step ends when its results are available"},
    {kNoEffect, "vocabulary_size", Type::Int, "print a notice if not a multiple of 8",
     "only compared with multiples of 8", at_least(1)},
    After{"csv_monitor.job_name"},
    {kNotBuilt, "comms_logger.enabled", false, "log calls, bytes and time per collective",
     "Communicator::stats() counts calls and bytes"},
    {kNoEffect, "comms_logger.verbose", false, "print a line per collective", "comms_logger is off"},
    {kNoEffect, "comms_logger.prof_all", true, "log all collectives", "comms_logger is off"},
    {kNoEffect, "comms_logger.prof_ops", Constant(Type::TextList, "[]"), "log only these collectives",
     "comms_logger is off"},
    {kNoEffect, "comms_logger.debug", false, "DeepSpeed: caller names", "not available"},
    {kNoEffect, "disable_allgather", false, "DeepSpeed: broadcasts instead of all-gather", "always an all-gather"},
    {kNoEffect, "zero_force_ds_cpu_optimizer", true, "DeepSpeed: require its CPU Adam", "there is one host optimizer"},
    {kNoEffect, "sparse_gradients", false, "sparse gradients of embeddings",
     "gradients are dense; the sums are the same"},
    {kNotBuilt, "seq_parallel_communication_data_type", Constant(Type::Enum, "null", "fp32 fp16 bf16"),
     "dtype of sequence-parallel communication",
     "sequence-parallel ranks exchange activations in their own dtype; leave it out"},
    After{"data_parallel_size"},
    {kNoEffect, "graph_harvesting", false, "CUDA graphs", "no CUDA graphs"},
    {kNoEffect, "flops_profiler.enabled", false, "count operations", kProfiler},
    {kNoEffect, "flops_profiler.recompute_fwd_factor", Constant(Type::Num, "0"), "flops_profiler", kProfiler},
    {kNoEffect, "flops_profiler.profile_step", Constant(Type::Int, "1"), "flops_profiler", kProfiler},
    {kNoEffect, "flops_profiler.module_depth", Constant(Type::Int, "-1"), "flops_profiler", kProfiler},
    {kNoEffect, "flops_profiler.top_modules", Constant(Type::Int, "1"), "flops_profiler", kProfiler},
    {kNoEffect, "flops_profiler.detailed", true, "flops_profiler", kProfiler},
    {kNoEffect, "flops_profiler.output_file", Type::Text, "flops_profiler", kProfiler},
    {kNoEffect, "wandb.enabled", false, "Weights & Biases", kNoService},
    {kNoEffect, "wandb.group", Type::Text, "wandb", kNoService},
    {kNoEffect, "wandb.team", Type::Text, "wandb", kNoService},
    {kNoEffect, "wandb.project", Type::Text, "wandb", kNoService},
    {kNoEffect, "comet.enabled", false, "Comet", kNoService},
    {kNoEffect, "comet.samples_log_interval", Constant(Type::Int, "100"), "comet", kNoService, at_least(1)},
    {kNoEffect, "comet.project", Type::Text, "comet", kNoService},
    {kNoEffect, "comet.workspace", Type::Text, "comet", kNoService},
    {kNoEffect, "comet.api_key", Type::Text, "comet", kNoService},
    {kNoEffect, "comet.experiment_name", Type::Text, "comet", kNoService},
    {kNoEffect, "comet.experiment_key", Type::Text, "comet", kNoService},
    {kNoEffect, "comet.online", Type::Bool, "comet", kNoService},
    {kNoEffect, "comet.mode", Type::Text, "comet", kNoService},
    {kNoEffect, "autotuning", Type::Block, "DeepSpeed's autotuner", "use `zero bench`"},
    {kNoEffect, "eigenvalue", Type::Block, "eigenvalues for quantisation training",
     "only used with quantisation training"},
    {kRefused, "amp", Type::Block, "apex", "use bf16 or fp16", refused_if("enabled")},
    {kRefused, "torch_autocast", Type::Block, "torch autocast", "use bf16 or fp16", refused_if("enabled")},
    {kRefused, "elasticity", Type::Block, "elastic batch sizes",
     "it would override the batch keys; set them explicitly", refused_if("enabled")},
    {kRefused, "compile", Type::Block, "DeepCompile", "DeepCompile is not built", refused_if("deepcompile")},
    {kRefused, "progressive_layer_drop", Type::Block, "progressive layer dropping", kModel, refused_if("enabled")},
    {kRefused, "curriculum_learning", Type::Block, "curriculum learning", "it changes the data", refused_if("enabled")},
    {kRefused, "data_efficiency", Type::Block, "data sampling and routing", "it changes the data", refused_if("*")},
    {kRefused, "hybrid_engine", Type::Block, "training and inference in one engine", kModel, refused_if("enabled")},
    {kRefused, "compression_training", Type::Block, "quantisation and pruning", kModel, refused_if("*")},
    {kRefused, "weight_quantization", Type::Block, "quantisation", kModel, refused_if("*")},
    {kRefused, "quantize_training", Type::Block, "quantisation (old)", kModel, refused_if("*")},
    {kRefused, "sparse_attention", Type::Block, "sparse attention", kModel},
    {kRefused, "nebula", Type::Block, "Nebula checkpoints", "checkpoints would be stored elsewhere",
     refused_if("enabled")},
    {kRefused, "datastates_ckpt", Constant(Type::Any, "false"), "DataStates checkpoints",
     "checkpoints would be stored elsewhere", nullable()},
};

}  // namespace

void insert_unsupported_keys(std::vector<Key>& keys) {
  auto place = keys.end();
  for (const Unsupported& row : kUnsupported) {
    if (!row.after.empty()) {
      place = std::find_if(keys.begin(), keys.end(), [&](const Key& key) { return key.path == row.after; });
      ZERO_CHECK(place != keys.end(), "no key ", row.after);
      ++place;
      continue;
    }
    Key key{row.rules};
    if (row.constant.json == kNull) key.empty = kNull;
    key.path = row.path;
    key.type = row.constant.type;
    key.choices = split_words(row.constant.choices);
    key.default_json = row.constant.json;
    key.help = row.help;
    key.effect = row.effect;
    key.reason = row.reason;
    place = keys.insert(place, std::move(key)) + 1;
  }
}

}  // namespace zero::config
