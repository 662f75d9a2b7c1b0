// The texts of a checkpoint: manifest.json, SUMS and latest, as values and back. Reading is strict:
// no unknown field, every number in range, every element of every tensor covered exactly once.
// Which directory they lie in and when they are written is not known here; nor is torch.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <zero/errors.h>

namespace zero::formats {

inline constexpr std::uint64_t kMostManifestBytes = std::uint64_t{256} << 20;
inline constexpr std::int64_t kMostPartBytes = std::int64_t{64} << 20;
inline constexpr std::int64_t kReaderVersion = 2;
// Of steps, samples and saves: what is added to or multiplied with such a count stays a number.
inline constexpr std::int64_t kMostCount = std::int64_t{1} << 53;
inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kSumsName = "SUMS";
inline constexpr const char* kLatestName = "latest";
inline constexpr const char* kLockName = ".lock";

// [A-Za-z0-9][A-Za-z0-9._-]{0,127} and not "latest": never a path, hidden, or one of our own names.
bool valid_tag(std::string_view tag);
// [A-Za-z0-9_][A-Za-z0-9._-]{0,254} without "..".
bool valid_file_name(std::string_view name);
std::string rank_file_name(int rank);  // "rank-00003.safetensors"

// A run of one tensor's elements, one-dimensional in its file, at most kMostPartBytes.
struct Part {
  std::string file, key;
  std::int64_t start = 0, numel = 0;
  std::string hash;
};

struct Tensor {
  std::string kind, name;  // "master", "opt.exp_avg", "param", "buffer"; the tensor's name in the model
  std::string dtype;       // the format's name: "F32"
  std::vector<std::int64_t> shape;
  bool requires_grad = false;
  std::vector<Part> parts;  // by start
};
// Product of the sizes; -1 when it overflows.
std::int64_t numel_of(const std::vector<std::int64_t>& shape);
// "<kind>/<name>@<start>"
std::string key_of(const std::string& kind, const std::string& name, std::int64_t start);

struct Manifest {
  std::string libzero_version, libtorch_version;
  std::string tag, id, created;  // id: 32 hex digits of this save; created: UTC, ISO 8601
  std::int64_t seq = 0;          // counts commits in a root directory, from 1
  std::int64_t global_steps = 0, applied_steps = 0, skipped_steps = 0, global_samples = 0;
  std::string optimizer;           // its type
  std::vector<std::string> slots;  // names of its per-element values
  double loss_scale = 1;
  std::int64_t hysteresis = 1, good = 0, floor = 0;
  std::int64_t world = 1, stage = 0;
  std::string parameter_dtype, gradient_dtype, wire_dtype;  // the recipe
  std::string transport, cpu_capability;
  std::int64_t torch_threads = 1;
  std::map<std::string, std::string> config;  // every effective option
  std::string config_hash;
  std::string user_state;
  // What the program has set beside the configuration; a manifest with any of it needs a reader of version 2.
  std::vector<double> set_rates;                     // by parameter group, -1: not set; empty: none is
  std::map<std::string, std::int64_t> missed_steps;  // updates that a parameter was frozen for, by name
  struct FileEntry {
    std::string name;
    std::int64_t bytes = 0;
    std::string hash;
  };
  std::vector<FileEntry> files;
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> aliases;  // tied name -> owner's
  std::vector<std::vector<Tensor>> ranks;      // each rank's private tensors: generators, own buffers
};

std::string manifest_text(const Manifest& manifest);
// What ranks send each other about the tensors in their files.
std::string tensors_text(const std::vector<Tensor>& tensors);
std::vector<Tensor> parse_tensors(std::string_view text, const std::string& path);
// Throws IoError (kCheckpoint) naming path, place and what was expected; for a higher min_reader
// it names both versions.
Manifest parse_manifest(std::string_view text, const std::string& path);
// Parts in order without hole or overlap, no larger than kMostPartBytes, in files that are listed,
// no key twice. Part of parse_manifest; a save proves it before it writes.
void prove_coverage(const Manifest& manifest, const std::string& path);

// "<hash>  <name>" a line, as xxh128sum -c takes it; manifest.json last.
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
