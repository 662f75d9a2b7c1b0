// Converts entries and defaults to Settings. Only this file reads effective keys by name.
#include <algorithm>

#include "config/document.h"
#include "config/json_reader.h"

namespace zero::config {
namespace {

// Reads effective values by path and records the paths.
class Values {
 public:
  Values(const Document& document, std::set<std::string>* asked) : document_(document), asked_(asked) {}

  bool flag(std::string_view path) { return json(path) == "true"; }
  double number(std::string_view path) { return finite_number(json(path)).value_or(0); }
  std::int64_t whole(std::string_view path) { return whole_number(json(path)).value_or(0); }
  std::optional<std::int64_t> maybe_whole(std::string_view path) {
    const auto text = json(path);
    if (text.empty() || text == "null") return {};
    return whole_number(text);
  }
  std::optional<bool> maybe_flag(std::string_view path) {
    const auto text = json(path);
    if (text == "null") return {};
    return text == "true";
  }
  std::string word(std::string_view path) {
    const Value v = value(path);
    return v.is(Value::Kind::String) ? v.text : std::string();
  }
  PerGroup per_group(std::string_view path) {
    const Value v = value(path);
    PerGroup out;
    for (const Value& item : v.items) out.push_back(finite_number(item.text).value_or(0));
    if (v.is(Value::Kind::Number)) out.push_back(finite_number(v.text).value_or(0));
    return out;
  }
  std::vector<std::string> texts(std::string_view path) {
    std::vector<std::string> out;
    for (const Value& item : value(path).items) out.push_back(item.text);
    return out;
  }
  std::optional<Precision> dtype(std::string_view path) {
    const auto text = word(path);
    if (text.empty()) return {};
    return text == "bf16" ? Precision::Bf16 : text == "fp16" ? Precision::Fp16 : Precision::Fp32;
  }
  Value value(std::string_view path) {
    const auto text = json(path);
    // With its place, which messages about the model name.
    if (const Entry* entry = document_.find(path); entry && !entry->automatic) return entry->value;
    Faults none;
    auto parsed = text.empty() ? std::nullopt : read_json(std::make_shared<Source>(Source{"", text}), none);
    return parsed ? std::move(*parsed) : Value{};
  }

