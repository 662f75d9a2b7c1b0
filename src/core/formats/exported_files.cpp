// See exported_files.h.
#include "formats/exported_files.h"

#include <algorithm>
#include <map>

#include "base/check.h"
#include "base/name_pattern.h"
#include "formats/json.h"
#include "formats/safetensors.h"

namespace zero::formats {
namespace {

constexpr std::uint64_t kMostIndexBytes = std::uint64_t{256} << 20;

struct Expected {
  const Tensor* tensor;
  std::string dtype;
};

// The patterns of libzero.keep_fp32.
std::vector<std::string> kept_patterns(const Manifest& manifest, const std::string& path) {
  const auto found = manifest.config.find("libzero.keep_fp32");
  if (found == manifest.config.end()) return {};
  const auto json = parse_json(found->second, path, 2);
  std::vector<std::string> patterns;
  for (const auto& item : JsonView(json, path).items()) patterns.push_back(item.text());
  return patterns;
}

// What other libraries are given, by name: parameters in the dtype that forward read them in, buffers in their own;
// those that differ between ranks are rank 0's. Masters are F32 whatever forward read.
std::map<std::string, Expected> expected_of(const Manifest& manifest, const std::string& path) {
  const auto patterns = kept_patterns(manifest, path);
  std::map<std::string, std::vector<std::string>> aliases;  // by the name that is stored
  for (const auto& [alias, name] : manifest.aliases) aliases[name].push_back(alias);
  const auto kept = [&](const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const auto& pattern) { return base::pattern_names(pattern, name, aliases[name]); });
  };
  std::map<std::string, Expected> result;
  const auto add = [&](const std::vector<Tensor>& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.kind == "master")
        result[tensor.name] = {&tensor, kept(tensor.name) ? "F32" : manifest.parameter_dtype};
      else if (tensor.kind == "param" || tensor.kind == "buffer")
        result[tensor.name] = {&tensor, tensor.dtype};
  };
  add(manifest.tensors);
  if (!manifest.ranks.empty()) add(manifest.ranks[0]);
  return result;
}

// Whether the index names the file of every tensor, and nothing else.
void require_index(const Folder& folder, const std::map<std::string, std::string>& files) {
  const auto path = folder.path_of(kExportedIndexName);
  const auto json = parse_json(folder.read_file(kExportedIndexName, kMostIndexBytes), path, 8);
  std::map<std::string, std::string> listed;
  for (const auto& [name, file] : JsonView(json, path).at("weight_map").fields()) listed[name] = file.text();
  if (listed != files) fail_damaged(path, "does not say which file has which tensor as the files do");
}

}  // namespace

void require_exported(const Folder& folder, const Manifest& manifest) {
  bool any = false, index = false;
  auto rest = expected_of(manifest, folder.path_of(kManifestName));
  std::map<std::string, std::string> files;  // by name of the tensor
  for (const auto& entry : manifest.files) {
    if (!is_exported_file(entry.name)) continue;
    any = true;
    if (entry.name == kExportedIndexName) {
      index = true;
      continue;
    }
    const auto file = folder.open_file(entry.name, static_cast<std::uint64_t>(entry.bytes));
    for (const auto& tensor : read_header(file).tensors) {
      const auto found = rest.find(tensor.key);
      if (found == rest.end())
        fail_damaged(file.path(), "has the tensor " + tensor.key + ", which the manifest does not, or twice");
      if (tensor.dtype != found->second.dtype || tensor.shape != found->second.tensor->shape)
        fail_damaged(file.path(), "has " + tensor.key + " as " + tensor.dtype +
                                      " or in a shape that is not expected: " + found->second.dtype +
                                      " in the shape of the manifest");
      files[tensor.key] = entry.name;
      rest.erase(found);
    }
  }
  if (!any) return;
  if (!rest.empty())
    fail_damaged(folder.path(), "has exported weights without " + rest.begin()->first + ", which the manifest has");
  if (index) require_index(folder, files);
}

}  // namespace zero::formats
