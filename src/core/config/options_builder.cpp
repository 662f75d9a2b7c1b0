// Converts each call to settings of one key, so that a fault shows the call and the key. See options_builder.h.
#include <zero/options_builder.h>

#include <utility>

#include "config/key_fields.h"

namespace zero {

using config::json_of;

// The keys of one call in one block of the configuration; arguments that are not given are omitted.
class OptionsBuilder::Block {
 public:
  Block(OptionsBuilder& builder, const char* call, std::string block)
      : builder_(builder), call_(call), block_(std::move(block)) {}
  Block& type(const char* name) { return text("type", json_of(std::string(name))); }
  Block& put(const char* key, const std::optional<std::array<double, 2>>& value) {
    return value ? text(key, json_of(std::vector(value->begin(), value->end()))) : *this;
  }
  template <class T>
  Block& put(const char* key, const std::optional<T>& value) {
    return value ? text(key, json_of(*value)) : *this;
  }

 private:
  Block& text(const std::string& key, std::string value) {
    builder_.put(call_, block_ + "." + key, std::move(value));
    return *this;
  }
  OptionsBuilder& builder_;
  const char* call_;
  std::string block_;
};

OptionsBuilder& OptionsBuilder::put(const char* call, std::string_view key, std::string value) {
  settings_.push_back({std::string(key), std::move(value), std::string("Options::") + call});
  return *this;
}

void OptionsBuilder::drop(std::string_view prefix) {
  std::erase_if(settings_, [&](const Setting& setting) { return setting.key.starts_with(prefix); });
}

OptionsBuilder& OptionsBuilder::stage(int stage) { return put("stage", "zero_optimization.stage", json_of(stage)); }

OptionsBuilder& OptionsBuilder::fp32() {
  drop("fp16.");
  return put("fp32", "bf16.enabled", "false");
}

OptionsBuilder& OptionsBuilder::bf16() { return put("bf16", "bf16.enabled", "true"); }

OptionsBuilder& OptionsBuilder::fp16(const Fp16Params& params) {
  put("fp16", "fp16.enabled", "true");
  Block(*this, "fp16", "fp16")
      .put("loss_scale", params.loss_scale)
      .put("initial_scale_power", params.initial_scale_power)
      .put("loss_scale_window", params.loss_scale_window)
      .put("hysteresis", params.hysteresis)
      .put("min_loss_scale", params.min_loss_scale);
  return *this;
}

OptionsBuilder& OptionsBuilder::adam(const AdamParams& params) { return adam_like("adam", "Adam", params); }

OptionsBuilder& OptionsBuilder::adamw(const AdamParams& params) { return adam_like("adamw", "AdamW", params); }

OptionsBuilder& OptionsBuilder::adam_like(const char* call, const char* type, const AdamParams& params) {
  drop("optimizer.");
  Block(*this, call, "optimizer").type(type);
  Block(*this, call, "optimizer.params")
      .put("lr", params.lr)
      .put("weight_decay", params.weight_decay)
      .put("betas", params.betas)
      .put("eps", params.eps)
      .put("bias_correction", params.bias_correction)
      .put("adam_w_mode", params.adam_w_mode);
  return *this;
}

OptionsBuilder& OptionsBuilder::sgd(const SgdParams& params) {
  drop("optimizer.");
  Block(*this, "sgd", "optimizer").type("SGD");
  Block(*this, "sgd", "optimizer.params")
      .put("lr", params.lr)
      .put("weight_decay", params.weight_decay)
      .put("momentum", params.momentum)
      .put("dampening", params.dampening)
      .put("nesterov", params.nesterov);
  return *this;
}

OptionsBuilder& OptionsBuilder::lion(const LionParams& params) {
  drop("optimizer.");
  Block(*this, "lion", "optimizer").type("Lion");
  Block(*this, "lion", "optimizer.params")
      .put("lr", params.lr)
      .put("weight_decay", params.weight_decay)
      .put("betas", params.betas);
  return *this;
}

OptionsBuilder& OptionsBuilder::adagrad(const AdagradParams& params) {
  drop("optimizer.");
  Block(*this, "adagrad", "optimizer").type("Adagrad");
  Block(*this, "adagrad", "optimizer.params")
      .put("lr", params.lr)
      .put("weight_decay", params.weight_decay)
      .put("eps", params.eps)
      .put("lr_decay", params.lr_decay)
      .put("initial_accumulator_value", params.initial_accumulator_value);
  return *this;
}

OptionsBuilder& OptionsBuilder::warmup_lr(const WarmupParams& params) {
  return warmup("warmup_lr", "WarmupLR", params);
}

OptionsBuilder& OptionsBuilder::warmup_decay_lr(const WarmupParams& params) {
  return warmup("warmup_decay_lr", "WarmupDecayLR", params);
}

OptionsBuilder& OptionsBuilder::warmup(const char* call, const char* type, const WarmupParams& params) {
  drop("scheduler.");
  Block(*this, call, "scheduler").type(type);
  Block(*this, call, "scheduler.params")
      .put("warmup_min_lr", params.warmup_min_lr)
      .put("warmup_max_lr", params.warmup_max_lr)
      .put("warmup_num_steps", params.warmup_num_steps)
      .put("total_num_steps", params.total_num_steps)
      .put("warmup_type", params.warmup_type);
  return *this;
}

OptionsBuilder& OptionsBuilder::train_batch_size(std::int64_t samples) {
  return put("train_batch_size", "train_batch_size", json_of(samples));
}

OptionsBuilder& OptionsBuilder::train_micro_batch_size(std::int64_t samples) {
  return put("train_micro_batch_size", "train_micro_batch_size_per_gpu", json_of(samples));
}

OptionsBuilder& OptionsBuilder::gradient_accumulation_steps(std::int64_t steps) {
  return put("gradient_accumulation_steps", "gradient_accumulation_steps", json_of(steps));
}

OptionsBuilder& OptionsBuilder::gradient_clipping(double norm) {
  return put("gradient_clipping", "gradient_clipping", json_of(norm));
}

OptionsBuilder& OptionsBuilder::offload_optimizer(Tier tier, const std::string& nvme_path) {
  return offload("offload_optimizer", "zero_optimization.offload_optimizer.", tier, nvme_path);
}

OptionsBuilder& OptionsBuilder::offload_parameters(Tier tier, const std::string& nvme_path) {
  return offload("offload_parameters", "zero_optimization.offload_param.", tier, nvme_path);
}

OptionsBuilder& OptionsBuilder::offload(const char* call, const std::string& block, Tier tier,
                                        const std::string& nvme_path) {
  drop(block + "device");
  drop(block + "nvme_path");
  put(call, block + "device", tier == Tier::Host ? "\"cpu\"" : tier == Tier::File ? "\"nvme\"" : "\"none\"");
  if (!nvme_path.empty()) put(call, block + "nvme_path", json_of(nvme_path));
  return *this;
}

OptionsBuilder& OptionsBuilder::overlap_comm(bool overlap) {
  return put("overlap_comm", "zero_optimization.overlap_comm", json_of(overlap));
}

namespace {

std::string spec_json(const TpLayerSpec& spec) {
  std::string text =
      "{\"patterns\": " + json_of(spec.patterns) + ", \"partition_type\": " + json_of(spec.partition_type) +
      ", \"grad_allreduce\": " + json_of(spec.grad_allreduce) + ", \"scatter_input\": " + json_of(spec.scatter_input) +
      ", \"multiple\": " + json_of(spec.multiple);
  if (!spec.pieces.empty()) text += ", \"shape\": [" + json_of(spec.pieces) + ", -1]";
  if (spec.gather_output) text += ", \"gather_output\": " + json_of(*spec.gather_output);
  return text + "}";
}

}  // namespace

OptionsBuilder& OptionsBuilder::tensor_parallel(int ranks, const TpPlan& plan) {
  const auto put_key = [&](const char* key, const std::string& value) {
    put("tensor_parallel", std::string("tensor_parallel.") + key, value);
  };
  drop("tensor_parallel.");
  put_key("autotp_size", json_of(ranks));
  if (plan.vocab_parallel_lm_head) put_key("vocab_parallel_lm_head", "true");
  if (!plan.preset_model.empty()) put_key("preset_model", json_of(plan.preset_model));
  if (plan.layer_specs.empty()) return *this;
  std::string specs;
  for (const TpLayerSpec& spec : plan.layer_specs) specs += (specs.empty() ? "" : ", ") + spec_json(spec);
  put_key("partition_config", "{\"layer_specs\": [" + specs + "]}");
  return *this;
}

OptionsBuilder& OptionsBuilder::sequence_parallel(int ranks) {
  return put("sequence_parallel", "sequence_parallel_size", json_of(ranks));
}

OptionsBuilder& OptionsBuilder::set(std::string_view key, std::string_view json) {
  return put("set", key, std::string(json));
}

Options OptionsBuilder::options() const { return Options::from_json("{}", "Options::build", settings_); }

OptionsBuilder Options::build() { return {}; }

}  // namespace zero
