// Checks that need all entries: conflicts, refused values, missing keys, notices.
#include <algorithm>
#include <cmath>

#include "config/document.h"

namespace zero::config {
namespace {

// Whether "enabled" (or another key) is true in a block; "*": anywhere below.
bool asks(const Value& value, std::string_view off_key) {
  for (const Member& member : value.members) {
    const bool on = member.value.is(Value::Kind::Bool) && member.value.boolean;
    if (off_key == "*" ? (member.key == "enabled" && on) || asks(member.value, off_key) : member.key == off_key && on)
      return true;
  }
  return false;
}

class Checker {
 public:
  Checker(const Document& document, Faults& faults) : document_(document), faults_(faults) {}

  void all() {
    optimizer();
    schedule();
    for (const auto& [path, entry] : document_.entries) effect(path, entry);
    precision();
    tensor_parallel();
    experts();
    zero();
    batches();
  }

 private:
  const Entry* find(std::string_view path) const { return document_.find(path); }
  std::string value(std::string_view path) const { return document_.effective(path); }
  bool on(std::string_view path) const { return value(path) == "true"; }
  double number(std::string_view path) const { return finite_number(value(path)).value_or(0); }

  void conflict(std::string_view path, const std::string& message, const std::string& hint,
                const std::vector<std::string_view>& others = {}) {
    std::vector<Place> related;
    for (const auto other : others)
      if (const Entry* entry = find(other)) related.push_back(entry->place);
    const Entry* entry = find(path);
    faults_.error("conflict", entry ? entry->place : Place{}, pointer_of(entry ? entry->spelled : std::string(path)),
                  message, hint, related);
  }
  void missing(std::string_view path, std::string_view near, const std::string& message, const std::string& hint) {
    const Entry* entry = find(near);
    faults_.error("missing", entry ? entry->key_place : Place{}, pointer_of(path), message, hint);
  }

  // Keys that belong to another type, and keys that the type requires.
  void owners(std::string_view block) {
    const std::string type_path = std::string(block) + ".type";
    const Entry* type = find(type_path);
    if (!type) {
      for (const auto& [path, entry] : document_.entries)
        if (path.starts_with(std::string(block) + ".params.")) {
          missing(type_path, path, "got parameters without a type", "give " + type_path + ", or leave the block out");
          return;
        }
      return;
    }
    for (const auto& [path, entry] : document_.entries) {
      const auto owners = split_words(entry.key->owners);
      if (!path.starts_with(std::string(block) + ".params.") || owners.empty() ||
          std::find(owners.begin(), owners.end(), type->value.text) != owners.end())
        continue;
      std::string whose;
      for (const auto& owner : owners) whose += (whose.empty() ? "" : ", ") + owner;
      faults_.error("unknown-key", entry.key_place, pointer_of(entry.spelled),
                    "unknown key for type " + type->value.text, "it belongs to " + whose, {type->place});
    }
  }

  void optimizer() {
    owners("optimizer");
    const Entry* type = find("optimizer.type");
    if (!type) return;
    const std::string name = type->value.text;
    if (name == "SGD" && on("optimizer.params.nesterov") &&
        (number("optimizer.params.momentum") == 0 || number("optimizer.params.dampening") != 0))
      conflict("optimizer.params.nesterov",
               "got true with momentum " + value("optimizer.params.momentum") + " and dampening " +
                   value("optimizer.params.dampening") + ", expected momentum above 0 and dampening 0",
               "set momentum, 0.9 say, or leave nesterov out",
               {"optimizer.params.momentum", "optimizer.params.dampening"});
    if (const auto bits = value("optimizer.params.state_bits"); bits != "32" && bits != "16" && bits != "8")
      conflict("optimizer.params.state_bits", "got " + bits + ", expected 32, 16 or 8", "16 stores states in bf16");
    else if (bits == "8" && name != "Adam" && name != "AdamW" && name != "Lion")
      conflict("optimizer.params.state_bits", "got 8 for " + name + ", expected Adam, AdamW or Lion", "set 16 or 32",
               {"optimizer.type"});
    if (name == "Muon" && number("optimizer.params.lr") == 0 && value("optimizer.params.muon_lr") == "null")
      conflict("optimizer.params.lr", "got 0 for Muon, expected a number above 0", "adam_lr is in proportion to it");
    if (name == "AdamW" && !on("optimizer.params.adam_w_mode"))
      conflict("optimizer.params.adam_w_mode", "got false, expected true for AdamW",
               "use type Adam for decay inside the gradient", {"optimizer.type"});
    if (name == "Adam" && !find("optimizer.params.adam_w_mode") && number("optimizer.params.weight_decay") != 0)
      faults_.notice("note", type->place, pointer_of("optimizer.type"),
                     "Adam decays weights decoupled from the gradient, as in DeepSpeed",
                     "set adam_w_mode false for decay inside the gradient");
  }

