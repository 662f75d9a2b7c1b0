// The files that `zero train` writes into a run's folder for `zero report`: run.json (configuration, machine and one
// step in detail) and log.jsonl (one line per step). Plain data with reader and writer; html_page.h draws it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/report/page/expert_load.h"
#include "tools/report/text/axis_bytes.h"

namespace zero::report {

// A line of log.jsonl. Missing fields and nulls are not set.
struct StepPoint {
  std::int64_t step = 0;
  std::optional<double> loss, grad_norm, lr, loss_scale, step_ms, tokens_per_s;
  std::optional<double> memory_bytes, bytes_sent;
  // With experts: the sum of the auxiliary losses; the share of choices that were dropped; the tokens of the busiest
  // expert over the mean, of the layer where that is highest.
  std::optional<double> aux_loss, dropped, load_max;
  std::optional<double> heldout_loss;  // of an evaluation after the step
};

using Bytes = std::vector<std::pair<std::string, std::uint64_t>>;  // by purpose ("gradients") or class

// One rank's bytes at the end of a phase of the recorded step, by tier ("device", "host", "file").
struct TierMemory {
  std::string tier;
  Bytes by_purpose;        // non-zero values
  std::uint64_t peak = 0;  // highest sum since the previous step began; of a plan: within a step
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

// An activity of a rank in the recorded step; docs/trace.md lists tracks and categories.
struct TimelineSlice {
  std::string track, name, category;
  double begin_ms = 0, end_ms = 0;
  std::int64_t bytes = -1;  // -1: none
};

struct TrafficRow {
  // "all_gather"; "tp.all_reduce", "sp.all_to_all" on a mesh; "control": hashes, norms, flags, barriers.
  std::string operation;
  std::uint64_t calls = 0, bytes_sent = 0;
};

struct ConfigRow {
  std::string key, value, source;
  bool is_default = false;
};

// One rank of a mesh in the recorded step.
struct RankRow {
  int rank = 0, data = 0, sequence = 0, tensor = 0;
  std::uint64_t at_rest = 0, peak = 0;  // device bytes
  AxisBytes sent;
};

struct RunRecord {
  std::string folder;  // as given by the user; not in the file
  std::string label;   // short and, among the runs of one page, unique; not in the file
  std::string started, recipe, device, transport, text;
  std::vector<std::string> command;
  int stage = -1, world = 0;
  Degrees mesh;
  std::int64_t own_parameters = 0;  // elements of rank 0's part of the model, before ZeRO shards them; 0: unknown
  std::int64_t steps = 0, parameters = 0, samples_per_step = 0, tokens_per_step = 0;
  std::vector<std::pair<std::string, std::string>> model, environment;  // name, value; in their order
  std::vector<ConfigRow> configuration;
  std::vector<std::pair<std::string, double>> metrics;  // of the held-out part at the end: "perplexity", "f1"
  std::string loss_unit = "nats per byte";

  std::int64_t recorded_step = 0;  // 0: none
  std::vector<PhaseMemory> phases;
  std::vector<std::string> purposes;
  std::vector<MemorySample> samples;
  std::vector<TimelineSlice> timeline;
  std::vector<TrafficRow> traffic;  // of the recorded step, this rank's
  std::vector<TierMemory> planned;  // bytes at rest and peaks of a step from `zero plan`; empty: not planned
  AxisBytes planned_sent;           // of a rank in a step
  std::vector<RankRow> ranks;       // if ranks share samples; else empty

  std::vector<StepPoint> log;
  std::vector<ExpertLoad> loads;  // of experts.jsonl; empty: no experts
  std::optional<double> heldout;  // mean loss, of result.json
};

// The text of run.json: all fields except `log`, `loads` and those marked as not in the file.
std::string run_json(const RunRecord& record);

// Reads run.json, log.jsonl, experts.jsonl and result.json of a folder; only log.jsonl must exist. An unfinished last
// line of log.jsonl, as a killed run leaves it, is dropped; steps that a resumed run repeated replace the older ones.
// Throws IoError if the folder or log.jsonl does not exist, ConfigError with file and line for invalid contents.
RunRecord read_run(const std::filesystem::path& folder);

// "4 ranks = 2 dp x 1 sp x 2 tp", "2 ranks".
std::string ranks_text(const RunRecord& run);
// Of the recorded step.
AxisBytes sent_by_axis(const RunRecord& run);

// Sets the label of every run: stage and degrees of parallelism if these are unique, else the folder's name, else the
// full path.
void label_runs(std::vector<RunRecord>& runs);

}  // namespace zero::report
