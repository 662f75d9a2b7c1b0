// Parses and writes the text files of a checkpoint: manifest.json, SUMS and latest. Parsing is strict: no unknown
// fields, every number in range, every element of every tensor covered exactly once. No file access; no torch.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <zero/errors.h>

namespace zero::formats {

inline constexpr std::uint64_t kMostManifestBytes = std::uint64_t{256} << 20;
// The most that a user state may take of a manifest, so that the rest has its place.
inline constexpr std::uint64_t kMostUserStateBytes = std::uint64_t{224} << 20;
inline constexpr std::int64_t kMostPartBytes = std::int64_t{64} << 20;
// Manifests of format 1 required readers of version 1 to 3, those of format 2 require 4, or 5 if good = -1, or if the
// checkpoint has weights only or exported weights: an older reader would look for states that are not there.
inline constexpr std::int64_t kReaderVersion = 5;
// The largest count of steps, samples or saves, so that arithmetic with counts does not overflow.
inline constexpr std::int64_t kMostCount = std::int64_t{1} << 53;
inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kSumsName = "SUMS";
inline constexpr const char* kLatestName = "latest";
inline constexpr const char* kExportedIndexName = "model.safetensors.index.json";
// The field "content" of the manifest.
inline constexpr const char* kTrainingContent = "training";
inline constexpr const char* kWeightsContent = "weights";
inline constexpr const char* kLockName = ".lock";
inline constexpr const char* kOwnerName = ".lock-owner";  // in place of the lock, where a file system has none

// [A-Za-z0-9][A-Za-z0-9._-]{0,127} and not "latest": never a path, a hidden file, or a reserved name.
bool valid_tag(std::string_view tag);
// [A-Za-z0-9_][A-Za-z0-9._-]{0,254} without "..".
bool valid_file_name(std::string_view name);
std::string rank_file_name(int rank);    // "rank-00003.safetensors"
std::string frozen_file_name(int rank);  // "frozen-00003.safetensors": frozen parameters
// Weights for other libraries among the files of a checkpoint (exported_files.h): "model.safetensors",
// "model-00001-of-00002.safetensors", "model.safetensors.index.json". No tensor of the manifest lies in them.
bool is_exported_file(std::string_view name);

// A rectangular range of a tensor: by dimension, the first index and the number of indices.
struct Box {
  std::vector<std::int64_t> start, size;
  bool operator==(const Box&) const = default;
};

// A range of one tensor's elements, one-dimensional in its file, at most kMostPartBytes. Elements are numbered in
// row-major order; those of a tensor with slices slice by slice, and in a slice box by box. In its file the range has
// the key "<kind>/<name>@<start>".
// Small, because every rank holds all parts while it loads: a large run has hundreds of thousands.
struct Part {
  std::uint32_t file = 0;  // its place in Manifest::files
  std::int32_t numel = 0;
  std::uint64_t offset = 0;  // of its first byte in the file. Format 1: unknown, the file's header has it
  std::int64_t start = 0;
};

struct Tensor {
  std::string kind, name;  // "master", "opt.exp_avg", "param", "buffer"; the tensor's name in the model
  std::string dtype;       // the format's name: "F32"
  std::vector<std::int64_t> shape;
  bool requires_grad = false;
  std::vector<Part> parts;                    // by start
  std::vector<std::vector<Box>> slices = {};  // held by each tensor-parallel rank; empty: not cut
  std::vector<std::string> hashes = {};       // of the parts: format 1. Format 2 has those of blocks (blocks.h): none
};
// Product of the sizes; -1 if it overflows.
std::int64_t numel_of(const std::vector<std::int64_t>& shape);
// "<kind>/<name>@<start>"
std::string key_of(const std::string& kind, const std::string& name, std::int64_t start);

struct Manifest {
  int format = 2;
  // Masters, frozen parameters and buffers: no optimizer states, no random numbers. No run can resume from it.
  bool weights_only = false;
  std::string libzero_version, libtorch_version;
  std::string tag, id, created;  // id: 32 hex digits of this save; created: UTC, ISO 8601
  std::int64_t seq = 0;          // counts commits in a root directory, from 1
  std::int64_t global_steps = 0, applied_steps = 0, skipped_steps = 0, global_samples = 0;
  // Samples of a step of all ranks, samples of a forward of one rank, forwards of a step. Format 1: 0, unknown.
  std::int64_t global_batch = 0, micro_batch = 0, accumulation = 0;
  std::string optimizer;           // its type
  std::vector<std::string> slots;  // names of its per-element states
  double loss_scale = 1;
  std::int64_t hysteresis = 1, good = 0, floor = 0;  // good: -1: DeepSpeed's state after an overflow
  std::int64_t world = 1, stage = 0;
  std::int64_t sequence = 1, tensor = 1;  // degrees of parallelism; other than 1 requires reader version 3
  std::string parameter_dtype, gradient_dtype, wire_dtype;  // the recipe
  std::string transport, cpu_capability;
  std::int64_t torch_threads = 1;
  std::map<std::string, std::string> config;  // every effective option
  std::string config_hash;
  std::string user_state;
  // State set by the program besides the configuration. A manifest with any of it requires reader version 2.
  std::vector<double> set_rates;                     // by parameter group, -1: not set; empty: none
  std::map<std::string, std::int64_t> missed_steps;  // number of updates that a parameter was frozen for, by name
  struct FileEntry {
    std::string name;
    std::int64_t bytes = 0;
    std::string hash;
  };
  std::vector<FileEntry> files;
  std::string blocks;  // the file with the hashes of the other files' blocks. Format 1: none
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> aliases;  // name of a tied parameter -> name it is stored under
  std::vector<std::vector<Tensor>> ranks;      // per-rank tensors: generators, own buffers
};

// Throws ConfigError, which names `where`, for a user state that no load would read.
void check_user_state(std::string_view text, const std::string& where);
// Of format 2.
std::string manifest_text(const Manifest& manifest);
// Serializes the tensors of a rank's file for the other ranks.
std::string tensors_text(const std::vector<Tensor>& tensors);
std::vector<Tensor> parse_tensors(std::string_view text, const std::string& path);
// Whether a manifest has all parts of its tensors, or those that one rank stores (kept_slot.h).
enum class Extent { Checkpoint, Rank };
// Throws IoError (kCheckpoint) with path, location and what was expected. A higher min_reader is reported with both
// versions. For many parts it takes at most as much memory as the text, which is released before coverage is proved.
Manifest parse_manifest(std::string text, const std::string& path, Extent extent = Extent::Checkpoint);
// Checks that parts are in order, complete unless they are of one rank, no larger than kMostPartBytes and in listed
// files, and that no byte of a file belongs to two of them. Called by parse_manifest, and by a save before it writes.
void prove_coverage(const Manifest& manifest, const std::string& path, Extent extent = Extent::Checkpoint);

// One line "<hash>  <name>" per file, for xxh128sum -c; manifest.json last.
std::string sums_text(const Manifest& manifest, const std::string& manifest_hash);
// By name.
std::map<std::string, std::string> parse_sums(std::string_view text, const std::string& path);

struct Latest {
  std::string tag;
  std::int64_t seq = 0;
};
std::string latest_text(const Latest& latest);
Latest parse_latest(std::string_view text, const std::string& path);

}  // namespace zero::formats