  std::size_t group_count() const {
    const Entry* groups = find("libzero.parameter_groups");
    return 1 + (groups ? groups->value.items.size() : 0);
  }

  // The numbers of a NumOrList value, repeated to `groups`.
  std::vector<double> rates(std::string_view path, std::size_t groups) {
    const Entry* entry = find(path);
    if (entry && !entry->automatic && entry->value.is(Value::Kind::Array)) {
      std::vector<double> out;
      for (const Value& item : entry->value.items) out.push_back(finite_number(item.text).value_or(0));
      if (out.size() != groups) {
        conflict(
            path,
            "got " + std::to_string(out.size()) + " values, expected 1" +
                (groups == 1 ? ", for there is one parameter group"
                             : " or " + std::to_string(groups) + " (one per parameter group)"),
            groups == 1 ? "give one number" : "give one number for all groups, or one each, the unnamed group first",
            {"libzero.parameter_groups"});
        out.resize(groups, out.empty() ? 0 : out.back());
      }
      return out;
    }
    const std::string text = value(path);
    if (text.empty() || text == "null") return {};
    return std::vector<double>(groups, finite_number(text).value_or(0));
  }

  void ordered(std::string_view low, std::string_view high) {
    const std::size_t groups = group_count();
    const auto from = rates(low, groups), to = rates(high, groups);
    for (std::size_t g = 0; g < std::min(from.size(), to.size()); ++g)
      if (from[g] > to[g])
        return conflict(
            low, "got " + number_text(from[g]) + ", expected at most " + std::string(high) + " = " + number_text(to[g]),
            "exchange the two", {high});
  }

  void schedule() {
    owners("scheduler");
    const Entry* type = find("scheduler.type");
    if (!type) return;
    const std::string name = type->value.text;
    const bool needs_total = name == "WarmupDecayLR" || name == "WarmupCosineLR";
    for (const char* path : {"scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"})
      if (const Entry* entry = find(path); entry && entry->automatic)
        faults_.error("auto-no-rule", entry->place, pointer_of(entry->spelled), "got \"auto\" without its flag",
                      std::string("give ") +
                          (std::string_view(path).ends_with("total_num_steps") ? "--steps" : "--warmup-steps") +
                          ", or a value");
    if (needs_total && !find("scheduler.params.total_num_steps"))
      missing("scheduler.params.total_num_steps", "scheduler.type",
              name + " needs the number of updates of the whole run", "add \"total_num_steps\"");
    if (needs_total && document_.is_set("scheduler.params.total_num_steps") &&
        number("scheduler.params.total_num_steps") < number("scheduler.params.warmup_num_steps"))
      conflict("scheduler.params.total_num_steps",
               "got " + value("scheduler.params.total_num_steps") +
                   ", expected at least warmup_num_steps = " + value("scheduler.params.warmup_num_steps"),
               "make the warm-up shorter or the run longer", {"scheduler.params.warmup_num_steps"});
    if (name == "WarmupLR" || name == "WarmupDecayLR")
      ordered("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr");
    if (name == "OneCycle") {
      for (const char* path : {"scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"})
        if (!find(path)) missing(path, "scheduler.type", "OneCycle needs it", "give the lowest and the highest rate");
      ordered("scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr");
      ordered("scheduler.params.cycle_min_mom", "scheduler.params.cycle_max_mom");
    }
    if (name == "LRRangeTest") rates("scheduler.params.lr_range_test_min_lr", group_count());
    if (name == "WarmupDecayLR" && !find("scheduler.params.warmup_max_lr") && number("optimizer.params.lr") != 1e-3 &&
        find("optimizer.params.lr"))
      faults_.notice("note", type->place, pointer_of("scheduler.params.warmup_max_lr"),
                     "WarmupDecayLR rises to 0.001, not to the optimizer's lr " + value("optimizer.params.lr"),
                     "set warmup_max_lr");
  }

