// Collects and writes the record. The trace of the recorded step is in the run folder if all ranks see it; other ranks
// write their part to their temporary folder and remove it.
#include "apps/finetune/run_recorder.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <torch/version.h>
#include <zero/config_tools.h>
#include <zero/plan.h>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/log.h"
#include "base/system.h"
#include "config/settings.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_plan.h"
#include "tools/support/mesh_traffic.h"
#include "tools/support/whole_file.h"

namespace zero::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Purpose = MemoryReport::Purpose;
using Tier = MemoryReport::Tier;

constexpr const char* kTrace = "trace.json";

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::vector<std::pair<std::string, std::string>> environment_of(const Communicator& comm, c10::Device device) {
  const launch::CpuFacts cpu = launch::cpu_facts();
  const launch::MemoryFacts memory = launch::memory_facts();
  utsname system{};
  ::uname(&system);
  std::vector<std::pair<std::string, std::string>> rows{
      {"zero", ZERO_VERSION},
      {"libtorch", TORCH_VERSION},
      {"compiler", std::string("g++ ") + __VERSION__},
      {"host", system.nodename},
      {"system", std::string(system.sysname) + " " + system.release + " " + system.machine},
      {"CPU", cpu.model},
      {"cores", std::to_string(launch::usable_cores()) + " usable"},
      {"threads a rank", std::to_string(at::get_num_threads())},
      {"memory", report::human_bytes(memory.total_bytes)},
      {"ranks", std::to_string(comm.size()) + ", " + std::to_string(comm.local_size()) + " on this host"},
      {"transport", comm.transport()},
      {"device", device.is_cpu() ? "CPU" : "GPU"}};
  const char* const restarts = std::getenv("ZERO_RESTART_COUNT");
  const char* const previous = std::getenv("ZERO_PREVIOUS_WORLD");
  if (restarts != nullptr && previous != nullptr)
    rows.emplace_back("restarts", std::string(restarts) + ", the last one on " + std::to_string(comm.size()) +
                                      " ranks after " + previous);
  if (memory.cgroup_limit_bytes > 0)
    rows.emplace_back("memory limit of the cgroup", report::human_bytes(memory.cgroup_limit_bytes));
  return rows;
}

std::vector<report::ConfigRow> configuration_of(const Options& options, int world) {
  const json all = json::parse(explain_json(options, world, true), nullptr, false);
  const json set = json::parse(explain_json(options, world, false), nullptr, false);
  std::vector<report::ConfigRow> rows;
  if (!all.is_object() || !set.is_object()) return rows;
  for (const auto& [key, row] : all["values"].items())
    rows.push_back({key, row["value"].dump(), row["source"].get<std::string>(), !set["values"].contains(key)});
  return rows;
}

report::PhaseMemory phase_memory(report::Phase phase, const MemoryReport& memory) {
  report::PhaseMemory out{name(phase), {}};
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    const auto tier = static_cast<Tier>(t);
    if (memory.peak(tier) == 0) continue;
    report::TierMemory row{MemoryReport::name(tier), {}, memory.peak(tier)};
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (const auto bytes = memory.current(tier, static_cast<Purpose>(p)); bytes > 0)
        row.by_purpose.emplace_back(MemoryReport::name(static_cast<Purpose>(p)), bytes);
    out.tiers.push_back(std::move(row));
  }
  return out;
}

// The prediction of `zero plan` for this run. A model or machine that cannot be planned is not an error.
void add_plan(report::RunRecord& r, const Options& options, const Communicator& comm, bool gpu) {
  PlanMachine machine;
  machine.ranks_per_host = comm.local_size();
  machine.hosts = comm.size() / comm.local_size();
  machine.gpu = gpu;
  machine.shared_memory = comm.transport() == "shm";
  try {
    const Plan foreseen = plan(with_gpt_pass(PlanModel::of_options(options)), options, machine);
    report::PhaseMemory memory = phase_memory(report::Phase::BeforeForward, foreseen.memory);
    r.planned = std::move(memory.tiers);
    const PlanTraffic& sent = foreseen.traffic;
    r.planned_sent = {sent.gathered + sent.reduced, sent.tensor_parallel, sent.sequence_parallel, sent.expert_parallel};
  } catch (const Error& error) {
    r.planned.clear();
    base::log(LogLevel::Info, base::join("the run has no prediction of its memory: ", error.what()));
  }
}

}  // namespace

