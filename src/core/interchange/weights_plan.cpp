// See weights_plan.h.
#include "interchange/weights_plan.h"

#include <algorithm>

#include <zero/errors.h>

#include "base/check.h"
#include "formats/manifest.h"
#include "interchange/element_types.h"
#include "interchange/model_config.h"

namespace zero::interchange {
namespace {

constexpr std::size_t kMostOverflows = 20;

bool is_exported(const SourceTensor& tensor, const std::vector<std::string>& only) {
  return !tensor.kind.starts_with("opt.") &&
         (only.empty() || std::any_of(only.begin(), only.end(),
                                      [&](const auto& pattern) { return name_matches(pattern, tensor.name); }));
}

// Files that the caller gives go next to those of the layout.
void add_extra_files(const std::vector<std::pair<std::string, std::string>>& files, WeightsLayout& layout) {
  for (const auto& [name, text] : files) {
    const bool taken = std::any_of(layout.files.begin(), layout.files.end(),
                                   [&name = name](const OutFile& file) { return file.name == name; });
    if (!formats::valid_file_name(name) || taken)
      throw ConfigError("[export] extra_files: got the file name \"" + name +
                        "\", expected a plain name that no other file of the export has");
    layout.files.push_back(text_file(name, text));
  }
}

}  // namespace

std::string exported_dtype(const SourceTensor& tensor, const ExportOptions& options) {
  // Buffers are what modules made them.
  if (options.dtype.empty() || tensor.kind == "buffer" || !is_floating(tensor.dtype)) return tensor.dtype;
  return dtype_of_word(options.dtype);
}

WeightsPlan plan_weights(const std::vector<SourceTensor>& tensors, const std::map<std::string, std::string>& aliases,
                         const NameMap* map, const ExportOptions& options, const std::string& label) {
  if (!options.dtype.empty() && dtype_of_word(options.dtype).empty())
    throw ConfigError("[export] dtype: got \"" + options.dtype + "\", expected fp32, bf16 or fp16");
  if (options.format != "hf" && options.format != "pt")
    throw ConfigError("[export] format: got \"" + options.format + "\", expected hf, pt or universal");
  std::vector<SourceTensor> weights;
  std::vector<std::size_t> places;  // in `tensors`
  for (std::size_t t = 0; t < tensors.size(); ++t)
    if (is_exported(tensors[t], options.only)) {
      weights.push_back(tensors[t]);
      places.push_back(t);
    }
  WeightsPlan plan;
  plan.mapping =
      map != nullptr ? map_names(*map, Direction::ToTheirs, weights, aliases, label) : same_names(weights, aliases);
  std::map<std::string, std::size_t> by_name;
  for (std::size_t i = 0; i < plan.mapping.tensors.size(); ++i) {
    auto& tensor = plan.mapping.tensors[i];
    for (auto& segment : tensor.segments) segment.source = places[segment.source];
    plan.tensors.push_back({options.prefix + tensor.name,
                            exported_dtype({tensor.kind, tensor.name, tensor.dtype, tensor.shape}, options),
                            tensor.shape});
    plan.from.push_back(i);
    by_name[tensor.name] = i;
  }
  const auto written = plan.tensors;  // without copies of ties
  std::map<std::string, std::string> stored_once;
  for (const auto& [alias, owner] : plan.mapping.aliases) {
    const auto found = by_name.find(owner);
    if (found == by_name.end()) continue;
    if (options.duplicate_tied) {
      auto copy = plan.tensors[found->second];
      copy.name = options.prefix + alias;
      plan.tensors.push_back(std::move(copy));
      plan.from.push_back(found->second);
    } else {
      stored_once[options.prefix + alias] = options.prefix + owner;
    }
  }
  if (options.format == "pt" && !options.extra_files.empty())
    throw ConfigError("[export] extra_files: got files for the form pt, which is one file, expected the form hf");
  if (options.format == "pt") {
    std::vector<std::uint64_t> bytes;
    for (const auto& tensor : plan.tensors) bytes.push_back(tensor.bytes());
    plan.torch.push_back(torch_layout(state_dict_pickle(plan.tensors, stored_once), bytes));
    plan.one_file = true;
    plan.layout.files = {plan.torch[0].file("weights.pt")};
    for (std::size_t t = 0; t < plan.tensors.size(); ++t) plan.layout.places.push_back({0, plan.torch[0].offset(t)});
    return plan;
  }
  plan.layout = safetensors_layout(plan.tensors, stored_once, options.shard_bytes, options.stem);
  add_extra_files(options.extra_files, plan.layout);
  const bool given = std::any_of(options.extra_files.begin(), options.extra_files.end(),
                                 [](const auto& file) { return file.first == "config.json"; });
  if (map == nullptr || given || !options.only.empty()) return plan;
  auto config = model_config(map->name(), written, plan.mapping.aliases, options);
  if (!config.text.empty()) plan.layout.files.push_back(text_file("config.json", config.text));
  if (!config.remark.empty()) plan.remarks.push_back(std::move(config.remark));
  return plan;
}

std::vector<std::pair<std::uint64_t, std::string>> closing_bytes(const WeightsPlan& plan, std::size_t file,
                                                                 const std::vector<std::uint32_t>& crcs) {
  std::vector<std::uint32_t> own;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t)
    if (plan.layout.places[t].file == file) own.push_back(crcs[t]);
  return torch_headers(plan.torch[file], own);
}

void check_overflows(const std::map<std::string, std::int64_t>& overflows, const ExportOptions& options) {
  if (overflows.empty() || options.allow_overflow) return;
  std::string text = base::join("[export] fp16 cannot hold values of ", overflows.size(),
                                overflows.size() == 1 ? " tensor:" : " tensors:");
  std::size_t shown = 0;
  for (const auto& [name, count] : overflows)
    if (shown++ < kMostOverflows) text += base::join("\n  ", name, ": ", count, count == 1 ? " value" : " values");
  if (overflows.size() > kMostOverflows) text += base::join("\n  and ", overflows.size() - kMostOverflows, " more");
  throw InternalError(text + "\nHint: --dtype bf16, or --allow-overflow, which makes them infinite.",
                      ExitCode::kNumerical);
}

}  // namespace zero::interchange
