// The typed values of a configuration. Plain data; a row of the table of keys (keys_*.cpp) names every field, whose
// initial value is the key's default.
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "config/checkpoint_settings.h"
#include "config/model_settings.h"
#include "config/optimizer_settings.h"
#include "config/schedule_settings.h"
#include "config/tp_plan.h"

namespace zero::config {

enum class Precision { Fp32, Bf16, Fp16 };
enum class ReduceOp { Mean, Sum };

struct ScalerSettings {     // where scales_loss()
  double static_scale = 0;  // 0: dynamic
  int initial_scale_power = 16;
  std::int64_t window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  std::int64_t min_scale = 1;
};

// Where states are stored: on the compute device, in host memory, or in a file.
enum class OffloadDevice { None, Cpu, Nvme };

struct OffloadOptimizerSettings {
  OffloadDevice device = OffloadDevice::None;
  std::string path;  // folder, for Nvme
  bool pin_memory = true;
  std::optional<std::int64_t> buffer_count,
      buffer_size;  // number and size of buffers, in elements; unset: as the pipeline needs
  bool pipeline_read = true, pipeline_write = true;
  double ratio = 1;  // fraction of the elements; the others stay on the device
};

struct OffloadParamSettings {
  OffloadDevice device = OffloadDevice::None;
  std::string path;
  bool pin_memory = true;
  std::optional<std::int64_t> buffer_count, buffer_size;
  std::int64_t max_in_cpu = 1000000000;  // elements that stay in host memory when the device is Nvme
};

struct AioSettings {
  std::int64_t block_size = 1048576;  // bytes
  int queue_depth = 8, threads = 1;
  bool single_submit = false, overlap_events = true;
  bool checksums = true;  // libzero.tier_checksums
};

struct DelayedUpdate {
  bool enabled = false;
  std::int64_t start_step = 40;  // first step, counted from 0, whose update is delayed by one step
};

struct ZeroSettings {
  int stage = 0;
  OffloadOptimizerSettings offload_optimizer;
  OffloadParamSettings offload_param;
  std::int64_t sub_group_size = 1000000000;            // maximum elements of an optimizer tile
  DelayedUpdate delayed_update, delayed_param_update;  // the second, if enabled, replaces the first
  std::optional<bool> overlap_comm;                    // unset: true at stage 3, else false
  bool ignore_unused_parameters = true;
  // Elements: maximum of a group with several parameters; maximum of concurrent all-gathers after an update.
  std::int64_t reduce_bucket_size = 500000000, allgather_bucket_size = 500000000;
  std::int64_t prefetch_bucket_size = 50000000;  // elements unsharded ahead; 0 = none
  // Maximum elements of one parameter; of all together.
  std::int64_t persistence_threshold = 0, model_persistence_threshold = std::numeric_limits<std::int64_t>::max();
  std::int64_t max_live_parameters = 1000000000, max_reuse_distance = 0;  // elements
  int hpz_ranks = 1;                                                      // that share a secondary shard
  bool gather_16bit_weights = false;                                      // see checkpoint.export_weights
  bool quantized_weights = false, quantized_nontrainable_weights = false, quantized_gradients = false;
  bool log_trace_cache_warnings = false;
  // Tensor-parallel ranks compare inputs and losses in every forward, not only in the first.
  bool sanity_checks = false;
};

// Storage of activations between forward and backward.
struct ActivationSettings {
  // Activation checkpointing: the number of segments of `zero train`'s layers (0: one per layer).
  std::int64_t num_checkpoints = 0;
  bool checkpointing = false;  // enabled if any key of the checkpointing block differs from its default
  bool to_host = false, contiguous = false, synchronize = false, profile = false;
  bool partition = false;  // inputs of segments are divided over the tensor-parallel ranks
  std::string file_path;   // folder of the file for segments' inputs; empty: none
  struct Offload {         // any saved tensor of at least min_bytes
    OffloadDevice device = OffloadDevice::None;
    std::string path;
    std::int64_t min_bytes = 65536;
  } offload;
};

// The budget of one rank, in bytes by tier; unset: no limit (file: not used).
struct MemoryBudget {
  std::optional<std::int64_t> device, host, file, activations;
  std::string path;  // folder of the file
};

// Files of metrics, in output_path/job_name.
struct MonitorSettings {
  bool enabled = false;
  std::string output_path, job_name = "DeepSpeedJobName";
};

// The ranks of a run as a grid, with the data-parallel degree as the rest.
struct MeshSettings {
  int tensor = 1, sequence = 1;      // degrees of tensor and sequence parallelism
  std::string preset_model;          // part of the plan
  TpPlan plan;                       // of tensor parallelism
  bool data_before_experts = false;  // consecutive ranks have the same experts (D+E), not different ones
};

struct Settings {
  std::optional<std::int64_t> train_batch_size, micro_batch_size, accumulation_steps, data_parallel_size;
  bool managed_gradient_accumulation = true, dataloader_drop_last = false;
  OptimizerSettings optimizer;
  std::vector<ParameterGroup> parameter_groups;  // libzero.parameter_groups
  std::vector<std::string> units;                // libzero.units: module paths of units; empty: found automatically
  std::int64_t unit_min_numel = 0;               // adjacent units of fewer elements are merged
  ScheduleSettings schedule;
  Precision precision = Precision::Fp32;
  std::vector<std::string> keep_fp32;  // libzero.keep_fp32: patterns of parameters that stay fp32
  ScalerSettings scaler;
  bool check_grad_overflow = true;  // bf16
  bool loss_scaling = false;        // libzero.loss_scaling: without fp16 too
  std::optional<Precision> grad_accum_dtype, communication_dtype, buffer_dtype;
  std::optional<Precision> param_dtype;                                            // none, or the precision
  bool bf16_masters = false, fp16_masters = false, bf16_optimizer_states = false;  // each in its recipe only
  bool stochastic_rounding = true;                                                 // of masters and states in 16 bits
  double gradient_clipping = 1.0;                                                  // 0: off
  ReduceOp reduce_op = ReduceOp::Mean;
  bool prescale_gradients = false;
  double predivide_factor = 1;
  ZeroSettings zero;
  AioSettings aio;
  MemoryBudget memory;
  std::optional<std::int64_t> steps_per_print = 10;
  bool wall_clock_breakdown = false, memory_breakdown = false, dump_state = false;
  MonitorSettings tensorboard, csv_monitor;
  std::optional<std::string> log_level;
  CheckpointSettings checkpoint;
  std::uint64_t seed = 1234;
  std::string transport = "auto";
  double timeout_s = 1800;
  std::int64_t max_skipped_steps = 10;
  std::int64_t replica_check_steps = 200;  // 0: never
  ActivationSettings activations;
  MeshSettings mesh;
  ModelSettings model;
  DataSettings data;

  bool scales_loss() const { return precision == Precision::Fp16 || loss_scaling; }
  // The parameters in 16 bits have no fp32 masters, and their gradients are stored in the same dtype.
  bool low_precision_masters() const {
    return (bf16_masters && precision == Precision::Bf16) || (fp16_masters && precision == Precision::Fp16);
  }
  // Of an optimizer state: 32, 16 (bf16) or 8. DeepSpeed's states without fp32_optimizer_states have the masters'
  // dtype.
  std::int64_t state_bits() const {
    const bool bf16 = precision == Precision::Bf16 && bf16_masters && (bf16_optimizer_states || !optimizer.fp32_states);
    return bf16 && optimizer.state_bits == 32 ? 16 : optimizer.state_bits;
  }
};

// The three batch sizes for `world` ranks (train = micro * accumulation * world).
struct BatchSizes {
  std::int64_t train, micro, accumulation;
};

}  // namespace zero::config
