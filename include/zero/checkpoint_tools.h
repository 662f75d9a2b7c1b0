// Checkpoints without an engine, as `zero checkpoint` handles them. All functions are local; only prune_checkpoints()
// removes files. The formats are described in docs/checkpoints.md.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <zero/export.h>
#include <zero/weights.h>

namespace zero {

struct CheckpointTensor {
  std::string kind;  // "master", "opt.exp_avg", "param", "buffer", "rank"
  std::string name;
  std::string dtype;  // the name that safetensors uses: "F32"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0, parts = 0;
  bool requires_grad = false;
  int rank = -1;  // the rank that saved a per-rank tensor; -1: a tensor of the whole model
};

struct CheckpointInfo {
  std::string tag, created, optimizer, recipe;  // recipe: dtype of the parameters ("BF16")
  std::int64_t seq = 0, global_steps = 0, applied_steps = 0, skipped_steps = 0, world = 0, stage = 0;
  std::string loss_scale, libzero_version, libtorch_version, config_hash, user_state;
  std::int64_t bytes = 0;     // of all files except the manifest and SUMS
  bool weights_only = false;  // no run can be resumed from it
  struct File {
    std::string name, hash;
    std::int64_t bytes = 0;
  };
  std::vector<File> files;
  std::vector<CheckpointTensor> tensors;
  std::string manifest;  // the manifest's JSON text
};

// One tag of a directory. `fault`: why it cannot be loaded, or "".
struct CheckpointEntry {
  std::string tag, fault;
  std::int64_t seq = -1, global_steps = -1, bytes = -1;  // -1: unknown
  bool latest = false;                                   // the checkpoint that a load without a tag takes
  bool weights_only = false;                             // no run can be resumed from it
};
// Newest first, damaged checkpoints last. Throws IoError (kCheckpoint) if the directory does not exist.
ZERO_API std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& dir);

struct PruneOptions {
  std::int64_t keep = 1;          // newest complete checkpoints that a run can be resumed from
  std::int64_t keep_every = 0;    // also those whose global_steps is a multiple of it; 0: none
  std::int64_t keep_weights = 0;  // newest complete checkpoints of weights only; 0: all of them
  std::vector<std::string> also;  // further tags
  bool dry_run = false;           // removes nothing
};
// Removes the other complete checkpoints of a directory and returns them, newest first. Damaged ones stay, and so does
// the one that a load without a tag takes. Throws ConfigError if a save is running there, IoError if one cannot be
// removed; it is gone as a checkpoint then, and the next save removes the rest.
ZERO_API std::vector<CheckpointEntry> prune_checkpoints(const std::filesystem::path& dir, const PruneOptions& options);

// Finds out before the first save whether checkpoints can be written to a directory, which is made if it is missing.
// Logs what its file system lacks: locks, syncs of directories. Throws IoError where a save would. It is no fault that
// a save is running there.
ZERO_API void probe_checkpoints(const std::filesystem::path& dir);

// Describes DIR/TAG, or the newest complete checkpoint if tag is empty: of weights only if there is no other. verify:
// also checks the hash of every file.
// Throws IoError (kCheckpoint) if the checkpoint is missing or incomplete.
ZERO_API CheckpointInfo inspect_checkpoint(const std::filesystem::path& dir, const std::string& tag = "",
                                           bool verify = false);

// 32 hex digits that depend on the values and names of states, frozen parameters and shared buffers alone: equal for
// checkpoints of any number of ranks, parallel degrees and stage. Reads every part. Throws as inspect_checkpoint().
ZERO_API std::string checkpoint_digest(const std::filesystem::path& dir, const std::string& tag = "");