  void effect(const std::string& path, const Entry& entry) {
    const Key& key = *entry.key;
    const std::string pointer = pointer_of(entry.spelled);
    const bool changed =
        !entry.automatic && entry.value.json() != key.default_json && !entry.value.is(Value::Kind::Null);
    const auto notice = [&](std::string_view reason) {
      faults_.notice("no-effect", entry.key_place, pointer, "no effect: " + std::string(reason));
    };
    switch (key.effect) {
      case Effect::Works:
        if (const auto unmet = condition_of(document_, key.when).unmet; !unmet.empty()) notice(unmet);
        return;
      case Effect::NoEffect:
        if (path == "checkpoint.writer.type" && entry.value.text == "MOCK") {
          faults_.error("refused", entry.place, pointer, "got \"MOCK\"", "it writes nothing; leave it out");
        } else if (path == "vocabulary_size") {
          if (changed && whole_number(entry.value.text).value_or(0) % 8 != 0)
            faults_.notice("note", entry.place, pointer,
                           entry.value.text + " is not a multiple of 8; matrix products are faster with one");
        } else {
          const auto unmet = condition_of(document_, key.when).unmet;
          notice(unmet.empty() ? key.reason : std::string_view(unmet));
        }
        return;
      case Effect::NotBuilt:
        return;
      case Effect::Refused: {
        bool asked = changed;
        if (key.type == Type::Block && !key.off_key.empty()) asked = asks(entry.value, key.off_key);
        if (path == "pipeline.stages" &&
            (entry.automatic || entry.value.json() == "1" || entry.value.json() == "\"auto\""))
          asked = false;
        if (path == "zero_optimization.mics_shard_size" && number(path) <= 0) asked = false;
        if (asked)
          faults_.error("refused", entry.place, pointer,
                        "got " + entry.value.json().substr(0, 80) + ", which is refused", std::string(key.reason));
        else
          faults_.notice("no-effect", entry.key_place, pointer, "no effect: the value requests nothing");
        return;
      }
    }
  }

  void tensor_parallel() {
    const Entry* plan = find("tensor_parallel.partition_config");
    const Entry* preset = find("tensor_parallel.preset_model");
    const auto degree = std::max(number("tensor_parallel.autotp_size"), 1.0);
    if (plan) read_tp_plan(plan->value, preset ? preset->value.text : std::string(), static_cast<int>(degree), faults_);
    if (preset && (preset->value.text == "mixtral" || preset->value.text == "deepseek_v2"))
      faults_.error("refused", preset->place, pointer_of("tensor_parallel.preset_model"),
                    "got " + preset->value.text + ", which is refused",
                    "its experts are not cut by tensor parallelism");
    for (const char* path : {"tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size"})
      if (const Entry* size = find(path); size && number(path) > 1 && number(path) != degree)
        conflict(path, "got " + size->value.json() + ", expected tensor_parallel.autotp_size", "leave it out",
                 {"tensor_parallel.autotp_size"});
  }

