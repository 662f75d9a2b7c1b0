// See weights_layout.h.
#include "interchange/weights_layout.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include <zero/errors.h>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "interchange/element_types.h"

namespace zero::interchange {
namespace {

constexpr std::size_t kHeaderAlignment = 4096;

std::string file_name(const std::string& stem, std::size_t index, std::size_t count) {
  if (count == 1) return stem + ".safetensors";
  char text[64];
  std::snprintf(text, sizeof text, "-%05zu-of-%05zu.safetensors", index + 1, count);
  return stem + text;
}

}  // namespace

std::uint64_t OutTensor::bytes() const {
  const auto numel = formats::numel_of(shape);
  ZERO_CHECK(numel >= 0, "the shape of ", name);
  return static_cast<std::uint64_t>(numel) * static_cast<std::uint64_t>(width_of(dtype));
}

OutFile text_file(const std::string& name, const std::string& text) { return {name, text.size(), {{0, text}}}; }

WeightsLayout safetensors_layout(const std::vector<OutTensor>& tensors,
                                 const std::map<std::string, std::string>& aliases, std::int64_t shard_bytes,
                                 const std::string& stem) {
  if (shard_bytes < 1) throw ConfigError(base::join("[export] got ", shard_bytes, " bytes a file, expected 1 or more"));
  if (tensors.empty()) throw ConfigError("[export] got no tensors, expected one or more");
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return tensors[a].name < tensors[b].name; });
  std::vector<std::vector<std::size_t>> shards;
  std::uint64_t total = 0, filled = 0;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto& tensor = tensors[order[i]];
    if (!formats::valid_key(tensor.name) || tensor.name == "__metadata__")
      throw ConfigError("[export] the name \"" + tensor.name + "\" cannot be stored. Hint: rename the module.");
    if (i > 0 && tensors[order[i - 1]].name == tensor.name)
      throw ConfigError("[export] got two tensors with the name " + tensor.name);
    if (shards.empty() || (filled > 0 && filled + tensor.bytes() > static_cast<std::uint64_t>(shard_bytes))) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(order[i]);
    filled += tensor.bytes();
    total += tensor.bytes();
    elements += formats::numel_of(tensor.shape);
  }
  WeightsLayout layout;
  layout.places.resize(tensors.size());
  nlohmann::json map = nlohmann::json::object();
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const auto name = file_name(stem, s, shards.size());
    // By falling width, so that all tensors are aligned.
    std::stable_sort(shards[s].begin(), shards[s].end(), [&](std::size_t a, std::size_t b) {
      return width_of(tensors[a].dtype) > width_of(tensors[b].dtype);
    });
    formats::Header header;
    header.metadata = aliases;
    header.metadata["format"] = "pt";
    std::uint64_t end = 0;
    for (const auto t : shards[s]) {
      const auto& tensor = tensors[t];
      header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + tensor.bytes()});
      layout.places[t] = {s, end};
      end += tensor.bytes();
      map[tensor.name] = name;
    }
    auto head = formats::header_bytes(header, kHeaderAlignment);
    for (const auto t : shards[s]) layout.places[t].offset += head.size();
    layout.files.push_back({name, head.size() + end, {{0, std::move(head)}}});
  }
  if (shards.size() > 1)
    layout.files.push_back(text_file(
        stem + ".safetensors.index.json",
        nlohmann::json{{"metadata", {{"total_size", total}, {"total_parameters", elements}}}, {"weight_map", map}}.dump(
            2) +
            "\n"));
  return layout;
}

}  // namespace zero::interchange
