// Reads and writes run records.
#include "tools/report/page/run_record.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include <zero/errors.h>

#include "base/check.h"
#include "tools/report/page/json_lines.h"

namespace zero::report {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
constexpr const char* kSchema = "zero.run/1";

Json bytes_json(const Bytes& bytes) {
  Json object = Json::object();
  for (const auto& [name, value] : bytes) object[name] = value;
  return object;
}

Json tiers_json(const std::vector<TierMemory>& tiers) {
  Json object = Json::object();
  for (const TierMemory& tier : tiers)
    object[tier.tier] = {{"bytes", bytes_json(tier.by_purpose)}, {"peak_bytes", tier.peak}};
  return object;
}

Json phases_json(const std::vector<PhaseMemory>& phases) {
  Json list = Json::array();
  for (const PhaseMemory& phase : phases) {
    list.push_back({{"phase", phase.phase}, {"tiers", tiers_json(phase.tiers)}});
  }
  return list;
}

Json pairs_json(const std::vector<std::pair<std::string, std::string>>& pairs) {
  Json object = Json::object();
  for (const auto& [name, value] : pairs) object[name] = value;
  return object;
}

double rounded(double ms) { return std::round(ms * 1e6) / 1e6; }

std::vector<TierMemory> tiers_of(const Json& object) {
  std::vector<TierMemory> tiers;
  for (const auto& [name, value] : object.items()) {
    TierMemory tier{name, {}, value.at("peak_bytes").get<std::uint64_t>()};
    for (const auto& [purpose, bytes] : value.at("bytes").items())
      tier.by_purpose.emplace_back(purpose, bytes.get<std::uint64_t>());
    tiers.push_back(std::move(tier));
  }
  return tiers;
}

std::vector<PhaseMemory> phases_of(const Json& list) {
  std::vector<PhaseMemory> phases;
  for (const Json& item : list) phases.push_back({item.at("phase").get<std::string>(), tiers_of(item.at("tiers"))});
  return phases;
}

std::vector<std::pair<std::string, std::string>> pairs_of(const Json& object) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const auto& [name, value] : object.items())
    pairs.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
  return pairs;
}

Json axes_json(const AxisBytes& bytes) {
  return {{"zero", bytes.zero},
          {"tensor_parallel", bytes.tensor},
          {"sequence_parallel", bytes.sequence},
          {"expert_parallel", bytes.expert}};
}

AxisBytes axes_of(const Json& object) {
  return {object.at("zero").get<std::uint64_t>(), object.at("tensor_parallel").get<std::uint64_t>(),
          object.at("sequence_parallel").get<std::uint64_t>(), object.value("expert_parallel", std::uint64_t{0})};
}

void read_record(const Json& j, RunRecord& r) {
  if (j.at("schema") != kSchema)
    throw std::runtime_error("schema " + j.at("schema").dump() + " and not \"" + kSchema + "\"");
  j.at("started").get_to(r.started);
  j.at("command").get_to(r.command);
  j.at("stage").get_to(r.stage);
  j.at("world").get_to(r.world);
  r.mesh.data = r.world;
  if (j.contains("mesh")) {
    const Json& mesh = j.at("mesh");
    const auto degree = [](const char* name, const Json& value) {
      try {
        return value.get<int>();
      } catch (const Json::exception& fault) {
        throw std::runtime_error(base::join("mesh.", name, ": ", plain_fault(fault.what())));
      }
    };
    r.mesh = {degree("dp", mesh.at("dp")), degree("sp", mesh.at("sp")), degree("tp", mesh.at("tp")),
              degree("ep", mesh.value("ep", Json(1)))};
    mesh.at("parameters_per_rank").get_to(r.own_parameters);
    if (std::int64_t{r.mesh.data} * r.mesh.sequence * r.mesh.tensor != r.world)
      throw std::runtime_error("a mesh of " + degrees_text(r.mesh) + " for " + std::to_string(r.world) + " ranks");
  }
  j.at("recipe").get_to(r.recipe);
  j.at("device").get_to(r.device);
  j.at("transport").get_to(r.transport);
  j.at("text").get_to(r.text);
  j.at("steps").get_to(r.steps);
  j.at("parameters").get_to(r.parameters);
  j.at("samples_per_step").get_to(r.samples_per_step);
  j.at("tokens_per_step").get_to(r.tokens_per_step);
  r.model = pairs_of(j.at("model"));
  if (j.contains("metrics"))
    for (const auto& [name, value] : j["metrics"].items())
      if (value.is_number()) r.metrics.emplace_back(name, value.get<double>());
  r.loss_unit = j.value("loss_unit", r.loss_unit);
  r.environment = pairs_of(j.at("environment"));
  for (const Json& row : j.at("configuration"))
    r.configuration.push_back({row.at("key").get<std::string>(), row.at("value").dump(),
                               row.at("source").get<std::string>(), row.at("default").get<bool>()});
  if (!j.contains("recorded")) return;
  const Json& step = j.at("recorded");
  step.at("step").get_to(r.recorded_step);
  r.phases = phases_of(step.at("memory"));
  step.at("purposes").get_to(r.purposes);
  for (const Json& row : step.at("samples")) {
    MemorySample sample{row.at("ms").get<double>(), row.at("bytes").get<std::vector<std::uint64_t>>()};
    if (sample.bytes.size() != r.purposes.size())
      throw std::runtime_error("a memory sample of " + std::to_string(sample.bytes.size()) + " numbers for " +
                               std::to_string(r.purposes.size()) + " purposes");
    r.samples.push_back(std::move(sample));
  }
  for (const Json& row : step.at("timeline"))
    r.timeline.push_back({row.at("track").get<std::string>(), row.at("name").get<std::string>(),
                          row.at("category").get<std::string>(), row.at("begin_ms").get<double>(),
                          row.at("end_ms").get<double>(), row.value("bytes", std::int64_t{-1})});
  for (const Json& row : step.at("traffic"))
    r.traffic.push_back({row.at("operation").get<std::string>(), row.at("calls").get<std::uint64_t>(),
                         row.at("bytes_sent").get<std::uint64_t>()});
  if (step.contains("ranks"))
    for (const Json& row : step.at("ranks"))
      r.ranks.push_back({row.at("rank").get<int>(), row.at("dp").get<int>(), row.at("sp").get<int>(),
                         row.at("tp").get<int>(), row.at("at_rest_bytes").get<std::uint64_t>(),
                         row.at("peak_bytes").get<std::uint64_t>(), axes_of(row.at("sent_bytes"))});
  if (!step.contains("planned")) return;
  const Json& planned = step.at("planned");
  r.planned = tiers_of(planned.at("tiers"));
  if (planned.contains("sent_bytes"))
    r.planned_sent = axes_of(planned.at("sent_bytes"));
  else
    planned.at("bytes_sent").get_to(r.planned_sent.zero);  // of a version without meshes
}

