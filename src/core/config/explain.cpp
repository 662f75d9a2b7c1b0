// All effective values and their sources, as text and JSON.
#include <algorithm>

#include <zero/config_tools.h>

#include "base/check.h"
#include "base/json_write.h"
#include "base/printable.h"
#include "config/batch.h"
#include "config/document.h"

namespace zero {
namespace {

struct Row {
  std::string path, value, source;
  bool quiet;  // an unchanged default
};

std::string batch_rule(const config::Settings& s, const std::string& path, int data) {
  const auto text = [](const std::optional<std::int64_t>& n) { return std::to_string(n.value_or(1)); };
  std::string ranks = std::to_string(data) + " " + config::ranks_name(s);
  if (data == 1) ranks.pop_back();
  if (path == "train_batch_size")
    return "rule: " + text(s.micro_batch_size) + " x " + text(s.accumulation_steps) + " x " + ranks;
  if (path == "train_micro_batch_size_per_gpu")
    return "rule: " + text(s.train_batch_size) + " / (" + text(s.accumulation_steps) + " x " + ranks + ")";
  return s.train_batch_size && s.micro_batch_size
             ? "rule: " + text(s.train_batch_size) + " / (" + text(s.micro_batch_size) + " x " + ranks + ")"
             : "rule: 1";
}

std::vector<Row> rows_of(const Options& options, int world) {
  const config::Document& document = options.document();
  std::optional<config::BatchSizes> batch;
  std::string batch_problem;
  try {
    batch = config::resolve_batch(options, world);
  } catch (const ConfigError&) {
    batch_problem = "cannot be resolved for " + std::to_string(world) + (world == 1 ? " rank" : " ranks");
  }
  std::vector<Row> rows;
  for (const config::Key& key : config::keys()) {
    const config::Entry* entry = document.find(key.path);
    // Refused keys and keys without effect are listed separately.
    if (key.effect == config::Effect::NoEffect || key.effect == config::Effect::Refused) continue;
    Row row{key.path, document.effective(key), {}, entry == nullptr};
    const bool is_batch = key.path == "train_batch_size" || key.path == "train_micro_batch_size_per_gpu" ||
                          key.path == "gradient_accumulation_steps";
    if (entry && !entry->automatic) {
      row.source = entry->source + (entry->overrides.empty() ? "" : " (overrides " + entry->overrides + ")");
      if (entry->source == entry->place.text() && entry->spelled != entry->key->path)
        row.source += " (as " + entry->spelled + ")";
    } else if (is_batch) {
      row.quiet = false;
      row.value = !batch ? "-"
                         : std::to_string(key.path == "train_batch_size"              ? batch->train
                                          : key.path == "gradient_accumulation_steps" ? batch->accumulation
                                                                                      : batch->micro);
      row.source =
          batch ? batch_rule(options.settings(), row.path, config::mesh_shape(options, world).data) : batch_problem;
    } else if (entry) {
      row.source = "auto: " + std::string(key.auto_rule);
    } else {
      row.source = "default";
      // Always shown, because they are the most frequent questions.
      if (key.path == "zero_optimization.stage" || key.path == "gradient_clipping" || key.path == "seed")
        row.quiet = false;
    }
    if (row.value.empty()) row.value = "-";
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string place_of(const ConfigFault& fault) {
  return fault.line == 0 ? "-" : fault.file + ":" + std::to_string(fault.line) + ":" + std::to_string(fault.column);
}

std::string section(const std::string& title, const std::vector<const ConfigFault*>& faults) {
  if (faults.empty()) return {};
  std::string out = title + " (" + std::to_string(faults.size()) + "):\n";
  for (const auto* fault : faults) {
    std::string text = fault->message;
    if (text.starts_with("no effect: ")) text.erase(0, 11);
    std::string path = fault->pointer.empty() ? "" : fault->pointer.substr(1);
    std::replace(path.begin(), path.end(), '/', '.');
    out += base::printable("  " + path + "  " + place_of(*fault) + "  " + text, base::Lines::Escape) + "\n";
  }
  return out;
}

std::vector<const ConfigFault*> with_id(const std::vector<ConfigFault>& faults, bool no_effect) {
  std::vector<const ConfigFault*> out;
  for (const auto& fault : faults)
    if ((fault.id == "no-effect") == no_effect) out.push_back(&fault);
  return out;
}

std::vector<const ConfigFault*> pointers(const std::vector<ConfigFault>& faults) {
  std::vector<const ConfigFault*> out;
  for (const auto& fault : faults) out.push_back(&fault);
  return out;
}

}  // namespace

std::string Options::explain(int world, bool all) const {
  auto rows = rows_of(*this, world);
  if (!all) std::erase_if(rows, [](const Row& row) { return row.quiet; });
  std::size_t path_width = 0, value_width = 0;
  for (const Row& row : rows) {
    path_width = std::max(path_width, row.path.size());
    value_width = std::max(value_width, std::min<std::size_t>(row.value.size(), 24));
  }
  std::string out;
  for (const Row& row : rows) {
    const auto pad = [](std::string text, std::size_t width) {
      return text + std::string(text.size() < width ? width - text.size() : 0, ' ');
    };
    out += pad(row.path, path_width) + "  " + pad(row.value, value_width) + "  " + row.source + "\n";
  }
  out += section("no effect", with_id(document_->notices, true));
  out += section("notes", with_id(document_->notices, false));
  out += section("not available in this version", pointers(document_->not_built));
  if (const auto why = cannot_start(*this, {}); !why.empty())
    out += "cannot start: " + why + "\n";
  else if (const auto here = cannot_start(*this, world); !here.empty())
    out += "cannot start with " + std::to_string(world) + (world == 1 ? " rank: " : " ranks: ") + here + "\n";
  return base::printable(out);
}

std::string cannot_start(const Options& options, std::optional<int> world) {
  const config::Document& document = options.document();
  if (!world && (document.is_set("train_batch_size") || document.is_set("train_micro_batch_size_per_gpu"))) return {};
  try {
    (void)config::resolve_batch(options, world.value_or(1));
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    return text.starts_with("[Options] ") ? text.substr(10) : text;
  }
  return {};
}

std::string explain_json(const Options& options, int world, bool all) {
  using base::json_quote;
  std::string values, notes, missing;
  for (const Row& row : rows_of(options, world)) {
    if (!all && row.quiet) continue;
    const bool none = row.value == "-";
    values += (values.empty() ? "\n  " : ",\n  ") + json_quote(row.path) +
              ": {\"value\": " + (none ? "null" : row.value) + ", \"source\": " + json_quote(row.source) + "}";
  }
  for (const auto& fault : options.document().notices)
    notes += (notes.empty() ? "\n  " : ",\n  ") + ("{\"pointer\": " + json_quote(fault.pointer)) +
             ", \"place\": " + json_quote(place_of(fault)) + ", \"id\": " + json_quote(fault.id) +
             ", \"message\": " + json_quote(fault.message) + "}";
  for (const auto& fault : options.document().not_built)
    missing += (missing.empty() ? "\n  " : ",\n  ") + ("{\"pointer\": " + json_quote(fault.pointer)) +
               ", \"place\": " + json_quote(place_of(fault)) + ", \"message\": " + json_quote(fault.message) + "}";
  const std::string why = cannot_start(options, world);
  return "{\"schema\": \"zero.config.explain/1\", \"world\": " + std::to_string(world) +
         ", \"cannot_start\": " + (why.empty() ? "null" : json_quote(why)) + ", \"values\": {" + values +
         "},\n \"notices\": [" + notes + "],\n \"not_available\": [" + missing + "]}\n";
}

}  // namespace zero
