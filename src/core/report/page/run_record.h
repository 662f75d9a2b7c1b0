// What a run of `zero train` leaves in its folder for `zero report`: run.json (what ran, where, and one step of it in
// detail) and log.jsonl (a line a step). Plain data with its two spellings; drawing is html_page.h's.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zero::report {

// A line of log.jsonl. What is not there, or null, is not set.
struct StepPoint {
  std::int64_t step = 0;
  std::optional<double> loss, grad_norm, lr, loss_scale, step_ms, tokens_per_s;
  std::optional<double> memory_bytes, bytes_sent;
};

using Bytes = std::vector<std::pair<std::string, std::uint64_t>>;  // by purpose ("gradients") or class

// One rank's bytes at the end of a phase of the recorded step, by tier ("device", "host", "file").
struct TierMemory {
  std::string tier;
  Bytes by_purpose;        // zeros left out
  std::uint64_t peak = 0;  // highest sum since the step before began; of a plan, within a step
};
struct PhaseMemory {
  std::string phase;  // "before forward", "after forward", "after backward", "after step"
  std::vector<TierMemory> tiers;
};

// Device bytes by purpose from that moment on, in milliseconds since the recorded step began.
struct MemorySample {
  double ms = 0;
  std::vector<std::uint64_t> bytes;  // as RunRecord::purposes
};

// Something a rank did in the recorded step (docs/trace.md tells the tracks and categories).
struct TimelineSlice {
  std::string track, name, category;
  double begin_ms = 0, end_ms = 0;
  std::int64_t bytes = -1;  // -1: none
};

struct TrafficRow {
  std::string operation;  // "all_gather"; "control": hashes, norms, flags, barriers
  std::uint64_t calls = 0, bytes_sent = 0;
};

struct ConfigRow {
  std::string key, value, source;
  bool is_default = false;
};

struct RunRecord {
  std::string folder;  // as it was named; not in the file
  std::string label;   // short and, among the runs of one page, unique; not in the file
  std::string started, recipe, device, transport, text;
  std::vector<std::string> command;
  int stage = -1, world = 0;
  std::int64_t steps = 0, parameters = 0, samples_per_step = 0, tokens_per_step = 0;
  std::vector<std::pair<std::string, std::string>> model, environment;  // name, value; in their order
  std::vector<ConfigRow> configuration;

  std::int64_t recorded_step = 0;  // 0: none
  std::vector<PhaseMemory> phases;
  std::vector<std::string> purposes;
  std::vector<MemorySample> samples;
  std::vector<TimelineSlice> timeline;
  std::vector<TrafficRow> traffic;  // of the recorded step, this rank's
  std::vector<TierMemory> planned;  // at rest and peaks of a step as `zero plan` foresaw them; empty: not planned
  std::uint64_t planned_sent = 0;   // bytes of this rank in a step

  std::vector<StepPoint> log;
  std::optional<double> heldout;  // nats per byte, of result.json
};

// run.json without what is not in the file, and without `log`.
std::string run_json(const RunRecord& record);

// Reads run.json, log.jsonl and result.json of a folder; the first and the last may be missing. An unfinished last line
// of log.jsonl, as a killed run leaves it, is dropped; steps that a resumed run did again replace the older ones.
// Throws IoError when there is no such folder or no log.jsonl, ConfigError naming file and line for what cannot be
// understood.
RunRecord read_run(const std::filesystem::path& folder);

// Gives every run its label: the stage where that tells them apart, else the folder's name, else the whole path.
void label_runs(std::vector<RunRecord>& runs);

}  // namespace zero::report