 private:
  std::string json(std::string_view path) {
    if (asked_) asked_->insert(std::string(path));
    return document_.effective(*find_key(path));
  }
  const Document& document_;
  std::set<std::string>* asked_;
};

OptimizerSettings optimizer_of(Values& v) {
  OptimizerSettings o;
  const std::string type = v.word("optimizer.type"), p = "optimizer.params.";
  o.type = type == "Adam"      ? OptimizerType::Adam
           : type == "AdamW"   ? OptimizerType::AdamW
           : type == "SGD"     ? OptimizerType::Sgd
           : type == "Adagrad" ? OptimizerType::Adagrad
           : type == "Lion"    ? OptimizerType::Lion
                               : OptimizerType::None;
  o.lr = v.number(p + "lr");
  o.weight_decay = v.number(p + "weight_decay");
  const auto betas = v.per_group(p + "betas");
  o.beta1 = betas.at(0);
  o.beta2 = betas.at(1);
  o.eps = v.number(p + "eps");
  o.bias_correction = v.flag(p + "bias_correction");
  o.adam_w_mode = v.flag(p + "adam_w_mode");
  o.momentum = v.number(p + "momentum");
  o.dampening = v.number(p + "dampening");
  o.nesterov = v.flag(p + "nesterov");
  o.lr_decay = v.number(p + "lr_decay");
  o.initial_accumulator_value = v.number(p + "initial_accumulator_value");
  return o;
}

ScheduleSettings schedule_of(Values& v) {
  ScheduleSettings s;
  const std::string type = v.word("scheduler.type"), p = "scheduler.params.";
  s.type = type == "WarmupLR"         ? ScheduleType::WarmupLR
           : type == "WarmupDecayLR"  ? ScheduleType::WarmupDecayLR
           : type == "WarmupCosineLR" ? ScheduleType::WarmupCosineLR
           : type == "LRRangeTest"    ? ScheduleType::LRRangeTest
           : type == "OneCycle"       ? ScheduleType::OneCycle
                                      : ScheduleType::Constant;
  s.warmup_min_lr = v.per_group(p + "warmup_min_lr");
  s.warmup_max_lr = v.per_group(p + "warmup_max_lr");
  // DeepSpeed's two schedules differ in what a missing maximum means.
  if (s.warmup_max_lr.empty() && s.type == ScheduleType::WarmupDecayLR) s.warmup_max_lr = {1e-3};
  s.warmup_num_steps = v.whole(p + "warmup_num_steps");
  s.warmup_log = v.word(p + "warmup_type") == "log";
  s.total_num_steps = v.whole(p + "total_num_steps");
  s.warmup_min_ratio = v.number(p + "warmup_min_ratio");
  s.cos_min_ratio = v.number(p + "cos_min_ratio");
  s.range_min_lr = v.per_group(p + "lr_range_test_min_lr");
  s.range_step_size = v.whole(p + "lr_range_test_step_size");
  s.range_step_rate = v.number(p + "lr_range_test_step_rate");
  s.range_staircase = v.flag(p + "lr_range_test_staircase");
  s.cycle_min_lr = v.per_group(p + "cycle_min_lr");
  s.cycle_max_lr = v.per_group(p + "cycle_max_lr");
  s.cycle_first_step_size = v.whole(p + "cycle_first_step_size");
  s.cycle_second_step_size = v.maybe_whole(p + "cycle_second_step_size");
  s.cycle_first_stair_count = v.whole(p + "cycle_first_stair_count");
  s.cycle_second_stair_count = v.maybe_whole(p + "cycle_second_stair_count");
  s.decay_step_size = v.whole(p + "decay_step_size");
  s.decay_lr_rate = v.number(p + "decay_lr_rate");
  s.cycle_momentum = v.flag(p + "cycle_momentum");
  s.cycle_min_mom = v.per_group(p + "cycle_min_mom");
  s.cycle_max_mom = v.per_group(p + "cycle_max_mom");
  s.decay_mom_rate = v.number(p + "decay_mom_rate");
  s.last_batch_iteration = v.whole(p + "last_batch_iteration");
  return s;
}

ScalerSettings scaler_of(Values& v) {
  ScalerSettings s;
  s.static_scale = v.number("fp16.loss_scale");
  s.initial_scale_power = static_cast<int>(v.whole("fp16.initial_scale_power"));
  s.window = v.whole("fp16.loss_scale_window");
  s.hysteresis = v.whole("fp16.hysteresis");
  s.consecutive_hysteresis = v.flag("fp16.consecutive_hysteresis");
  s.min_scale = v.whole("fp16.min_loss_scale");
  return s;
}

ExpertSettings experts_of(Values& v) {
  ExpertSettings e;
  const std::string p = "libzero.model.experts.";
  e.num_experts = v.whole(p + "num_experts");
  e.expert_interval = v.whole(p + "expert_interval");
  e.ep_size = static_cast<int>(v.whole(p + "ep_size"));
  e.k = static_cast<int>(v.whole(p + "k"));
  e.capacity_factor = v.number(p + "capacity_factor");
  e.eval_capacity_factor = v.number(p + "eval_capacity_factor");
  e.min_capacity = v.whole(p + "min_capacity");
  e.drop_tokens = v.flag(p + "drop_tokens");
  e.use_rts = v.flag(p + "use_rts");
  e.top2_2nd_expert_sampling = v.flag(p + "top2_2nd_expert_sampling");
  e.use_residual = v.flag(p + "use_residual");
  e.noisy_gate_policy = v.word(p + "noisy_gate_policy");
  e.aux_loss = v.number(p + "aux_loss");
  return e;
}

OffloadDevice device_of(const std::string& word) {
  return word == "cpu" ? OffloadDevice::Cpu : word == "nvme" ? OffloadDevice::Nvme : OffloadDevice::None;
}

void read_offload(Values& v, Settings& s) {
  auto& optimizer = s.zero.offload_optimizer;
  optimizer.device = device_of(v.word("zero_optimization.offload_optimizer.device"));
  optimizer.path = v.word("zero_optimization.offload_optimizer.nvme_path");
  optimizer.pin_memory = v.flag("zero_optimization.offload_optimizer.pin_memory");
  optimizer.buffer_count = v.maybe_whole("zero_optimization.offload_optimizer.buffer_count");
  optimizer.buffer_size = v.maybe_whole("zero_optimization.offload_optimizer.buffer_size");
  optimizer.pipeline_read = v.flag("zero_optimization.offload_optimizer.pipeline_read");
  optimizer.pipeline_write = v.flag("zero_optimization.offload_optimizer.pipeline_write");
  optimizer.ratio = v.number("zero_optimization.offload_optimizer.ratio");
  auto& param = s.zero.offload_param;
  param.device = device_of(v.word("zero_optimization.offload_param.device"));
  param.path = v.word("zero_optimization.offload_param.nvme_path");
  param.pin_memory = v.flag("zero_optimization.offload_param.pin_memory");
  param.buffer_count = v.maybe_whole("zero_optimization.offload_param.buffer_count");
  param.buffer_size = v.maybe_whole("zero_optimization.offload_param.buffer_size");
  param.max_in_cpu = v.whole("zero_optimization.offload_param.max_in_cpu");
  s.zero.sub_group_size = v.whole("zero_optimization.sub_group_size");
  const bool second_name = v.flag("libzero.delayed_param_update.enabled");
  s.zero.delayed_update = v.flag("zero_optimization.delayed_update.enabled") || second_name;
  const auto first_start = v.whole("zero_optimization.delayed_update.start_step"),
             second_start = v.whole("libzero.delayed_param_update.start_step");
  s.zero.delayed_start_step = second_name ? second_start : first_start;
  s.aio.block_size = v.whole("aio.block_size");
  s.aio.queue_depth = static_cast<int>(v.whole("aio.queue_depth"));
  s.aio.threads = static_cast<int>(v.whole("aio.intra_op_parallelism"));
  s.aio.single_submit = v.flag("aio.single_submit");
  s.aio.overlap_events = v.flag("aio.overlap_events");
  s.aio.checksums = v.flag("libzero.tier_checksums");
}

void read_memory(Values& v, Settings& s) {
  auto& m = s.memory;
  m.device = v.maybe_whole("memory.device");
  m.host = v.maybe_whole("memory.host");
  m.file = v.maybe_whole("memory.file");
  m.activations = v.maybe_whole("memory.activations");
  m.path = v.word("memory.nvme_path");
  for (const auto& other : {s.zero.offload_optimizer.path, s.zero.offload_param.path})
    if (m.path.empty()) m.path = other;
}

void read_activations(Values& v, ActivationSettings& a) {
  const auto segments = v.maybe_whole("activation_checkpointing.number_checkpoints");
  a.num_checkpoints = segments.value_or(0);
  a.to_host = v.flag("activation_checkpointing.cpu_checkpointing");
  a.partition = v.flag("activation_checkpointing.partition_activations");
  a.contiguous = v.flag("activation_checkpointing.contiguous_memory_optimization");
  a.synchronize = v.flag("activation_checkpointing.synchronize_checkpoint_boundary");
  a.profile = v.flag("activation_checkpointing.profile");
  a.file_path = v.word("libzero.activation_file_path");
  a.checkpointing = segments || a.to_host || a.contiguous || a.synchronize || a.profile || !a.file_path.empty();
  a.offload.device = device_of(v.word("libzero.activation_offload.device"));
  a.offload.path = v.word("libzero.activation_offload.nvme_path");
  a.offload.min_bytes = v.whole("libzero.activation_offload.min_bytes");
}

MonitorSettings monitor_of(Values& v, const std::string& block) {
  return {v.flag(block + "enabled"), v.word(block + "output_path"), v.word(block + "job_name")};
}

Settings read_settings(const Document& document, std::set<std::string>* asked) {
  Values v(document, asked);
  Settings s;
  s.train_batch_size = v.maybe_whole("train_batch_size");
  s.micro_batch_size = v.maybe_whole("train_micro_batch_size_per_gpu");
  s.accumulation_steps = v.maybe_whole("gradient_accumulation_steps");
  s.data_parallel_size = v.maybe_whole("data_parallel_size");
  s.mesh.tensor = static_cast<int>(std::max<std::int64_t>(v.whole("tensor_parallel.autotp_size"), 1));
  {
    Faults checked;  // by document_checks.cpp
    s.mesh.plan = read_tp_plan(v.value("tensor_parallel.partition_config"), v.word("tensor_parallel.preset_model"),
                               s.mesh.tensor, checked);
    s.mesh.plan.vocab_parallel_lm_head = v.flag("tensor_parallel.vocab_parallel_lm_head");
  }
  s.mesh.sequence = static_cast<int>(v.whole("sequence_parallel_size"));
  s.mesh.data_before_experts = v.flag("use_data_before_expert_parallelism");
  s.managed_gradient_accumulation = v.flag("managed_gradient_accumulation");
  s.dataloader_drop_last = v.flag("dataloader_drop_last");
  s.optimizer = optimizer_of(v);
  s.schedule = schedule_of(v);
  s.scaler = scaler_of(v);
  s.precision = v.flag("fp16.enabled") ? Precision::Fp16 : v.flag("bf16.enabled") ? Precision::Bf16 : Precision::Fp32;
  v.dtype("data_types.param_dtype");  // equal to the precision, see document_checks.cpp
  s.check_grad_overflow = v.flag("bf16.check_grad_overflow");
  s.grad_accum_dtype = v.dtype("data_types.grad_accum_dtype");
  s.buffer_dtype = v.dtype("data_types.buffer_dtype");
  s.communication_dtype = v.dtype("communication_data_type");
  s.gradient_clipping = v.number("gradient_clipping");
  s.reduce_op = v.word("gradient_allreduce_op") == "sum" ? ReduceOp::Sum : ReduceOp::Mean;
  s.prescale_gradients = v.flag("prescale_gradients");
  s.predivide_factor = v.number("gradient_predivide_factor");
  s.zero.stage = static_cast<int>(v.whole("zero_optimization.stage"));
  read_offload(v, s);
  s.zero.overlap_comm = v.maybe_flag("zero_optimization.overlap_comm");
  s.zero.ignore_unused_parameters = v.flag("zero_optimization.ignore_unused_parameters");
  s.zero.reduce_bucket_size = v.whole("zero_optimization.reduce_bucket_size");
  s.zero.allgather_bucket_size = v.whole("zero_optimization.allgather_bucket_size");
  s.zero.prefetch_bucket_size = v.whole("zero_optimization.stage3_prefetch_bucket_size");
  s.zero.persistence_threshold = v.whole("zero_optimization.stage3_param_persistence_threshold");
  s.zero.model_persistence_threshold = v.whole("zero_optimization.stage3_model_persistence_threshold");
  s.zero.max_live_parameters = v.whole("zero_optimization.stage3_max_live_parameters");
  s.zero.max_reuse_distance = v.whole("zero_optimization.stage3_max_reuse_distance");
  s.zero.hpz_ranks =
      static_cast<int>(std::clamp<std::int64_t>(v.whole("zero_optimization.zero_hpz_partition_size"), 1, 1 << 20));
  s.zero.quantized_weights = v.flag("zero_optimization.zero_quantized_weights");
  s.zero.quantized_nontrainable_weights = v.flag("zero_optimization.zero_quantized_nontrainable_weights");
  s.zero.quantized_gradients = v.flag("zero_optimization.zero_quantized_gradients");
  s.zero.log_trace_cache_warnings = v.flag("zero_optimization.log_trace_cache_warnings");
  s.zero.sanity_checks = v.flag("zero_optimization.enable_sanity_checks");
  s.steps_per_print = v.maybe_whole("steps_per_print");
  s.wall_clock_breakdown = v.flag("wall_clock_breakdown");
  s.memory_breakdown = v.flag("memory_breakdown");
  s.dump_state = v.flag("dump_state");
  s.tensorboard = monitor_of(v, "tensorboard.");
  s.csv_monitor = monitor_of(v, "csv_monitor.");
  if (const auto level = v.word("log_level"); !level.empty()) s.log_level = level;
  s.checkpoint.tag_validation = v.word("checkpoint.tag_validation");
  s.checkpoint.decoupled = v.flag("checkpoint.writer.decoupled");
  s.checkpoint.show_statistics = v.flag("checkpoint.writer.show_statistics");
  s.checkpoint.memory = v.whole("libzero.checkpoint_memory");
  s.checkpoint.keep_every = v.whole("libzero.keep_snapshot_every");
  s.checkpoint.save_errors_warn = v.word("libzero.save_errors") == "warn";
  const auto buffers = v.word("libzero.private_buffers");
  s.checkpoint.private_buffers = buffers == "rank0"   ? PrivateBuffers::Rank0
                                 : buffers == "mean"  ? PrivateBuffers::Mean
                                 : buffers == "error" ? PrivateBuffers::Error
                                                      : PrivateBuffers::Modulo;
  const auto verify = v.word("libzero.verify_on_load");
  s.checkpoint.verify_on_load = verify == "full"    ? VerifyOnLoad::Full
                                : verify == "sizes" ? VerifyOnLoad::Sizes
                                                    : VerifyOnLoad::Used;
  const bool gather = v.flag("zero_optimization.stage3_gather_16bit_weights_on_model_save");
  s.checkpoint.export_weights = gather && s.zero.stage == 3;
  s.seed = static_cast<std::uint64_t>(v.whole("seed"));
  s.transport = v.word("libzero.transport");
  s.timeout_s = v.number("libzero.timeout_s");
  s.max_skipped_steps = v.whole("libzero.max_skipped_steps");
  s.replica_check_steps = v.whole("libzero.replica_check_steps");
  s.units = v.texts("libzero.units");
  s.unit_min_numel = v.whole("libzero.unit_min_numel");
  for (const Value& item : v.value("libzero.parameter_groups").items) {
    ParameterGroup group;
    group.pattern = item.find("pattern")->text;
    if (const Value* lr = item.find("lr")) group.lr = finite_number(lr->text);
    if (const Value* decay = item.find("weight_decay")) group.weight_decay = finite_number(decay->text);
    s.parameter_groups.push_back(std::move(group));
  }
  read_memory(v, s);
  read_activations(v, s.activations);
  s.model.size = v.word("libzero.model.size");
  s.model.layers = v.whole("libzero.model.layers");
  s.model.hidden = v.whole("libzero.model.hidden");
  s.model.heads = v.whole("libzero.model.heads");
  s.model.seq_length = v.whole("libzero.model.seq_length");
  s.model.vocabulary = v.whole("libzero.model.vocabulary");
  s.model.dropout = v.number("libzero.model.dropout");
  s.model.tied = v.flag("libzero.model.tied");
  s.model.experts = experts_of(v);
  s.data.text = v.word("libzero.data.text");
  s.data.holdout = v.number("libzero.data.holdout");
  s.data.eval_batches = v.whole("libzero.data.eval_batches");
  return s;
}

}  // namespace

Settings typed_settings(const Document& document) { return read_settings(document, nullptr); }

std::set<std::string> keys_read_by_settings() {
  std::set<std::string> asked;
  read_settings(Document{}, &asked);
  return asked;
}

}  // namespace zero::config