  void experts() {
    const auto key = [](const char* name) { return std::string("libzero.model.experts.") + name; };
    const auto count = number(key("num_experts")), k = number(key("k"));
    if (count == 0) return;
    if (k > count)
      conflict(key("k"), "got " + value(key("k")) + ", expected 1 to " + value(key("num_experts")) + ", the experts",
               "choose fewer experts of a token (--top-k), or more experts (--num-experts)", {key("num_experts")});
    if (std::fmod(count, number(key("ep_size"))) != 0)
      conflict(key("ep_size"),
               "got " + value(key("ep_size")) + ", expected a divisor of " + value(key("num_experts")) + " experts",
               "every rank has equally many experts: choose another --ep-world-size or --num-experts",
               {key("num_experts")});
    if (value(key("noisy_gate_policy")) == "\"RSample\"" && k != 1)
      conflict(key("noisy_gate_policy"), "got \"RSample\", expected None or Jitter for k = " + value(key("k")),
               "RSample draws one expert: set k to 1 (--top-k)", {key("k")});
    if (number("tensor_parallel.autotp_size") > 1)
      conflict(key("num_experts"),
               "got " + value(key("num_experts")) + " with tensor_parallel.autotp_size " +
                   value("tensor_parallel.autotp_size") + ", expected 0 with tensor parallelism",
               "experts are divided over data-parallel ranks: use ep_size (--ep-world-size)",
               {"tensor_parallel.autotp_size"});
  }

  void precision() {
    const bool fp16 = on("fp16.enabled"), bf16 = on("bf16.enabled");
    if (fp16 && bf16)
      conflict("bf16.enabled", "got fp16 and bf16 enabled, expected one of them", "switch one off", {"fp16.enabled"});
    const std::string enabled = fp16   ? "\"fp16\""
                                : bf16 ? "\"bf16\""
                                       : "\"fp32\"",
                      param = value("data_types.param_dtype");
    if (param != "null" && param != enabled && !(fp16 && bf16))
      conflict("data_types.param_dtype", "got " + param + ", expected " + enabled + ", the precision that is enabled",
               "leave it out, or enable the precision it names", {"fp16.enabled", "bf16.enabled"});
    if (on("bf16.bf16_optimizer_states") && !on("bf16.bf16_master_weights_and_grads"))
      conflict("bf16.bf16_optimizer_states", "got true without bf16_master_weights_and_grads",
               "set both, or optimizer.params.state_bits 16, which keeps fp32 masters");
    if (fp16 && on("fp16.fp16_master_weights_and_grads") && !on("optimizer.params.fp32_optimizer_states"))
      conflict("optimizer.params.fp32_optimizer_states", "got false with fp16 masters, expected true",
               "squares of gradients need more range than fp16 has: leave it out, or set state_bits 16 (bf16)",
               {"fp16.fp16_master_weights_and_grads"});
    const double scale = number("fp16.loss_scale");
    if (scale != 0 && document_.is_set("fp16.loss_scale") && scale < 1)
      faults_.notice("note", find("fp16.loss_scale")->place, pointer_of("fp16.loss_scale"),
                     "a scale below 1 makes small gradients smaller");
  }

