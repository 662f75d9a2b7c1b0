// Keys of ZeRO: stages, offload, file I/O, budgets, activations.
#include "config/key_rows.h"

namespace zero::config {

void add_zero_keys(std::vector<Key>& keys) {
  const Words<OffloadDevice> devices = {
      {"none", OffloadDevice::None}, {"cpu", OffloadDevice::Cpu}, {"nvme", OffloadDevice::Nvme}};
  Block(keys, "zero_optimization", &Settings::zero)
      .key("stage", &ZeroSettings::stage,
           "0: everything replicated; 1: masters and optimizer states sharded; 2: also gradients; 3: also parameters",
           at_least(0), at_most(3))
      .key("reduce_bucket_size", &ZeroSettings::reduce_bucket_size,
           "elements per reduction: larger units are split between parameters, a larger parameter is reduced alone; 0: "
           "one parameter at a time",
           at_least(0), unit("elements"))
      .key("allgather_bucket_size", &ZeroSettings::allgather_bucket_size,
           "maximum number of elements in all-gathers in flight after the update; one all-gather is always allowed",
           at_least(1), needs(When::Stages1And2), unit("elements"))
      .key("overlap_comm", &ZeroSettings::overlap_comm, "reduce while backward runs; null: true at stage 3, else false")
      .key("sub_group_size", &ZeroSettings::sub_group_size,
           "maximum number of elements per optimizer tile; 0: the smallest tile", at_least(0),
           needs(When::OptimizerOffloaded), unit("elements"))
      .key("ignore_unused_parameters", &ZeroSettings::ignore_unused_parameters,
           "true: a missing gradient counts as zero; false: an error that names the parameter")
      .key("stage3_prefetch_bucket_size", &ZeroSettings::prefetch_bucket_size,
           "elements unsharded ahead of use; 0: no prefetch", at_least(0), needs(When::Stage3), unit("elements"))
      .key("stage3_param_persistence_threshold", &ZeroSettings::persistence_threshold,
           "parameters of at most this many elements stay unsharded, as at stage 2 (DeepSpeed's default: 100000)",
           at_least(0), needs(When::Stage3), unit("elements"))
      .key("stage3_model_persistence_threshold", &ZeroSettings::model_persistence_threshold,
           "maximum total of the elements that stay unsharded by the previous key, in order of registration",
           at_least(0), needs(When::Stage3), unit("elements"))
      .key("stage3_max_live_parameters", &ZeroSettings::max_live_parameters,
           "maximum number of unsharded elements for prefetching and for keeping units unsharded; the unit in use is "
           "always allowed",
           at_least(0), needs(When::Stage3), unit("elements"))
      .key("stage3_max_reuse_distance", &ZeroSettings::max_reuse_distance,
           "keep a unit unsharded if it is used again within this many elements; 0: always reshard (DeepSpeed's "
           "default: 1e9); as large as the model: FSDP's reshard_after_forward=False",
           at_least(0), needs(When::Stage3), unit("elements"))
      .key("stage3_gather_16bit_weights_on_model_save", &ZeroSettings::gather_16bit_weights,
           "each checkpoint also has model.safetensors, which transformers loads: whole weights in the dtype of "
           "parameters, written by all ranks without a gather",
           needs(When::Stage3))
      .key("zero_hpz_partition_size", &ZeroSettings::hpz_ranks,
           "number of ranks of a host that share a secondary shard (ZeRO++ hpZ): parameters are sent between hosts "
           "once per step",
           at_least(0), needs(When::Stage3))
      .key("log_trace_cache_warnings", &ZeroSettings::log_trace_cache_warnings,
           "log when units are used in a different order than expected", needs(When::Stage3))
      .key("enable_sanity_checks", &ZeroSettings::sanity_checks,
           "tensor-parallel ranks compare inputs and losses in every forward, not only in the first; collectives are "
           "always compared",
           needs(When::TensorParallel))
      .key("zero_quantized_weights", &ZeroSettings::quantized_weights,
           "all-gather parameters over networks as 8-bit integers with one scale per 256 (ZeRO++ qwZ); lossy",
           needs(When::Stage3))
      .key("zero_quantized_nontrainable_weights", &ZeroSettings::quantized_nontrainable_weights,
           "the same for frozen parameters only", needs(When::Stage3))
      .key("zero_quantized_gradients", &ZeroSettings::quantized_gradients,
           "reduce gradients over networks as 4-bit integers with one scale per 256 (ZeRO++ qgZ); lossy",
           needs(When::Stage3));
  Block(keys, "zero_optimization.offload_param", &Settings::zero, &ZeroSettings::offload_param)
      .key("device", words(&OffloadParamSettings::device, devices), "tier of the sharded 16-bit parameters")
      .key("nvme_path", &OffloadParamSettings::path, "directory for device nvme", nullable(), needs(When::ParamsInFile))
      .key("pin_memory", &OffloadParamSettings::pin_memory, "page-locked host memory", needs(When::ParamsOffloaded))
      .key("buffer_count", &OffloadParamSettings::buffer_count, "transfer buffers", at_least(1), unset_is_auto(),
           automatic("the smallest pool that works"), needs(When::ParamsInFile))
      .key("buffer_size", &OffloadParamSettings::buffer_size, "elements per transfer buffer", at_least(1),
           unset_is_auto(), automatic("the smallest that works"), needs(When::ParamsInFile), unit("elements"))
      .key("max_in_cpu", &OffloadParamSettings::max_in_cpu, "elements cached in host memory", at_least(0),
           needs(When::ParamsInFile), unit("elements"));
  Block(keys, "zero_optimization.offload_optimizer", &Settings::zero, &ZeroSettings::offload_optimizer)
      .key("device", words(&OffloadOptimizerSettings::device, devices), "tier of masters and optimizer states")
      .key("nvme_path", &OffloadOptimizerSettings::path, "directory for device nvme", nullable(),
           needs(When::OptimizerInFile))
      .key("pin_memory", &OffloadOptimizerSettings::pin_memory, "page-locked host memory",
           needs(When::OptimizerOffloaded))
      .key("buffer_count", &OffloadOptimizerSettings::buffer_count, "transfer buffers", at_least(1), unset_is_auto(),
           automatic("the smallest pool that works"), needs(When::OptimizerInFile))
      .key("buffer_size", &OffloadOptimizerSettings::buffer_size, "elements per transfer buffer", at_least(1),
           unset_is_auto(), automatic("the smallest that works"), needs(When::OptimizerInFile), unit("elements"))
      .key("pipeline_read", &OffloadOptimizerSettings::pipeline_read,
           "read the next tile during the update of the current one (DeepSpeed's default: false)",
           needs(When::OptimizerInFile))
      .key("pipeline_write", &OffloadOptimizerSettings::pipeline_write,
           "write the previous tile during the update of the current one (DeepSpeed's default: false)",
           needs(When::OptimizerInFile))
      .key("ratio", &OffloadOptimizerSettings::ratio, "fraction of the elements that is updated on the host",
           at_least(0), at_most(1), needs(When::OptimizerOffloaded));
  Block(keys, "zero_optimization.delayed_update", &Settings::zero, &ZeroSettings::delayed_update)
      .key("enabled", &DelayedUpdate::enabled,
           "ZeRO-Offload's one-step delayed update: the host applies a step's gradients while the next step runs",
           needs(When::OptimizerOffloaded))
      .key("start_step", &DelayedUpdate::start_step, "first step, counted from 0, whose update is delayed by one step",
           at_least(1), needs(When::OptimizerOffloaded));
  Block(keys, "aio", &Settings::aio)
      .each(needs(When::AnyFile))
      .key("block_size", &AioSettings::block_size, "bytes per request", at_least(4096), at_most(1073741824),
           multiple_of(4096), unit("bytes"))
      .key("queue_depth", &AioSettings::queue_depth, "requests in flight per I/O thread", at_least(1), at_most(4096))
      .key("intra_op_parallelism", &AioSettings::threads, "I/O threads", at_least(1), at_most(64))
      .key("single_submit", &AioSettings::single_submit, "one submission call per block")
      .key("overlap_events", &AioSettings::overlap_events, "refill the queue as soon as a request completes");
  Block(keys, "memory", &Settings::memory)
      .key("device", bytes(&MemoryBudget::device),
           "budget of each rank: bytes of device memory; states without a tier set by other keys are moved to lower "
           "tiers if they do not fit",
           at_least(1), unit("bytes"))
      .key("host", bytes(&MemoryBudget::host), "budget of each rank: bytes of offloaded states in host memory",
           at_least(0), unit("bytes"))
      .key("file", bytes(&MemoryBudget::file), "budget of each rank: bytes of files; null: no state is moved to a file",
           at_least(0), unit("bytes"))
      .key("nvme_path", &MemoryBudget::path,
           "directory for states moved to files under memory.file (default: an nvme_path of the offload blocks)",
           nullable())
      .key("activations", bytes(&MemoryBudget::activations),
           "part of memory.device reserved for activations (null: none; `zero train` computes it for its model)",
           at_least(0), unit("bytes"));
  Block(keys, "activation_checkpointing", &Settings::activations)
      .key("number_checkpoints", &ActivationSettings::num_checkpoints,
           "number of segments into which `zero train` splits its layers (null: one per layer); slots of the "
           "contiguous buffer",
           at_least(1), at_most(1000000), nullable())
      .key("cpu_checkpointing", &ActivationSettings::to_host, "keep inputs of segments in host memory")
      .key("contiguous_memory_optimization", &ActivationSettings::contiguous,
           "keep inputs of segments in one buffer, allocated at the first forward; needs number_checkpoints")
      .key("partition_activations", &ActivationSettings::partition,
           "inputs of segments are divided over the tensor-parallel ranks (ZeRO-R's P_a)", needs(When::TensorParallel))
      .key("synchronize_checkpoint_boundary", &ActivationSettings::synchronize,
           "synchronize the device at segment boundaries (no effect on CPUs)")
      .key("profile", &ActivationSettings::profile,
           "log the forward and recomputation time of each segment after each backward; synchronizes at boundaries "
           "like the previous key");
  Block(keys, "libzero", &Settings::activations)
      .key("activation_file_path", &ActivationSettings::file_path, "directory; keep inputs of segments in a file there",
           nullable());
  Block(keys, "libzero.activation_offload", &Settings::activations, &ActivationSettings::offload)
      .key("device", words(&ActivationSettings::Offload::device, devices),
           "tier for tensors saved for backward, without checkpointing")
      .key("nvme_path", &ActivationSettings::Offload::path, "directory for device nvme", nullable(),
           needs(When::ActivationsInFile))
      .key("min_bytes", &ActivationSettings::Offload::min_bytes, "smaller tensors are not offloaded", at_least(1),
           needs(When::ActivationsOffloaded), unit("bytes"));
}

}  // namespace zero::config
