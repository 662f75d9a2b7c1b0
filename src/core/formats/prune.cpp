// See prune.h.
#include "formats/prune.h"

#include <algorithm>

#include "base/check.h"
#include "formats/hash.h"
#include "formats/root_folder.h"

namespace zero {

namespace formats {

std::vector<CheckpointEntry> prune(FsOps& fs, const std::string& root_path, const PruneOptions& options) {
  constexpr const char* kWhere = "[prune_checkpoints] ";
  if (options.keep < 1)
    throw ConfigError(base::join(kWhere, "keep: got ", options.keep, ", expected 1 or more checkpoints"));
  if (options.keep_every < 0)
    throw ConfigError(base::join(kWhere, "keep_every: got ", options.keep_every, ", expected 0 or more steps"));
  if (options.keep_weights < 0)
    throw ConfigError(
        base::join(kWhere, "keep_weights: got ", options.keep_weights, ", expected 0 or more checkpoints"));
  const auto root = Folder::open(fs, root_path);
  const RootLock lock(root, kWhere);  // no save and no other prune meanwhile
  std::vector<CheckpointEntry> removed;
  std::int64_t resumable = 0, weights = 0;
  for (auto& entry : list_checkpoints(fs, root_path)) {  // newest first
    if (!entry.fault.empty()) continue;
    // Neither kind counts for the other: saves of weights must not push out what a run can resume from.
    const bool superfluous =
        entry.weights_only ? options.keep_weights > 0 && ++weights > options.keep_weights : ++resumable > options.keep;
    const bool named = std::find(options.also.begin(), options.also.end(), entry.tag) != options.also.end();
    const bool regular = options.keep_every > 0 && entry.global_steps % options.keep_every == 0;
    if (superfluous && !entry.latest && !named && !regular) removed.push_back(std::move(entry));
  }
  if (options.dry_run) return removed;
  // Oldest first; a folder that is being deleted has no tag, and what a crash leaves of it the next save removes.
  for (auto entry = removed.rbegin(); entry != removed.rend(); ++entry) {
    const auto name = ".del-" + random_id();
    root.rename(entry->tag, name);
    root.sync();
    if (const auto fault = root.remove_all(name); !fault.empty()) throw IoError(kWhere + fault);
  }
  return removed;
}

}  // namespace formats

std::vector<CheckpointEntry> prune_checkpoints(const std::filesystem::path& dir, const PruneOptions& options) {
  return formats::prune(formats::system_files(), dir.string(), options);
}

void probe_checkpoints(const std::filesystem::path& dir) { formats::probe_root(formats::system_files(), dir.string()); }

}  // namespace zero