  void zero() {
    const double stage = number("zero_optimization.stage");
    const auto offloads = [&](std::string_view block) { return value(std::string(block) + ".device") != "\"none\""; };
    const char* param = "zero_optimization.offload_param";
    const char* optimizer = "zero_optimization.offload_optimizer";
    if (offloads(param) && stage != 3)
      conflict("zero_optimization.offload_param.device",
               "got " + value("zero_optimization.offload_param.device") + " at stage " +
                   value("zero_optimization.stage") + ", expected stage 3",
               "parameters are sharded, and can rest elsewhere, at stage 3 only", {"zero_optimization.stage"});
    if (offloads(optimizer) && stage == 0)
      conflict("zero_optimization.offload_optimizer.device",
               "got " + value("zero_optimization.offload_optimizer.device") + " at stage 0, expected stage 1, 2 or 3",
               "choose a stage that shards optimizer states", {"zero_optimization.stage"});
    for (const char* block : {param, optimizer}) {
      const std::string device = std::string(block) + ".device", path = std::string(block) + ".nvme_path";
      if (value(device) == "\"nvme\"" && value(path) == "null")
        conflict(device, "got \"nvme\" without nvme_path",
                 "name a directory on the disk: \"nvme_path\": \"/local_nvme\"");
    }
    if (number("zero_optimization.zero_hpz_partition_size") > 1 && stage != 3)
      conflict("zero_optimization.zero_hpz_partition_size",
               "got " + value("zero_optimization.zero_hpz_partition_size") + " at stage " +
                   value("zero_optimization.stage") + ", expected stage 3",
               "set 1, or stage 3", {"zero_optimization.stage"});
    if (on("activation_checkpointing.contiguous_memory_optimization") &&
        value("activation_checkpointing.number_checkpoints") == "null")
      conflict("activation_checkpointing.contiguous_memory_optimization", "got true without number_checkpoints",
               "say how many checkpoints the buffer holds");
    if (value("libzero.activation_offload.device") == "\"nvme\"" &&
        value("libzero.activation_offload.nvme_path") == "null")
      conflict("libzero.activation_offload.device", "got \"nvme\" without nvme_path",
               "name a directory on the disk: \"nvme_path\": \"/local_nvme\"");
    if (number("memory.file") > 0 && value("memory.nvme_path") == "null" &&
        value(std::string(param) + ".nvme_path") == "null" && value(std::string(optimizer) + ".nvme_path") == "null")
      conflict("memory.file", "got " + value("memory.file") + " bytes without memory.nvme_path",
               "name a directory on the disk: \"nvme_path\": \"/local_nvme\"");
    for (const char* delayed : {"zero_optimization.delayed_update.enabled", "libzero.delayed_param_update.enabled"})
      if (on(delayed) && !offloads(optimizer))
        conflict(delayed, "got true without offload_optimizer",
                 "the delayed update runs on the host while the device computes",
                 {"zero_optimization.offload_optimizer.device"});
  }

  // Faults for every number of ranks; resolve_batch() checks the rest.
  void batches() {
    const char *t = "train_batch_size", *m = "train_micro_batch_size_per_gpu", *a = "gradient_accumulation_steps";
    if (!document_.is_set(t)) return;
    const auto of = [&](const char* path) {
      return document_.is_set(path) ? whole_number(value(path)).value_or(1) : 1;
    };
    const std::int64_t total = of(t), micro = of(m), steps = of(a);
    // In 128 bits: the product of two 64-bit numbers always fits.
    const auto product = static_cast<__int128>(micro) * steps;
    if (product > total || total % static_cast<std::int64_t>(product) != 0)
      conflict(t,
               value(t) + " is not " + std::to_string(micro) + " (micro) x " + std::to_string(steps) +
                   " (accumulation) x any number of ranks",
               "set it to a multiple, or leave one of the three out", {m, a});
  }

  const Document& document_;
  Faults& faults_;
};

}  // namespace

void check_entries(const Document& document, Faults& faults) { Checker(document, faults).all(); }

void list_not_built(const Document& document, Faults& not_built) {
  for (const auto& [path, entry] : document.entries) {
    const Key& key = *entry.key;
    if (key.effect != Effect::NotBuilt || entry.automatic || entry.value.is(Value::Kind::Null) ||
        entry.value.json() == key.default_json)
      continue;
    not_built.error("not-built", entry.place, pointer_of(entry.spelled),
                    "got " + entry.value.json().substr(0, 80) + ", which is not available in this version, expected " +
                        key.default_json,
                    std::string(key.reason));
  }
}

}  // namespace zero::config