std::string slurp(const fs::path& path, bool required) {
  std::ifstream in(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (required && (!in || fs::is_directory(path)))
    throw IoError("[report] got \"" + std::string(std::strerror(errno ? errno : EIO)) + "\" for " + path.string() +
                  ", expected the log of a run. Hint: name a folder that `zero train --out` wrote.");
  return text;
}

std::optional<double> number(const Json& row, const char* name) {
  const auto found = row.find(name);
  if (found == row.end() || found->is_null()) return {};
  return found->get<double>();
}

StepPoint point_of(const std::string& line) {
  const Json row = Json::parse(line);
  StepPoint point;
  row.at("step").get_to(point.step);
  point.loss = number(row, "loss");
  point.grad_norm = number(row, "grad_norm");
  point.lr = number(row, "lr");
  point.loss_scale = number(row, "loss_scale");
  point.step_ms = number(row, "step_ms");
  point.tokens_per_s = number(row, "tokens_per_s");
  point.memory_bytes = number(row, "memory_bytes");
  point.bytes_sent = number(row, "bytes_sent");
  point.aux_loss = number(row, "aux_loss");
  point.dropped = number(row, "dropped");
  point.load_max = number(row, "load_max");
  point.heldout_loss = number(row, "heldout_loss");
  return point;
}

std::vector<StepPoint> read_log(const fs::path& path) {
  const std::string text = slurp(path, true);
  std::vector<StepPoint> log;
  for_each_line(path, text, "one step", [&](const std::string& line) {
    const StepPoint point = point_of(line);
    if (point.heldout_loss) {  // of an evaluation after the step above
      if (!log.empty() && log.back().step == point.step) log.back().heldout_loss = point.heldout_loss;
      return;
    }
    while (!log.empty() && log.back().step >= point.step) log.pop_back();
    log.push_back(point);
  });
  return log;
}

}  // namespace

