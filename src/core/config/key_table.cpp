// The whole table of keys and look-ups in it; old names.
#include "config/key_rows.h"

#include <algorithm>
#include <map>

#include "base/check.h"

namespace zero::config {
namespace {

// Blocks whose keys may be "auto" even if their rows give no rule.
constexpr std::string_view kAutomatic[] = {"fp16.", "bf16.", "zero_optimization.", "tensorboard.", "csv_monitor."};

// Special conversions of their values are in document_read.cpp, by these same names.
const OldName kOldNames[] = {
    {"bfloat16", "bf16"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save",
     "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"},
    {"zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device"},
    {"zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"},
    {"zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size", false},
    {"zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold", false},
    {"zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold", false},
    {"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters", false},
    {"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance", false},
    {"zero_optimization.gather_16bit_weights_on_model_save",
     "zero_optimization.stage3_gather_16bit_weights_on_model_save", false},
    {"zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold", false},
    {"zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params",
     false},
    {"zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential", false},
    {"aio.thread_count", "aio.intra_op_parallelism"},
    {"bf16.check_overflow", "bf16.check_grad_overflow"},
    {"allgather_size", "zero_optimization.allgather_bucket_size"},
    {"fp32_allreduce", "communication_data_type"},
};

struct Index {
  std::vector<Key> all;
  std::map<std::string_view, const Key*> by_path;
  Index() {
    add_training_keys(all);
    add_zero_keys(all);
    add_run_keys(all);
    insert_unsupported_keys(all);
    for (Key& key : all) {
      for (const auto block : kAutomatic)
        if (key.path.starts_with(block) && key.auto_rule.empty()) key.auto_rule = kDefault;
      by_path.emplace(key.path, &key);
    }
  }
};

const Index& index() {
  static const Index kIndex;
  return kIndex;
}

bool below(std::string_view path, std::string_view block) {
  return block.empty() || (path.size() > block.size() && path.starts_with(block) && path[block.size()] == '.');
}

}  // namespace

void add_key(std::vector<Key>& keys, std::string path, const Field<Settings>& field, std::string_view help,
             const Rules& rules) {
  static const Settings kDefaults;
  Key key{rules};
  key.path = std::move(path);
  key.type = field.type;
  key.choices = field.choices;
  key.help = help;
  if (field.empty.empty() && !key.empty) key.empty = kNull;
  key.read = field.read;
  key.json = [write = field.json, none = field.empty, empty = key.empty](const Settings& settings) {
    const std::string text = write(settings);
    return empty && text == none ? std::string(*empty) : text;
  };
  key.default_json = key.json(kDefaults);
  keys.push_back(std::move(key));
}

std::span<const Key> keys() { return index().all; }
std::span<const OldName> old_names() { return kOldNames; }

const Key* find_key(std::string_view path) {
  const auto found = index().by_path.find(path);
  return found == index().by_path.end() ? nullptr : found->second;
}

const Key& key_at(std::string_view path) {
  const Key* key = find_key(path);
  ZERO_CHECK(key != nullptr, "no key ", path);
  return *key;
}

bool is_block(std::string_view path) {
  return std::any_of(keys().begin(), keys().end(),
                     [&](const Key& key) { return below(key.path, path) && !path.empty(); });
}

std::vector<std::string> names_below(std::string_view block) {
  std::vector<std::string> names;
  const auto add = [&](std::string_view path) {
    if (!below(path, block)) return;
    path.remove_prefix(block.empty() ? 0 : block.size() + 1);
    std::string name(path.substr(0, path.find('.')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  };
  for (const Key& key : keys()) add(key.path);
  for (const OldName& old : old_names()) add(old.old_path);
  return names;
}

std::vector<std::string> paths_named(std::string_view name) {
  std::vector<std::string> paths;
  for (const Key& key : keys())
    if (key.path.substr(key.path.rfind('.') + 1) == name) paths.emplace_back(key.path);
  return paths;
}

std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) out.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

}  // namespace zero::config
