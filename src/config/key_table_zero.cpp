// Rows: zero_optimization with offload, aio, activation checkpointing.
#include "config/key_table.h"

namespace zero::config {
namespace {

constexpr std::string_view kDefault = "the default";
constexpr std::string_view kLarge = "9223372036854775807";

const Key kRows[] = {
    {.path = "zero_optimization.stage", .type = Type::Int, .fallback = "0", .text = "0 replicate, 1 shard masters and moments, 2 and gradients, 3 and parameters", .low = 0, .high = 3, .automatic = kDefault},
    {.path = "zero_optimization.reduce_scatter", .type = Type::Bool, .fallback = "true", .text = "false: all-reduce, then keep the own part", .automatic = kDefault, .needs = "S1+", .effect = Effect::NoEffect, .reason = "gradients are reduce-scattered either way; the bits are the same"},
    {.path = "zero_optimization.reduce_bucket_size", .type = Type::Int, .fallback = "500000000", .text = "elements per reduction: a unit with more is cut between parameters, a larger parameter goes alone; 0: one parameter at a time", .low = 0, .automatic = kDefault, .unit = "elements"},
    {.path = "zero_optimization.allgather_bucket_size", .type = Type::Int, .fallback = "500000000", .text = "elements of the all-gathers under way at once after the update; one is always allowed", .low = 1, .automatic = kDefault, .needs = "S12", .unit = "elements"},
    {.path = "zero_optimization.overlap_comm", .type = Type::Bool, .fallback = "null", .text = "reduce while backward runs; null: true at stage 3, else false", .nullable = true, .automatic = kDefault},
    {.path = "zero_optimization.round_robin_gradients", .type = Type::Bool, .fallback = "false", .text = "spread gradient copies over ranks", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "each rank copies only its own shard to the host, so the load is even already"},
    {.path = "zero_optimization.contiguous_gradients", .type = Type::Bool, .fallback = "true", .text = "gradients in one piece of memory", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gradients always land in one contiguous buffer"},
    {.path = "zero_optimization.use_multi_rank_bucket_allreduce", .type = Type::Bool, .fallback = "true", .text = "one reduction for several ranks' parts", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "a real reduce-scatter is used"},
    {.path = "zero_optimization.allgather_partitions", .type = Type::Bool, .fallback = "true", .text = "all-gather or broadcasts after the update", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "always an all-gather"},
    {.path = "zero_optimization.elastic_checkpoint", .type = Type::Bool, .fallback = "false", .text = "checkpoints for any number of ranks", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "checkpoints carry names and ranges, whatever this says"},
    {.path = "zero_optimization.sub_group_size", .type = Type::Int, .fallback = "1000000000", .text = "elements of an optimizer tile at most; 0: the smallest", .low = 0, .automatic = kDefault, .needs = "opt", .unit = "elements"},
    {.path = "zero_optimization.ignore_unused_parameters", .type = Type::Bool, .fallback = "true", .text = "true: a parameter without gradient counts as zero; false: an error that names it", .automatic = kDefault},
    {.path = "zero_optimization.load_from_fp32_weights", .type = Type::Bool, .fallback = "true", .text = "on load take 16-bit weights from the fp32 masters", .automatic = kDefault, .effect = Effect::NotBuilt, .reason = "weights come from the masters"},
    {.path = "zero_optimization.stage3_prefetch_bucket_size", .type = Type::Int, .fallback = "50000000", .text = "elements gathered ahead of use; 0: none", .low = 0, .automatic = kDefault, .needs = "S3", .unit = "elements"},
    {.path = "zero_optimization.stage3_param_persistence_threshold", .type = Type::Int, .fallback = "0", .text = "parameters of at most this many elements stay gathered, as at stage 2 (DeepSpeed's default: 100000)", .low = 0, .automatic = kDefault, .needs = "S3", .unit = "elements"},
    {.path = "zero_optimization.stage3_model_persistence_threshold", .type = Type::Int, .fallback = kLarge, .text = "cap on the sum of the previous key, filled in registration order", .low = 0, .automatic = kDefault, .needs = "S3", .unit = "elements"},
    {.path = "zero_optimization.stage3_max_live_parameters", .type = Type::Int, .fallback = "1000000000", .text = "gathered elements beyond which nothing is gathered ahead or kept; the unit in use is always allowed", .low = 0, .automatic = kDefault, .needs = "S3", .unit = "elements"},
    {.path = "zero_optimization.stage3_max_reuse_distance", .type = Type::Int, .fallback = "0", .text = "keep a unit gathered that is used again within this many elements; 0: always release (DeepSpeed's default: 1e9); as large as the model: FSDP's reshard_after_forward=False", .low = 0, .automatic = kDefault, .needs = "S3", .unit = "elements"},
    {.path = "zero_optimization.stage3_gather_16bit_weights_on_model_save", .type = Type::Bool, .fallback = "false", .text = "also write one consolidated 16-bit file", .automatic = kDefault, .needs = "S3", .effect = Effect::NotBuilt, .reason = "save_checkpoint() writes the shards"},
    {.path = "zero_optimization.stage3_module_granularity_threshold", .type = Type::Int, .fallback = "0", .text = "smallest module that is gathered", .low = 0, .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gathers follow units, not every module"},
    {.path = "zero_optimization.stage3_use_all_reduce_for_fetch_params", .type = Type::Bool, .fallback = "false", .text = "gather by all-reduce", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gathers land in place; there is no coalescing copy to avoid"},
    {.path = "zero_optimization.stage3_allgather_sequential", .type = Type::Bool, .fallback = "false", .text = "gather parameter by parameter", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gathers land in place; there is no coalescing copy to avoid"},
    {.path = "zero_optimization.zero_hpz_partition_size", .type = Type::Int, .fallback = "1", .text = "ranks of a host that hold a second shard together (ZeRO++ hpZ): parameters cross to other hosts once a step", .low = 0, .automatic = kDefault, .needs = "S3"},
    {.path = "zero_optimization.leaf_module.names", .type = Type::TextList, .fallback = "[]", .text = "modules gathered as one unit, by path", .automatic = kDefault, .needs = "S3", .effect = Effect::NotBuilt, .reason = "libzero.units names units by path"},
    {.path = "zero_optimization.leaf_module.name_suffixes", .type = Type::TextList, .fallback = "[]", .text = "modules gathered as one unit, by the end of their path", .automatic = kDefault, .needs = "S3", .effect = Effect::NotBuilt, .reason = "libzero.units names units by path"},
    {.path = "zero_optimization.leaf_module.classes", .type = Type::TextList, .fallback = "[]", .text = "modules gathered as one unit, by C++ type", .automatic = kDefault, .needs = "S3", .effect = Effect::NotBuilt, .reason = "libzero.units names units by path"},
    {.path = "zero_optimization.log_trace_cache_warnings", .type = Type::Bool, .fallback = "false", .text = "log when units are used in another order than expected", .automatic = kDefault, .needs = "S3"},
    {.path = "zero_optimization.enable_sanity_checks", .type = Type::Bool, .fallback = "false", .text = "compare every collective over ranks", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "thread and shm ranks always compare operation, type, size and sequence number"},
    {.path = "zero_optimization.memory_efficient_linear", .type = Type::Bool, .fallback = "true", .text = "DeepSpeed: replace Python's linear", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gathered weights are freed after forward for every layer"},
    {.path = "zero_optimization.override_module_apply", .type = Type::Bool, .fallback = "true", .text = "DeepSpeed: replace Python's Module.apply", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "about Python modules"},
    {.path = "zero_optimization.pipeline_loading_checkpoint", .type = Type::Bool, .fallback = "false", .text = "load layer by layer", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "each rank reads only its own bytes"},
    {.path = "zero_optimization.save_muon_momentum_buffer_in_memory", .type = Type::Bool, .fallback = "false", .text = "for Muon", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "no Muon"},
    {.path = "zero_optimization.grad_hooks", .type = Type::Bool, .fallback = "true", .text = "in DeepSpeed's documentation only", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "gradients are always caught by hooks"},
    {.path = "zero_optimization.legacy_stage1", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed's first stage 1", .automatic = kDefault, .effect = Effect::Refused, .reason = "there is no old stage 1; DeepSpeed refuses it as well"},
    {.path = "zero_optimization.zero_quantized_weights", .type = Type::Bool, .fallback = "false", .text = "parameters are gathered over networks as 8-bit integers, 256 to a scale (ZeRO++ qwZ); lossy", .automatic = kDefault, .needs = "S3"},
    {.path = "zero_optimization.zero_quantized_nontrainable_weights", .type = Type::Bool, .fallback = "false", .text = "the same for frozen parameters only", .automatic = kDefault, .needs = "S3"},
    {.path = "zero_optimization.zero_quantized_gradients", .type = Type::Bool, .fallback = "false", .text = "gradients are reduced over networks as 4-bit integers, 256 to a scale (ZeRO++ qgZ); lossy", .automatic = kDefault, .needs = "S3"},
    {.path = "zero_optimization.zeropp_loco_param", .type = Type::Any, .fallback = "null", .text = "ZeRO++ LoCo", .nullable = true, .automatic = kDefault, .effect = Effect::Refused, .reason = "lossy communication is not built"},
    {.path = "zero_optimization.mics_shard_size", .type = Type::Int, .fallback = "-1", .text = "MiCS", .low = -1, .automatic = kDefault, .effect = Effect::Refused, .reason = "sub-group sharding is not built"},
    {.path = "zero_optimization.mics_hierarchical_params_gather", .type = Type::Bool, .fallback = "false", .text = "MiCS", .automatic = kDefault, .effect = Effect::Refused, .reason = "sub-group sharding is not built"},
    {.path = "zero_optimization.zenflow", .type = Type::Any, .fallback = "null", .text = "ZenFlow", .nullable = true, .automatic = kDefault, .effect = Effect::Refused, .reason = "it changes the update rule"},

    {.path = "zero_optimization.offload_param.device", .type = Type::Enum, .fallback = "\"none\"", .text = "where resting 16-bit parameter shards live", .choices = "none cpu nvme", .automatic = kDefault},
    {.path = "zero_optimization.offload_param.nvme_path", .type = Type::Text, .fallback = "null", .text = "directory for device nvme", .nullable = true, .automatic = kDefault, .needs = "param nvme"},
    {.path = "zero_optimization.offload_param.pin_memory", .type = Type::Bool, .fallback = "true", .text = "page-locked host memory", .automatic = kDefault, .needs = "par"},
    {.path = "zero_optimization.offload_param.buffer_count", .type = Type::Int, .fallback = "\"auto\"", .text = "transfer buffers", .low = 1, .automatic = "the smallest pool that works", .needs = "param nvme"},
    {.path = "zero_optimization.offload_param.buffer_size", .type = Type::Int, .fallback = "\"auto\"", .text = "elements per transfer buffer", .low = 1, .automatic = "the smallest that works", .needs = "param nvme", .unit = "elements"},
    {.path = "zero_optimization.offload_param.max_in_cpu", .type = Type::Int, .fallback = "1000000000", .text = "elements cached in host memory", .low = 0, .automatic = kDefault, .needs = "param nvme", .unit = "elements"},
    {.path = "zero_optimization.offload_optimizer.device", .type = Type::Enum, .fallback = "\"none\"", .text = "where masters and moments live", .choices = "none cpu nvme", .automatic = kDefault},
    {.path = "zero_optimization.offload_optimizer.nvme_path", .type = Type::Text, .fallback = "null", .text = "directory for device nvme", .nullable = true, .automatic = kDefault, .needs = "optimizer nvme"},
    {.path = "zero_optimization.offload_optimizer.pin_memory", .type = Type::Bool, .fallback = "true", .text = "page-locked host memory", .automatic = kDefault, .needs = "opt"},
    {.path = "zero_optimization.offload_optimizer.buffer_count", .type = Type::Int, .fallback = "\"auto\"", .text = "transfer buffers", .low = 1, .automatic = "the smallest pool that works", .needs = "optimizer nvme"},
    {.path = "zero_optimization.offload_optimizer.buffer_size", .type = Type::Int, .fallback = "\"auto\"", .text = "elements per transfer buffer", .low = 1, .automatic = "the smallest that works", .needs = "optimizer nvme", .unit = "elements"},
    {.path = "zero_optimization.offload_optimizer.pipeline_read", .type = Type::Bool, .fallback = "true", .text = "read the next tile while one is updated (DeepSpeed's default: false)", .automatic = kDefault, .needs = "optimizer nvme"},
    {.path = "zero_optimization.offload_optimizer.pipeline_write", .type = Type::Bool, .fallback = "true", .text = "write the last tile while one is updated (DeepSpeed's default: false)", .automatic = kDefault, .needs = "optimizer nvme"},
    {.path = "zero_optimization.offload_optimizer.ratio", .type = Type::Num, .fallback = "1", .text = "part of the elements that is updated on the host", .low = 0, .high = 1, .automatic = kDefault, .needs = "opt"},
    {.path = "zero_optimization.offload_optimizer.fast_init", .type = Type::Bool, .fallback = "false", .text = "DeepSpeed: quick first write", .automatic = kDefault, .effect = Effect::NoEffect, .reason = "states are written once, without reading"},
    {.path = "zero_optimization.offload_optimizer.super_offload", .type = Type::Bool, .fallback = "false", .text = "SuperOffload", .automatic = kDefault, .effect = Effect::Refused, .reason = "it is tied to one machine type"},
    {.path = "zero_optimization.offload_optimizer.cpuadam_cores_perc", .type = Type::Num, .fallback = "0.8", .text = "part of the cores for SuperOffload", .low = 0, .high = 1, .automatic = kDefault, .effect = Effect::NoEffect, .reason = "belongs to super_offload"},

    {.path = "zero_optimization.delayed_update.enabled", .type = Type::Bool, .fallback = "false", .text = "ZeRO-Offload's one-step delayed update: the host applies a step's gradients while the next step runs", .automatic = kDefault, .needs = "opt"},
    {.path = "zero_optimization.delayed_update.start_step", .type = Type::Int, .fallback = "40", .text = "first step, counted from 0, whose gradients are applied one step late", .low = 1, .automatic = kDefault, .needs = "opt"},

    {.path = "aio.block_size", .type = Type::Int, .fallback = "1048576", .text = "bytes per request", .low = 4096, .high = 1073741824, .multiple = 4096, .needs = "nvme", .unit = "bytes"},
    {.path = "aio.queue_depth", .type = Type::Int, .fallback = "8", .text = "requests in flight per I/O thread", .low = 1, .high = 4096, .needs = "nvme"},
    {.path = "aio.intra_op_parallelism", .type = Type::Int, .fallback = "1", .text = "I/O threads", .low = 1, .high = 64, .needs = "nvme"},
    {.path = "aio.single_submit", .type = Type::Bool, .fallback = "false", .text = "one submission call per block", .needs = "nvme"},
    {.path = "aio.overlap_events", .type = Type::Bool, .fallback = "true", .text = "keep the queue full", .needs = "nvme"},
    {.path = "aio.use_gds", .type = Type::Bool, .fallback = "false", .text = "GPU direct storage", .effect = Effect::Refused, .reason = "no direct path from GPU to disk is built"},

    {.path = "memory.device", .type = Type::Bytes, .fallback = "null", .text = "budget of each rank: bytes on the device that computes; states that no other key places move on when they would not fit", .low = 1, .nullable = true, .unit = "bytes"},
    {.path = "memory.host", .type = Type::Bytes, .fallback = "null", .text = "budget of each rank: bytes of offloaded states in host memory", .low = 0, .nullable = true, .unit = "bytes"},
    {.path = "memory.file", .type = Type::Bytes, .fallback = "null", .text = "budget of each rank: bytes of files; null: nothing moves to a file", .low = 0, .nullable = true, .unit = "bytes"},
    {.path = "memory.nvme_path", .type = Type::Text, .fallback = "null", .text = "directory for what memory.file lets move (else an nvme_path of the offload blocks)", .nullable = true},
    {.path = "memory.activations", .type = Type::Bytes, .fallback = "null", .text = "part of memory.device that states leave free for activations (null: none; `zero train` computes its model's)", .low = 0, .nullable = true, .unit = "bytes"},

    {.path = "activation_checkpointing.number_checkpoints", .type = Type::Int, .fallback = "null", .text = "segments that `zero train` splits its layers into (null: one a layer); slots of the contiguous buffer", .low = 1, .high = 1000000, .nullable = true},
    {.path = "activation_checkpointing.cpu_checkpointing", .type = Type::Bool, .fallback = "false", .text = "segments' inputs wait in host memory"},
    {.path = "activation_checkpointing.contiguous_memory_optimization", .type = Type::Bool, .fallback = "false", .text = "segments' inputs in one buffer made at the first forward; needs number_checkpoints"},
    {.path = "activation_checkpointing.partition_activations", .type = Type::Bool, .fallback = "false", .text = "split saved inputs over the model-parallel ranks", .effect = Effect::NoEffect, .reason = "the model-parallel group has one rank"},
    {.path = "activation_checkpointing.synchronize_checkpoint_boundary", .type = Type::Bool, .fallback = "false", .text = "the host waits for the device at segment borders (on CPUs there is nothing to wait for)"},
    {.path = "activation_checkpointing.profile", .type = Type::Bool, .fallback = "false", .text = "log the time of each segment's two runs after each backward; waits at borders as the key before"},
    {.path = "libzero.activation_file_path", .type = Type::Text, .fallback = "null", .text = "directory: segments' inputs wait in a file there", .nullable = true},
    {.path = "libzero.activation_offload.device", .type = Type::Enum, .fallback = "\"none\"", .text = "where tensors saved for backward wait, without checkpointing", .choices = "none cpu nvme"},
    {.path = "libzero.activation_offload.nvme_path", .type = Type::Text, .fallback = "null", .text = "directory for device nvme", .nullable = true, .needs = "activation nvme"},
    {.path = "libzero.activation_offload.min_bytes", .type = Type::Int, .fallback = "65536", .text = "smaller ones stay", .low = 1, .needs = "activations", .unit = "bytes"},
};

}  // namespace

std::span<const Key> zero_keys() { return kRows; }

}  // namespace zero::config
