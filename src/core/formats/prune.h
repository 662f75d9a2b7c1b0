// Removes old checkpoints, with the file system as an argument (zero/checkpoint_tools.h).
#pragma once
#include <string>
#include <vector>

#include <zero/checkpoint_tools.h>

#include "formats/files.h"

namespace zero::formats {

// As zero::list_checkpoints().
std::vector<CheckpointEntry> list_checkpoints(FsOps& fs, const std::string& root);
// As zero::prune_checkpoints().
std::vector<CheckpointEntry> prune(FsOps& fs, const std::string& root, const PruneOptions& options);

}  // namespace zero::formats