// Writes the weights of a checkpoint, or of other files, for other libraries: `source` is a directory of
// checkpoints (`tag`, or the newest complete one), one checkpoint, a safetensors file, its index or a directory of
// them. Masters of trained parameters, values of frozen ones, buffers. `out` appears when it is complete and on disk.
// Holds 32 MiB of a tensor at most. Throws ConfigError if `out` exists or names do not fit (all of them in one error),
// IoError for damage (kCheckpoint) and failed writes, InternalError (kNumerical) for values that fp16 cannot hold.
ZERO_API ExportReport export_checkpoint(const std::filesystem::path& source, const std::filesystem::path& out,
                                        const ExportOptions& options = {}, const std::string& tag = "");

// What given files hold, of any kind that libzero reads: its own checkpoints, safetensors, files of torch.save,
// checkpoints of DeepSpeed and torch.distributed. Nothing in them is executed.
struct SourceInfo {
  std::string format;                                        // "safetensors", "torch", "deepspeed", "dcp", "libzero"
  std::vector<CheckpointTensor> tensors;                     // kind "weight": of a file that does not say more
  std::vector<std::pair<std::string, std::string>> aliases;  // name of a tied tensor, name stored
  std::int64_t global_steps = -1, applied_steps = -1, bytes = 0;  // -1: unknown; bytes of all tensors
  std::string optimizer;
  std::vector<std::string> remarks;  // one line each: everything else, as text
};
// Which of them, and how to read it.
struct SourceChoice {
  std::string tag;          // of a directory of checkpoints; empty: the newest
  std::string key;          // of a nested dictionary in a file of torch.save, such as "model"
  std::string prefix;       // removed from every name; names without it are an error
  bool ignore_crc = false;  // of files that were written without them
};
// Reads headers and tables. Throws IoError (kCheckpoint) for damage and files of other kinds, ConfigError for a key or
// prefix that is not there.
ZERO_API SourceInfo inspect_source(const std::filesystem::path& source, const SourceChoice& choice = {});

struct CheckpointImport {
  SourceChoice source;
  std::string names;                         // as in ImportOptions
  std::vector<std::string> buffers, frozen;  // parameters that are none, or not trained, by pattern (* and {i})
  std::string optimizer;                     // of the run that will load it; "": as in the files, else AdamW
  // Of tensors that `names` ties and that are stored with different values, the names (in the checkpoint) of those that
  // all of them take. Without it they stay several tensors.
  std::vector<std::string> untie = {};
};
struct CheckpointImported {
  std::string format, optimizer;
  std::int64_t masters = 0, states = 0, frozen = 0, buffers = 0;  // tensors
  std::int64_t global_steps = 0, bytes = 0;
  std::vector<std::string> remarks;  // one line each: what was left out, converted or assumed
};
// Makes the checkpoint DIR/TAG from files of other libraries; any number of ranks then loads it. Parameters become fp32
// masters, with the states of the optimizer that the files have; states that they do not have are zero. Of files that
// do not say what they train, floating-point tensors are parameters and others buffers. Committed by one rename, as a
// save is. Holds 4 MiB of a tensor at a time. Throws ConfigError if the tag exists or a name or dtype does not fit,
// IoError as inspect_source() and for failed writes, InternalError (kNumerical) for Inf and NaN.
ZERO_API CheckpointImported import_checkpoint(const std::filesystem::path& source, const std::filesystem::path& dir,
                                              const std::string& tag, const CheckpointImport& options = {});

// A tensor in which two checkpoints differ.
struct TensorDifference {
  std::string name, what;   // "only in A", "shape [2] against [3]", "dtype F32 against BF16", "values"
  std::int64_t count = 0;   // elements that differ
  std::int64_t first = -1;  // the first of them, in row-major order; -1: none, or not comparable
  std::string a, b;         // its values
};
struct CheckpointDifference {
  std::vector<TensorDifference> tensors;  // by name
  std::int64_t compared = 0, bytes = 0;   // tensors in both; bytes read of both
};
// Compares two sources, as export_checkpoint() takes them, by name: values bit by bit; those of different floating
// types after widening, which is exact. Reads 4 MiB of a tensor at a time.
ZERO_API CheckpointDifference diff_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace zero
