// Looking into checkpoints without an engine: what `zero checkpoint` is made of. Reads files only;
// nothing is changed, gathered or loaded into a model. Formats and rules: docs/checkpoints.md.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <zero/export.h>

namespace zero {

struct CheckpointTensor {
  std::string kind;  // "master", "opt.exp_avg", "param", "buffer", "rank"
  std::string name;
  std::string dtype;  // as safetensors writes it: "F32"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0, parts = 0;
  bool requires_grad = false;
  int rank = -1;  // of a tensor that one rank keeps for itself; -1: shared by all
};

struct CheckpointInfo {
  std::string tag, created, optimizer, recipe;  // recipe: dtype of the parameters, "BF16"
  std::int64_t seq = 0, global_steps = 0, applied_steps = 0, skipped_steps = 0, world = 0, stage = 0;
  std::string loss_scale, libzero_version, libtorch_version, config_hash, user_state;
  std::int64_t bytes = 0;  // of all files, the manifest and SUMS left out
  struct File {
    std::string name, hash;
    std::int64_t bytes = 0;
  };
  std::vector<File> files;
  std::vector<CheckpointTensor> tensors;
  std::string manifest;  // the JSON text itself
};

// A tag of a directory, and why it cannot be loaded, or "".
struct CheckpointEntry {
  std::string tag, fault;
  std::int64_t seq = -1, global_steps = -1, bytes = -1;  // -1: not known
  bool latest = false;                                   // the one a load without a tag takes
};
// Newest first; damaged ones last. Throws IoError (kCheckpoint) when there is no such directory.
ZERO_API std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& dir);

// DIR/TAG, or the newest whole one when tag is empty. Throws IoError (kCheckpoint) when it is
// missing or not whole. With `verify` the hash of every byte of every file is looked at too.
ZERO_API CheckpointInfo inspect_checkpoint(const std::filesystem::path& dir, const std::string& tag = "",
                                           bool verify = false);

}  // namespace zero
