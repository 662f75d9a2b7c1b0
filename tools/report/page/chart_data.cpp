// See chart_data.h.
#include "tools/report/page/chart_data.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

namespace zero::report {
namespace {

using Json = nlohmann::ordered_json;

Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

Json values_json(const Curve& curve) {
  Json list = Json::array();
  for (const auto& value : curve.values) list.push_back(number(value));
  return list;
}

// The text after the first space: "publish blocks.2" -> "blocks.2".
std::string behind_blank(const std::string& text) {
  const auto blank = text.find(' ');
  return blank == std::string::npos ? text : text.substr(blank + 1);
}

const std::vector<std::string>& shared_purposes(const std::vector<RunRecord>& runs) {
  static const std::vector<std::string> none;
  for (const RunRecord& run : runs)
    if (!run.purposes.empty()) return run.purposes;
  return none;
}

Json parts_json(const RunRecord& run) {
  Json list = Json::array();
  for (const StepPart& part : step_parts(run))
    list.push_back({{"name", part.name}, {"begin", part.begin_ms}, {"end", part.end_ms}});
  return list;
}

// The four moments of the last micro-batch.
Json marks_json(const RunRecord& run) {
  Json list = Json::array();
  const auto parts = step_parts(run);
  for (std::size_t i = parts.size() > 3 ? parts.size() - 3 : 0; i < parts.size(); ++i) {
    if (list.empty()) list.push_back(parts[i].begin_ms);
    list.push_back(parts[i].end_ms);
  }
  return list;
}

// By layer: the moments, and the load of each expert over the mean.
Json experts_json(const RunRecord& run) {
  constexpr std::size_t kMostMoments = 60;
  const auto loads = joined(run.loads, kMostMoments);
  Json list = Json::array();
  for (std::size_t i = 0; i < loads.front().layers.size(); ++i) {
    Json first = Json::array(), last = Json::array(), over_mean = Json::array();
    for (const ExpertLoad& load : loads) {
      Json row = Json::array();
      for (const auto count : load.layers[i].counts)
        row.push_back(std::round(1000 * load.layers[i].over_mean(count)) / 1000);
      first.push_back(load.first);
      last.push_back(load.last);
      over_mean.push_back(std::move(row));
    }
    list.push_back({{"block", loads.front().layers[i].block}, {"first", first}, {"last", last}, {"load", over_mean}});
  }
  return list;
}

}  // namespace

Curve curve_of(const RunRecord& run, std::optional<double> StepPoint::*value) {
  const std::size_t group = std::max<std::size_t>(1, (run.log.size() + kMostPoints - 1) / kMostPoints);
  Curve curve;
  for (std::size_t begin = 0; begin < run.log.size(); begin += group) {
    const std::size_t end = std::min(run.log.size(), begin + group);
    double sum = 0;
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (!(run.log[i].*value)) continue;
      sum += *(run.log[i].*value);
      ++count;
    }
    curve.steps.push_back(run.log[end - 1].step);
    curve.values.push_back(count > 0 ? std::optional<double>(sum / static_cast<double>(count)) : std::nullopt);
  }
  return curve;
}

Curve smoothed(const Curve& curve, std::size_t window) {
  Curve out{curve.steps, {}};
  const std::size_t half = window / 2;
  for (std::size_t i = 0; i < curve.values.size(); ++i) {
    std::vector<double> near;
    for (std::size_t k = i > half ? i - half : 0; k < std::min(curve.values.size(), i + half + 1); ++k)
      if (curve.values[k]) near.push_back(*curve.values[k]);
    if (near.empty()) {
      out.values.emplace_back();
      continue;
    }
    const auto middle = near.begin() + static_cast<std::ptrdiff_t>(near.size() / 2);
    std::nth_element(near.begin(), middle, near.end());
    out.values.emplace_back(*middle);
  }
  return out;
}