std::string run_json(const RunRecord& r) {
  Json configuration = Json::array();
  for (const ConfigRow& row : r.configuration) {
    Json value = Json::parse(row.value, nullptr, false);
    if (value.is_discarded()) value = row.value;
    configuration.push_back({{"key", row.key}, {"value", value}, {"source", row.source}, {"default", row.is_default}});
  }
  Json j{{"schema", kSchema},
         {"started", r.started},
         {"command", r.command},
         {"stage", r.stage},
         {"world", r.world},
         {"mesh",
          {{"dp", r.mesh.data},
           {"sp", r.mesh.sequence},
           {"tp", r.mesh.tensor},
           {"ep", r.mesh.expert},
           {"parameters_per_rank", r.own_parameters}}},
         {"recipe", r.recipe},
         {"device", r.device},
         {"transport", r.transport},
         {"text", r.text},
         {"steps", r.steps},
         {"parameters", r.parameters},
         {"samples_per_step", r.samples_per_step},
         {"tokens_per_step", r.tokens_per_step},
         {"loss_unit", r.loss_unit}};
  j["model"] = pairs_json(r.model);
  j["environment"] = pairs_json(r.environment);
  j["configuration"] = configuration;
  for (const auto& [name, value] : r.metrics) j["metrics"][name] = value;
  if (r.recorded_step > 0) {
    Json samples = Json::array(), timeline = Json::array(), traffic = Json::array();
    for (const MemorySample& sample : r.samples)
      samples.push_back({{"ms", rounded(sample.ms)}, {"bytes", sample.bytes}});
    for (const TimelineSlice& slice : r.timeline) {
      Json row{{"track", slice.track},
               {"name", slice.name},
               {"category", slice.category},
               {"begin_ms", rounded(slice.begin_ms)},
               {"end_ms", rounded(slice.end_ms)}};
      if (slice.bytes >= 0) row["bytes"] = slice.bytes;
      timeline.push_back(std::move(row));
    }
    for (const TrafficRow& row : r.traffic)
      traffic.push_back({{"operation", row.operation}, {"calls", row.calls}, {"bytes_sent", row.bytes_sent}});
    Json step{{"step", r.recorded_step}, {"memory", phases_json(r.phases)},
              {"traffic", traffic},      {"purposes", r.purposes},
              {"samples", samples},      {"timeline", timeline}};
    for (const RankRow& row : r.ranks)
      step["ranks"].push_back({{"rank", row.rank},
                               {"dp", row.data},
                               {"sp", row.sequence},
                               {"tp", row.tensor},
                               {"at_rest_bytes", row.at_rest},
                               {"peak_bytes", row.peak},
                               {"sent_bytes", axes_json(row.sent)}});
    if (!r.planned.empty())
      step["planned"] = {{"tiers", tiers_json(r.planned)}, {"sent_bytes", axes_json(r.planned_sent)}};
    j["recorded"] = step;
  }
  // One line per key keeps the file readable.
  std::string out = "{";
  for (const auto& [key, value] : j.items())
    out += (out.size() > 1 ? ",\n " : "\n ") + Json(key).dump() + ": " +
           value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return out + "\n}\n";
}

RunRecord read_run(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    throw IoError("[report] got no folder " + folder.string() +
                  ", expected one that a run wrote. Hint: `zero train --out " + folder.string() + "`.");
  RunRecord record;
  record.folder = folder.string();
  record.log = read_log(folder / "log.jsonl");
  const auto read = [&](const char* name, const auto& take) {
    const fs::path path = folder / name;
    const std::string text = slurp(path, false);
    if (text.empty()) return;
    try {
      take(Json::parse(text));
    } catch (const std::exception& fault) {
      throw ConfigError(
          "[report] got " + path.string() + ": " + plain_fault(fault.what()) +
          ", expected what this version of `zero train` writes. Hint: without the file the rest is shown.");
    }
  };
  read("run.json", [&](const Json& j) { read_record(j, record); });
  read("result.json", [&](const Json& j) {
    for (const char* const key : {"heldout_nats_per_byte", "heldout_loss"})
      if (j.contains(key)) record.heldout = number(j, key);
  });
  record.loads = read_loads(folder / "experts.jsonl");
  return record;
}

std::string ranks_text(const RunRecord& run) {
  const auto count = std::to_string(run.world) + (run.world == 1 ? " rank" : " ranks");
  return run.mesh.exchange_activations() ? count + " = " + degrees_text(run.mesh) : count;
}

AxisBytes sent_by_axis(const RunRecord& run) {
  AxisBytes sent;
  for (const TrafficRow& row : run.traffic) sent.add(row.operation, row.bytes_sent);
  return sent;
}

void label_runs(std::vector<RunRecord>& runs) {
  const auto label = [&](const auto& label_of) {
    std::set<std::string> seen;
    for (RunRecord& run : runs) {
      run.label = label_of(run);
      if (run.label.empty() || !seen.insert(run.label).second) return false;
    }
    return true;
  };
  const auto kind_of = [](const RunRecord& r) {
    if (r.stage < 0) return std::string();
    std::string text = "stage " + std::to_string(r.stage);
    if (r.mesh.tensor > 1) text += " tp " + std::to_string(r.mesh.tensor);
    if (r.mesh.sequence > 1) text += " sp " + std::to_string(r.mesh.sequence);
    if (r.mesh.expert > 1) text += " ep " + std::to_string(r.mesh.expert);
    return text;
  };
  if (label(kind_of)) return;
  const auto name_of = [](const RunRecord& r) {
    const auto path = fs::path(r.folder).lexically_normal();
    return (path.has_filename() ? path.filename() : path.parent_path().filename()).string();
  };
  if (label(name_of)) return;
  if (label([](const RunRecord& r) { return r.folder; })) return;
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].label = runs[i].folder + " #" + std::to_string(i + 1);
}

}  // namespace zero::report
