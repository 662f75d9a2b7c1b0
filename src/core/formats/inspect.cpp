// Implements checkpoint_tools.h with the readers that a load uses.
#include <zero/checkpoint_tools.h>

#include <algorithm>

#include "base/check.h"
#include "formats/blocks.h"
#include "formats/exported_files.h"
#include "formats/prune.h"
#include "formats/range_reader.h"
#include "formats/root_folder.h"
#include "formats/safetensors.h"

namespace zero {
namespace {
using namespace formats;

std::int64_t bytes_of(const Manifest& manifest) {
  std::int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

CheckpointTensor describe(const Tensor& tensor, int rank) {
  return {tensor.kind,
          tensor.name,
          tensor.dtype,
          tensor.shape,
          numel_of(tensor.shape) * (bits_of(tensor.dtype) / 8),
          static_cast<std::int64_t>(tensor.parts.size()),
          tensor.requires_grad,
          rank};
}

// Checks every byte of every file, and what the files say about each other.
void require_undamaged(const Folder& folder, const Manifest& manifest) {
  BlockRows listed(folder, manifest);
  for (std::uint32_t i = 0; i < manifest.files.size(); ++i) {
    const auto& file = manifest.files[i];
    const auto rows = require_hash(folder, file);
    if (!is_exported_file(file.name)) require_same_header(folder, manifest, i);
    if (manifest.format == 1 || file.name == manifest.blocks) continue;
    if (listed.read(i, 0, rows.size() / kRowBytes) != rows)
      fail_damaged(folder.path_of(manifest.blocks), "has other hashes of the blocks of " + file.name + " than it has");
  }
  require_exported(folder, manifest);
}

}  // namespace

std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& dir) {
  return formats::list_checkpoints(system_files(), dir.string());
}

std::vector<CheckpointEntry> formats::list_checkpoints(FsOps& fs, const std::string& dir) {
  const auto root = Folder::open(fs, dir);
  std::string newest;
  try {
    newest = choose(fs, dir, "", Needs::Training).tag;
  } catch (const IoError&) {
    // There is no complete checkpoint; the entries below describe the faults.
  }
  std::vector<CheckpointEntry> entries;
  for (const auto& name : root.names()) {
    const auto info = root.info_of(name);
    if (!valid_tag(name) || !info || !info->directory) continue;
    CheckpointEntry entry;
    entry.tag = name;
    entry.latest = name == newest;
    try {
      const auto folder = root.folder(name);
      const auto manifest = read_manifest(folder, require_whole(folder));
      entry.seq = manifest.seq;
      entry.global_steps = manifest.global_steps;
      entry.bytes = bytes_of(manifest);
      entry.weights_only = manifest.weights_only;
    } catch (const IoError& e) {
      entry.fault = e.what();
    }
    entries.push_back(std::move(entry));
  }
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.seq > b.seq; });
  return entries;
}

CheckpointInfo inspect_checkpoint(const std::filesystem::path& dir, const std::string& tag, bool verify) {
  auto& fs = system_files();
  const auto choice = choose(fs, dir.string(), tag, Needs::TrainingIfAny);
  const auto folder = Folder::open(fs, dir.string()).folder(choice.tag);
  const auto m = read_manifest(folder, choice.manifest_hash);
  CheckpointInfo info;
  info.tag = choice.tag;
  info.created = m.created;
  info.optimizer = m.optimizer;
  info.recipe = m.parameter_dtype;
  info.seq = m.seq;
  info.global_steps = m.global_steps;
  info.applied_steps = m.applied_steps;
  info.skipped_steps = m.skipped_steps;
  info.world = m.world;
  info.stage = m.stage;
  info.loss_scale = base::join(m.loss_scale);
  info.libzero_version = m.libzero_version;
  info.libtorch_version = m.libtorch_version;
  info.config_hash = m.config_hash;
  info.user_state = m.user_state;
  info.bytes = bytes_of(m);
  info.weights_only = m.weights_only;
  if (verify) require_undamaged(folder, m);
  for (const auto& file : m.files) info.files.push_back({file.name, file.hash, file.bytes});
  for (const auto& tensor : m.tensors) info.tensors.push_back(describe(tensor, -1));
  for (std::size_t r = 0; r < m.ranks.size(); ++r)
    for (const auto& tensor : m.ranks[r]) info.tensors.push_back(describe(tensor, static_cast<int>(r)));
  info.manifest = folder.read_file(kManifestName, kMostManifestBytes);
  return info;
}

}  // namespace zero