std::optional<double> median_of(const RunRecord& run, std::optional<double> StepPoint::*value) {
  std::vector<double> all;
  for (const StepPoint& point : run.log)
    if (point.*value) all.push_back(*(point.*value));
  if (all.empty()) return {};
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  std::nth_element(all.begin(), middle, all.end());
  return *middle;
}

std::optional<double> last_of(const RunRecord& run, std::optional<double> StepPoint::*value) {
  for (auto point = run.log.rbegin(); point != run.log.rend(); ++point)
    if ((*point).*value) return (*point).*value;
  return {};
}

std::optional<double> highest_of(const RunRecord& run, std::optional<double> StepPoint::*value) {
  std::optional<double> most;
  for (const StepPoint& point : run.log)
    if (point.*value && (!most || *(point.*value) > *most)) most = point.*value;
  return most;
}

std::vector<StepPart> step_parts(const RunRecord& run) {
  std::vector<StepPart> parts;
  for (const TimelineSlice& slice : run.timeline) {
    if (slice.category != "phase") continue;
    const std::string name = slice.name == "step()" ? "step" : slice.name;
    parts.push_back({name, std::max(0.0, slice.begin_ms), slice.end_ms});
  }
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.begin_ms < b.begin_ms; });
  return parts;
}

double step_end_ms(const RunRecord& run) {
  double end = 0;
  for (const StepPart& part : step_parts(run)) end = std::max(end, part.end_ms);
  for (const MemorySample& sample : run.samples) end = std::max(end, sample.ms);
  return std::max(end, 1e-3);  // not zero, because callers divide by it
}

double GroupRows::total(std::size_t row, const std::string& kind) const {
  double sum = 0;
  for (const GroupSlice& slice : slices)
    if (slice.row == row && slice.kind == kind) sum += slice.end_ms - slice.begin_ms;
  return sum;
}

GroupRows group_rows(const RunRecord& run) {
  GroupRows out;
  std::map<std::string, std::size_t> rows;
  const auto row_of = [&](const std::string& name) {
    const auto [place, is_new] = rows.try_emplace(name, out.rows.size());
    if (is_new) out.rows.push_back(name);
    return place->second;
  };
  // In the order of first use in forward.
  std::vector<const TimelineSlice*> order;
  for (const TimelineSlice& slice : run.timeline) order.push_back(&slice);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->begin_ms < b->begin_ms; });
  for (const auto* slice : order)
    if (slice->category == "forward") row_of(slice->name);
  struct Kind {
    const char* category;
    const char* kind;
    bool prefixed;
  };
  constexpr Kind kKinds[] = {{"whole", "who", false},  {"forward", "fwd", false},     {"backward", "bwd", false},
                             {"update", "upd", false}, {"gather", "gat", false},      {"gather,in-place", "gat", false},
                             {"publish", "gat", true}, {"reduce", "red", false},      {"fetch", "tie", true},
                             {"store", "tie", true},   {"fetch,states", "tie", true}, {"store,states", "tie", true},
                             {"copy", "tie", true}};
  std::vector<GroupSlice> waits;
  for (const Kind& kind : kKinds) {
    for (const auto* slice : order) {
      if (slice->category != kind.category) continue;
      const std::string name = kind.prefixed ? behind_blank(slice->name) : slice->name;
      std::string says;
      if (kind.prefixed) says = slice->name.substr(0, slice->name.find(' '));
      if (slice->category == "gather" || slice->category == "gather,in-place") says = "gather";
      out.slices.push_back({row_of(name), kind.kind, slice->begin_ms, slice->end_ms, slice->bytes, says});
    }
  }
  for (const auto* slice : order)
    if (slice->category == "wait")
      waits.push_back({0, "wai", slice->begin_ms, slice->end_ms, -1, "waits: " + slice->name});
  if (!waits.empty()) {
    const std::size_t row = row_of("this rank stands still");
    for (GroupSlice& wait : waits) {
      wait.row = row;
      out.slices.push_back(std::move(wait));
    }
  }
  return out;
}

