// Rows: checkpoints, logging, and all that is accepted without effect or refused. Old names.
#include "config/key_table.h"

namespace zero::config {
namespace {

constexpr std::string_view kDefault = "the default";
constexpr std::string_view kNoService = "no network services";
constexpr std::string_view kProfiler = "use `zero bench`";
constexpr std::string_view kWriter = "every rank writes its own bytes through one writer";

const Key kRows[] = {
    {.path = "use_data_before_expert_parallelism", .type = Type::Bool, .fallback = "false", .text = "layout of expert groups over ranks", .effect = Effect::NoEffect, .reason = "the model has no expert layers"},

    {.path = "checkpoint.tag_validation", .type = Type::Enum, .fallback = "\"Warn\"", .text = "ranks that pass different tags", .choices = "Warn Ignore Fail"},
    {.path = "checkpoint.use_node_local_storage", .type = Type::Bool, .fallback = "false", .text = "a directory per host", .effect = Effect::NoEffect, .reason = "one host"},
    {.path = "checkpoint.load_universal", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed's universal checkpoints", .effect = Effect::NoEffect, .reason = "there is one checkpoint format"},
    {.path = "checkpoint.checkpoint_serialization", .type = Type::Bool, .fallback = "true", .text = "pickling of checkpoints", .effect = Effect::NoEffect, .reason = "nothing is pickled"},
    {.path = "checkpoint.parallel_write.pipeline_stage", .type = Type::Bool, .fallback = "false", .text = "writers per pipeline stage", .effect = Effect::NoEffect, .reason = "no pipeline"},
    {.path = "checkpoint.writer.type", .type = Type::Enum, .fallback = "\"FAST\"", .text = "DeepSpeed's writers", .choices = "FAST PYTHON MOCK", .effect = Effect::NoEffect, .reason = "one writer"},
    {.path = "checkpoint.writer.decoupled", .type = Type::Bool, .fallback = "false", .text = "write in the background", .effect = Effect::NotBuilt, .reason = "save_checkpoint() returns when the checkpoint is whole"},
    {.path = "checkpoint.writer.io_buffer_size", .type = Type::Int, .fallback = "67108864", .text = "bytes per write buffer", .low = 4096, .effect = Effect::NoEffect, .reason = kWriter, .unit = "bytes"},
    {.path = "checkpoint.writer.io_buffer_double", .type = Type::Bool, .fallback = "true", .text = "two write buffers", .effect = Effect::NoEffect, .reason = kWriter},
    {.path = "checkpoint.writer.io_multiplier", .type = Type::Int, .fallback = "1", .text = "DeepSpeed: writers per rank", .low = 1, .effect = Effect::NoEffect, .reason = kWriter},
    {.path = "checkpoint.writer.data_parallel", .type = Type::Any, .fallback = "null", .text = "DeepSpeed: which ranks write", .nullable = true, .effect = Effect::NoEffect, .reason = kWriter},
    {.path = "checkpoint.writer.show_statistics", .type = Type::Bool, .fallback = "false", .text = "log bytes and seconds of a save", .effect = Effect::NotBuilt, .reason = "a save's bytes are in its manifest"},

    {.path = "steps_per_print", .type = Type::Int, .fallback = "10", .text = "a line every so many steps; null: none", .low = 1, .nullable = true},
    {.path = "wall_clock_breakdown", .type = Type::Bool, .fallback = "false", .text = "milliseconds of forward, backward, reduce and step with each line"},
    {.path = "memory_breakdown", .type = Type::Bool, .fallback = "false", .text = "bytes now and at the peak after forward, backward and step with each line"},
    {.path = "dump_state", .type = Type::Bool, .fallback = "false", .text = "print the effective configuration once"},
    {.path = "log_level", .type = Type::Enum, .fallback = "null", .text = "null: info", .choices = "debug info warning error critical", .nullable = true},
    {.path = "timers.throughput.enabled", .type = Type::Bool, .fallback = "true", .text = "tokens per second on the line", .effect = Effect::NoEffect, .reason = "always shown"},
    {.path = "timers.throughput.synchronized", .type = Type::Bool, .fallback = "true", .text = "synchronize the device before reading the clock", .effect = Effect::NoEffect, .reason = "a step ends when its results are there"},
    {.path = "vocabulary_size", .type = Type::Int, .fallback = "null", .text = "a notice if not a multiple of 8", .low = 1, .nullable = true, .effect = Effect::NoEffect, .reason = "only compared with multiples of 8"},
    {.path = "tensorboard.enabled", .type = Type::Bool, .fallback = "false", .text = "TensorBoard event files", .automatic = kDefault},
    {.path = "tensorboard.output_path", .type = Type::Text, .fallback = "\"\"", .text = "directory of event files", .automatic = kDefault, .needs = "tensorboard"},
    {.path = "tensorboard.job_name", .type = Type::Text, .fallback = "\"DeepSpeedJobName\"", .text = "sub-directory", .automatic = kDefault, .needs = "tensorboard"},
    {.path = "csv_monitor.enabled", .type = Type::Bool, .fallback = "false", .text = "one CSV file per metric", .automatic = kDefault},
    {.path = "csv_monitor.output_path", .type = Type::Text, .fallback = "\"\"", .text = "directory of CSV files", .automatic = kDefault, .needs = "csv_monitor"},
    {.path = "csv_monitor.job_name", .type = Type::Text, .fallback = "\"DeepSpeedJobName\"", .text = "sub-directory", .automatic = kDefault, .needs = "csv_monitor"},
    {.path = "comms_logger.enabled", .type = Type::Bool, .fallback = "false", .text = "calls, bytes and time per collective", .effect = Effect::NotBuilt, .reason = "Communicator::stats() counts calls and bytes"},
    {.path = "comms_logger.verbose", .type = Type::Bool, .fallback = "false", .text = "a line per collective", .effect = Effect::NoEffect, .reason = "comms_logger is off"},
    {.path = "comms_logger.prof_all", .type = Type::Bool, .fallback = "true", .text = "all collectives", .effect = Effect::NoEffect, .reason = "comms_logger is off"},
    {.path = "comms_logger.prof_ops", .type = Type::TextList, .fallback = "[]", .text = "only these collectives", .effect = Effect::NoEffect, .reason = "comms_logger is off"},
    {.path = "comms_logger.debug", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed: caller names", .effect = Effect::NoEffect, .reason = "not available"},

    {.path = "disable_allgather", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed: broadcasts instead of all-gather", .effect = Effect::NoEffect, .reason = "always an all-gather"},
    {.path = "zero_force_ds_cpu_optimizer", .type = Type::Bool, .fallback = "true", .text = "DeepSpeed: insist on its CPU Adam", .effect = Effect::NoEffect, .reason = "there is one host optimizer"},
    {.path = "sparse_gradients", .type = Type::Bool, .fallback = "false", .text = "sparse gradients of embeddings", .effect = Effect::NoEffect, .reason = "gradients are dense; the sums are the same"},
    {.path = "seq_parallel_communication_data_type", .type = Type::Enum, .fallback = "null", .text = "type on the wire of sequence parallelism", .choices = "fp32 fp16 bf16", .nullable = true, .effect = Effect::NoEffect, .reason = "no sequence parallelism"},
    {.path = "sequence_parallel_size", .type = Type::Int, .fallback = "1", .text = "ranks per sequence", .low = 1, .effect = Effect::Refused, .reason = "sequence parallelism is not built"},
    {.path = "data_parallel_size", .type = Type::Int, .fallback = "null", .text = "must be the number of ranks", .low = 1, .nullable = true},
    {.path = "graph_harvesting", .type = Type::Bool, .fallback = "false", .text = "CUDA graphs", .effect = Effect::NoEffect, .reason = "no CUDA graphs"},
    {.path = "flops_profiler.enabled", .type = Type::Bool, .fallback = "false", .text = "count operations", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.recompute_fwd_factor", .type = Type::Num, .fallback = "0", .text = "flops_profiler", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.profile_step", .type = Type::Int, .fallback = "1", .text = "flops_profiler", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.module_depth", .type = Type::Int, .fallback = "-1", .text = "flops_profiler", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.top_modules", .type = Type::Int, .fallback = "1", .text = "flops_profiler", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.detailed", .type = Type::Bool, .fallback = "true", .text = "flops_profiler", .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "flops_profiler.output_file", .type = Type::Text, .fallback = "null", .text = "flops_profiler", .nullable = true, .effect = Effect::NoEffect, .reason = kProfiler},
    {.path = "wandb.enabled", .type = Type::Bool, .fallback = "false", .text = "Weights & Biases", .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "wandb.group", .type = Type::Text, .fallback = "null", .text = "wandb", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "wandb.team", .type = Type::Text, .fallback = "null", .text = "wandb", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "wandb.project", .type = Type::Text, .fallback = "null", .text = "wandb", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.enabled", .type = Type::Bool, .fallback = "false", .text = "Comet", .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.samples_log_interval", .type = Type::Int, .fallback = "100", .text = "comet", .low = 1, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.project", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.workspace", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.api_key", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.experiment_name", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.experiment_key", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.online", .type = Type::Bool, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "comet.mode", .type = Type::Text, .fallback = "null", .text = "comet", .nullable = true, .effect = Effect::NoEffect, .reason = kNoService},
    {.path = "autotuning", .type = Type::Block, .fallback = "null", .text = "DeepSpeed's autotuner", .nullable = true, .effect = Effect::NoEffect, .reason = "use `zero bench`"},
    {.path = "eigenvalue", .type = Type::Block, .fallback = "null", .text = "for quantisation training", .nullable = true, .effect = Effect::NoEffect, .reason = "only used with quantisation training"},

    {.path = "pipeline.stages", .type = Type::Any, .fallback = "\"auto\"", .text = "pipeline stages", .automatic = "1", .effect = Effect::Refused, .reason = "pipeline parallelism is not built"},
    {.path = "pipeline.partition", .type = Type::Any, .fallback = "null", .text = "pipeline", .nullable = true, .effect = Effect::NoEffect, .reason = "no pipeline"},
    {.path = "pipeline.seed_layers", .type = Type::Bool, .fallback = "false", .text = "pipeline", .effect = Effect::NoEffect, .reason = "no pipeline"},
    {.path = "pipeline.activation_checkpoint_interval", .type = Type::Int, .fallback = "0", .text = "pipeline", .effect = Effect::NoEffect, .reason = "no pipeline"},
    {.path = "tensor_parallel.autotp_size", .type = Type::Int, .fallback = "0", .text = "ranks per tensor", .low = 0, .effect = Effect::Refused, .reason = "tensor parallelism is not built"},
    {.path = "expert_parallel", .type = Type::Block, .fallback = "null", .text = "DeepSpeed's rewriting of experts", .nullable = true, .effect = Effect::Refused, .reason = "it rewrites Hugging Face models", .off_key = "enabled"},
    {.path = "amp", .type = Type::Block, .fallback = "null", .text = "apex", .nullable = true, .effect = Effect::Refused, .reason = "use bf16 or fp16", .off_key = "enabled"},
    {.path = "torch_autocast", .type = Type::Block, .fallback = "null", .text = "torch autocast", .nullable = true, .effect = Effect::Refused, .reason = "use bf16 or fp16", .off_key = "enabled"},
    {.path = "elasticity", .type = Type::Block, .fallback = "null", .text = "elastic batch sizes", .nullable = true, .effect = Effect::Refused, .reason = "it would take over the batch keys; choose them", .off_key = "enabled"},
    {.path = "compile", .type = Type::Block, .fallback = "null", .text = "DeepCompile", .nullable = true, .effect = Effect::Refused, .reason = "there is no graph compiler", .off_key = "deepcompile"},
    {.path = "progressive_layer_drop", .type = Type::Block, .fallback = "null", .text = "drops layers", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model", .off_key = "enabled"},
    {.path = "curriculum_learning", .type = Type::Block, .fallback = "null", .text = "orders the data", .nullable = true, .effect = Effect::Refused, .reason = "it changes the data", .off_key = "enabled"},
    {.path = "data_efficiency", .type = Type::Block, .fallback = "null", .text = "samples the data", .nullable = true, .effect = Effect::Refused, .reason = "it changes the data", .off_key = "*"},
    {.path = "hybrid_engine", .type = Type::Block, .fallback = "null", .text = "training and inference in one", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model", .off_key = "enabled"},
    {.path = "compression_training", .type = Type::Block, .fallback = "null", .text = "quantisation and pruning", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model", .off_key = "*"},
    {.path = "weight_quantization", .type = Type::Block, .fallback = "null", .text = "quantisation", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model", .off_key = "*"},
    {.path = "quantize_training", .type = Type::Block, .fallback = "null", .text = "quantisation (old)", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model", .off_key = "*"},
    {.path = "sparse_attention", .type = Type::Block, .fallback = "null", .text = "sparse attention", .nullable = true, .effect = Effect::Refused, .reason = "it changes the model"},
    {.path = "nebula", .type = Type::Block, .fallback = "null", .text = "Nebula checkpoints", .nullable = true, .effect = Effect::Refused, .reason = "checkpoints would go elsewhere", .off_key = "enabled"},
    {.path = "datastates_ckpt", .type = Type::Any, .fallback = "false", .text = "DataStates checkpoints", .nullable = true, .effect = Effect::Refused, .reason = "checkpoints would go elsewhere"},
};

// Blocks and special conversions are in document.cpp, by these same names.
const OldName kOldNames[] = {
    {"bfloat16", "bf16"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"},
    {"zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device"},
    {"zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"},
    {"zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size", false},
    {"zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold", false},
    {"zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold", false},
    {"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters", false},
    {"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance", false},
    {"zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save", false},
    {"zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold", false},
    {"zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params", false},
    {"zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential", false},
    {"aio.thread_count", "aio.intra_op_parallelism"},
    {"bf16.check_overflow", "bf16.check_grad_overflow"},
    {"allgather_size", "zero_optimization.allgather_bucket_size"},
    {"fp32_allreduce", "communication_data_type"},
};

}  // namespace

std::span<const Key> other_keys() { return kRows; }
std::span<const OldName> old_names() { return kOldNames; }

}  // namespace zero::config