RunRecorder::RunRecorder(const TrainPlan& plan, const TaskFacts& facts, Engine& engine, c10::Device device,
                         const std::string& folder)
    : plan_(plan),
      engine_(engine),
      comm_(engine.communicator()),
      mesh_(degrees_of(engine.mesh(), plan.options.settings().model.experts.degree())),
      folder_(folder) {
  if (comm_.rank() != 0) return;
  const config::Settings& s = plan.options.settings();
  report::RunRecord& r = record_;
  r.started = utc_now();
  r.command = plan.command;
  r.text = facts.data_name;
  r.stage = s.zero.stage;
  r.world = comm_.size();
  r.mesh = mesh_;
  r.own_parameters = facts.own_parameters;
  r.recipe = s.precision == config::Precision::Bf16 ? "bf16" : s.precision == config::Precision::Fp16 ? "fp16" : "fp32";
  r.device = device.is_cpu() ? "cpu" : "cuda";
  r.transport = comm_.transport();
  r.steps = plan.steps;
  r.parameters = facts.parameters;
  r.samples_per_step = engine.micro_batch_size() * engine.accumulation_steps() * engine.mesh().size("dp");
  r.tokens_per_step = r.samples_per_step * facts.tokens_per_sample;
  r.model = facts.rows;
  r.loss_unit = facts.loss_unit;
  r.environment = environment_of(comm_, device);
  r.configuration = configuration_of(plan.options, comm_.size());
  if (facts.plannable) add_plan(r, plan.options, comm_, !device.is_cpu());
  write();
}

void RunRecorder::write() const {
  if (comm_.rank() == 0) write_whole("--out", (fs::path(folder_) / "run.json").string(), report::run_json(record_));
}

void RunRecorder::begin(std::int64_t first) {
  // Not the first step, which also allocates buffers that later steps reuse.
  step_ = std::min(first + 2, plan_.steps - 1);
  // Nor one after an evaluation, which leaves parameters gathered at stage 3.
  if (plan_.eval_every > 1 && step_ % plan_.eval_every == 0 && step_ + 1 < plan_.steps) ++step_;
  if (step_ < first || !plan_.trace.empty()) return;
  std::error_code error;
  const std::string shared = comm_.all_gather_bytes(comm_.rank() == 0 ? fs::absolute(folder_).string() : "").front();
  const bool sees = fs::is_directory(shared, error);
  bool all_see = true;
  for (const std::string& word : comm_.all_gather_bytes(sees ? "1" : "0")) all_see = all_see && word == "1";
  trace_is_own_ = comm_.rank() != 0 && !all_see;
  trace_file_ = trace_is_own_ ? (base::temporary_folder() / base::join("zero-trace-", ::getpid())).string()
                              : (fs::path(shared) / kTrace).string();
  const std::int64_t count = step_ - first + 1;
  engine_.start_trace(trace_file_, {count, count});
  tracing_ = true;
}

void RunRecorder::note(report::Phase phase, const MemoryReport& memory) {
  if (phase == report::Phase::BeforeForward) own_.at_rest = memory.current(Tier::Device);
  own_.peak = std::max(own_.peak, memory.peak(Tier::Device));
  if (comm_.rank() == 0) record_.phases.push_back(phase_memory(phase, memory));
}

void RunRecorder::begin_step() { before_ = comm_.stats(); }