const TierMemory* device_memory(const std::vector<TierMemory>& tiers) {
  for (const TierMemory& tier : tiers)
    if (tier.tier == "device") return &tier;
  return nullptr;
}

const TierMemory* device_memory(const std::vector<PhaseMemory>& phases, const std::string& phase) {
  for (const PhaseMemory& one : phases)
    if (one.phase == phase) return device_memory(one.tiers);
  return nullptr;
}

std::uint64_t sum_of(const Bytes& bytes) {
  std::uint64_t sum = 0;
  for (const auto& [name, value] : bytes) sum += value;
  return sum;
}

std::uint64_t bytes_of(const Bytes& bytes, const std::string& name) {
  for (const auto& [purpose, value] : bytes)
    if (purpose == name) return value;
  return 0;
}

std::uint64_t peak_of(const std::vector<PhaseMemory>& phases) {
  std::uint64_t peak = 0;
  for (const PhaseMemory& one : phases)
    if (const auto* tier = device_memory(one.tiers)) peak = std::max(peak, tier->peak);
  return peak;
}

std::vector<std::string> operations_of(const std::vector<RunRecord>& runs) {
  std::vector<std::string> names;
  for (const RunRecord& run : runs)
    for (const TrafficRow& row : run.traffic)
      if (row.operation != "control" && std::find(names.begin(), names.end(), row.operation) == names.end())
        names.push_back(row.operation);
  std::sort(names.begin(), names.end());
  return names;
}

const std::array<Axis, 4> kAxes{{
    {"ZeRO", "gat", &AxisBytes::zero,
     [](const Degrees& d) { return d.exchange_activations() && d.data * d.sequence > 1; }},
    {"tensor parallelism", "r7", &AxisBytes::tensor, [](const Degrees& d) { return d.tensor > 1; }},
    {"sequence parallelism", "p1", &AxisBytes::sequence, [](const Degrees& d) { return d.sequence > 1; }},
    {"expert parallelism", "p5", &AxisBytes::expert, [](const Degrees& d) { return d.expert > 1; }},
}};

std::string color_of_operation(const std::string& operation) {
  if (operation.starts_with("tp.")) return operation == "tp.all_reduce" ? "r7" : "p3";
  if (operation.starts_with("sp.")) return "p1";
  if (operation.starts_with("ep.")) return "p5";
  for (const auto& [name, color] : {std::pair{"all_gather", "gat"},
                                    {"reduce_scatter", "red"},
                                    {"all_reduce", "upd"},
                                    {"broadcast", "tie"},
                                    {"all_to_all", "fwd"}})
    if (operation == name) return color;
  return "wai";
}

std::uint64_t sent_by(const RunRecord& run, const std::string& operation) {
  for (const TrafficRow& row : run.traffic)
    if (row.operation == operation) return row.bytes_sent;
  return 0;
}

std::string loss_unit(const std::vector<RunRecord>& runs) {
  const bool same_unit = std::all_of(runs.begin(), runs.end(),
                                     [&](const RunRecord& run) { return run.loss_unit == runs.front().loss_unit; });
  return same_unit && !runs.empty() ? runs.front().loss_unit : "nats";
}

void share_purposes(std::vector<RunRecord>& runs) {
  std::vector<std::string> all;
  for (const RunRecord& run : runs)
    for (const std::string& purpose : run.purposes)
      if (std::find(all.begin(), all.end(), purpose) == all.end()) all.push_back(purpose);
  for (RunRecord& run : runs) {
    if (run.purposes.empty() || run.purposes == all) continue;
    for (MemorySample& sample : run.samples) {
      std::vector<std::uint64_t> bytes(all.size());
      for (std::size_t p = 0; p < run.purposes.size(); ++p) {
        const auto at = std::find(all.begin(), all.end(), run.purposes[p]) - all.begin();
        bytes[static_cast<std::size_t>(at)] = sample.bytes[p];
      }
      sample.bytes = std::move(bytes);
    }
    run.purposes = all;
  }
}

std::string chart_json(const std::vector<RunRecord>& runs) {
  const auto& purposes = shared_purposes(runs);
  const auto operations = operations_of(runs);
  const bool mesh =
      std::any_of(runs.begin(), runs.end(), [](const RunRecord& run) { return run.mesh.exchange_activations(); });
  Json list = Json::array();
  for (const RunRecord& run : runs) {
    const Curve loss = curve_of(run, &StepPoint::loss);
    const Curve speed = curve_of(run, &StepPoint::tokens_per_s);
    Json one{{"label", run.label}, {"steps", loss.steps}, {"loss", values_json(loss)}};
    one["tokens_per_s"] = values_json(smoothed(speed, std::max<std::size_t>(1, speed.values.size() / 10) | 1));
    one["lr"] = values_json(curve_of(run, &StepPoint::lr));
    one["grad_norm"] = values_json(curve_of(run, &StepPoint::grad_norm));
    one["loss_scale"] = values_json(curve_of(run, &StepPoint::loss_scale));
    for (const StepPoint& point : run.log) {
      if (!point.heldout_loss) continue;
      one["heldout_loss"].push_back(*point.heldout_loss);
      one["heldout_loss_steps"].push_back(point.step);  // only some steps have one
    }
    if (!run.loads.empty()) {
      one["load_max"] = values_json(curve_of(run, &StepPoint::load_max));
      one["dropped"] = values_json(curve_of(run, &StepPoint::dropped));
      one["experts"] = experts_json(run);
    }
    if (!run.samples.empty()) {
      Json times = Json::array(), bytes = Json::array();
      for (const MemorySample& sample : run.samples) {
        times.push_back(sample.ms);
        bytes.push_back(sample.bytes);
      }
      one["area"] = {{"end", step_end_ms(run)}, {"parts", parts_json(run)},   {"marks", marks_json(run)}, {"t", times},
                     {"bytes", bytes},          {"peak", peak_of(run.phases)}};
    }
    if (const auto* rest = device_memory(run.phases, "before forward"); rest && !purposes.empty()) {
      one["rest"] = Json::array();
      for (const std::string& purpose : purposes) one["rest"].push_back(bytes_of(rest->by_purpose, purpose));
      one["peak"] = peak_of(run.phases);
      if (const auto* planned = device_memory(run.planned)) one["planned_peak"] = planned->peak;
    }
    if (!run.traffic.empty()) {
      one["sent"] = Json::array();
      for (const std::string& operation : operations) one["sent"].push_back(sent_by(run, operation));
      const AxisBytes sent = sent_by_axis(run);
      for (const Axis& axis : kAxes)
        if (mesh) one["axes"].push_back(sent.*axis.bytes);
    }
    if (const GroupRows groups = group_rows(run); !groups.rows.empty()) {
      Json slices = Json::array();
      for (const GroupSlice& s : groups.slices)
        slices.push_back({s.row, s.kind, s.begin_ms, s.end_ms, s.bytes, s.says});
      one["groups"] = {{"end", step_end_ms(run)},
                       {"rows", groups.rows},
                       {"slices", slices},
                       {"parts", parts_json(run)},
                       {"marks", marks_json(run)}};
    }
    list.push_back(std::move(one));
  }
  Json colors = Json::array();
  for (const std::string& operation : operations) colors.push_back(color_of_operation(operation));
  Json axes = Json::array();
  for (const Axis& axis : kAxes) axes.push_back({axis.name, axis.color});
  const Json all{{"runs", list},
                 {"loss_unit", loss_unit(runs)},
                 {"purposes", purposes},
                 {"operations", operations},
                 {"operation_colors", colors},
                 {"axes", axes}};
  std::string text = all.dump(-1, ' ', false, Json::error_handler_t::replace), out;
  // "</script>" and "<!--" would end or change the script element, so "<" is escaped.
  for (const char c : text) c == '<' ? out += "\\u003c" : out += c;
  return out;
}

}  // namespace zero::report