void RunRecorder::end_step() {
  const CommStats after = comm_.stats();
  own_.sent = sent_between(before_, after, mesh_);
  if (comm_.rank() == 0) {
    record_.recorded_step = step_ + 1;
    record_.traffic.clear();
    for (const auto& [name, row] : counted_between(before_, after, mesh_))
      record_.traffic.push_back({name, row.calls, row.bytes_sent});
    const auto calls = after.control.calls - before_.control.calls;
    if (calls > 0) record_.traffic.push_back({"control", calls, after.control.bytes_sent - before_.control.bytes_sent});
  }
  if (mesh_.exchange_activations()) collect_ranks();
  if (tracing_) {
    tracing_ = false;
    const TraceSummary summary = engine_.stop_trace();
    if (comm_.rank() == 0) {
      read_timeline(summary.file);
    } else if (!summary.joined) {
      std::error_code error;
      fs::remove(summary.file, error);
    }
  }
  write();
}

// Ranks of a mesh hold different parts of the model and tokens of a sample.
void RunRecorder::collect_ranks() {
  const Mesh& mesh = engine_.mesh();
  own_.rank = comm_.rank();
  own_.data = mesh.rank("dp"), own_.sequence = mesh.rank("sp"), own_.tensor = mesh.rank("tp");
  auto all = base::all_gather_values(comm_, own_);
  if (comm_.rank() == 0) record_.ranks = std::move(all);
}

void RunRecorder::take_trace(const std::string& file) {
  if (comm_.rank() != 0 || record_.recorded_step == 0) return;
  read_timeline(file);
  write();
}

void RunRecorder::take_metrics(const TaskMetrics& metrics) {
  record_.metrics = metrics;
  if (!metrics.empty()) write();
}

// Rank 0's events of the first step in the file; events are one per line, those of later steps follow.
void RunRecorder::read_timeline(const std::string& file) {
  std::ifstream in(file);
  std::map<std::int64_t, std::string> tracks;
  std::vector<json> events;
  double begin = 0, end = -1;
  const auto time_of = [](const json& event) { return event.value("ts", 0.0); };
  for (std::string line; std::getline(in, line);) {
    if (!line.empty() && line.back() == ',') line.pop_back();
    json event = json::parse(line, nullptr, false);
    if (!event.is_object() || event.value("pid", -1) != 0) continue;
    const std::string kind = event.value("ph", "");
    if (kind == "M" && event.value("name", "") == "thread_name") tracks[event["tid"]] = event["args"]["name"];
    if (kind != "X" && kind != "C") continue;
    if (end >= 0 && time_of(event) > end) continue;
    if (end < 0 && event.value("cat", "") == "step") begin = time_of(event), end = begin + event.value("dur", 0.0);
    if (events.size() > 200000) break;
    events.push_back(std::move(event));
  }
  if (end < 0) return;  // the trace ended before it
  record_.purposes.clear();
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
    record_.purposes.emplace_back(MemoryReport::name(static_cast<Purpose>(p)));
  std::stable_sort(events.begin(), events.end(), [&](const json& a, const json& b) { return time_of(a) < time_of(b); });
  record_.timeline.clear();
  record_.samples.clear();
  std::vector<std::uint64_t> bytes(MemoryReport::kPurposes);
  std::set<std::size_t> known;  // the first sample contains every purpose, one after another
  for (const json& event : events) {
    const double at = time_of(event), until = at + event.value("dur", 0.0);
    if (at > end || until < begin) continue;
    const std::string name = event["name"];
    if (event["ph"] == "X") {
      report::TimelineSlice slice{tracks[event["tid"]],  name, event["cat"], (at - begin) / 1e3,
                                  (until - begin) / 1e3, -1};
      if (event.contains("args") && event["args"].contains("bytes")) slice.bytes = event["args"]["bytes"];
      if (slice.category != "step") record_.timeline.push_back(std::move(slice));
      continue;
    }
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (name == "bytes of " + record_.purposes[p]) {
        bytes[p] = event["args"]["bytes"];
        known.insert(p);
      }
    if (known.size() < MemoryReport::kPurposes) continue;
    const double ms = (at - begin) / 1e3;
    // Counters of one sample are some hundred nanoseconds apart.
    if (!record_.samples.empty() && ms - record_.samples.back().ms < 0.002) record_.samples.pop_back();
    record_.samples.push_back({ms, bytes});
  }
}

}  // namespace zero::cli
