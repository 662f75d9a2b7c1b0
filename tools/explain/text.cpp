// See text.h.
#include "tools/explain/text.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "base/check.h"
#include "plan/formulas.h"
#include "tools/explain/mesh_text.h"
#include "tools/explain/unit_names.h"
#include "tools/report/text/table.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

using planning::Event;
using planning::Holding;
using planning::How;
using planning::Phase;
using planning::Schedule;
using planning::What;
using report::Align;
using report::Column;
using Narrow = report::Column::Narrow;
using Tier = MemoryReport::Tier;

const char* dtype_of(const Explained& what, int width, const std::string& state) {
  const bool compute = state.starts_with("parameters") || state.starts_with("gradients") || state.starts_with("second");
  return width == 4 || !compute ? "fp32" : what.recipe == "fp16" ? "fp16" : "bf16";
}

// Events that differ only in the unit.
struct Row {
  Event event;  // of the first; bytes and sent are sums
  std::vector<std::string> units;
  bool operator==(const Row& other) const {
    return std::tie(event.what, event.how, event.purpose, event.from, event.to, event.bytes, event.sent, units) ==
           std::tie(other.event.what, other.event.how, other.event.purpose, other.event.from, other.event.to,
                    other.event.bytes, other.event.sent, other.units);
  }
};

std::vector<Row> rows_of(const Schedule& schedule, int step, Phase phase, int micro) {
  std::vector<Row> rows;
  for (const auto& event : schedule.events) {
    if (event.phase != phase || event.micro != micro || (phase != Phase::Build && event.step != step)) continue;
    const auto same_operation = [&](const Row& row) {
      const auto& e = row.event;
      return e.what == event.what && e.how == event.how && e.purpose == event.purpose && e.from == event.from &&
             e.to == event.to && e.neighbours == event.neighbours && e.quantized == event.quantized;
    };
    const auto it = std::find_if(rows.begin(), rows.end(), same_operation);
    if (it == rows.end()) {
      rows.push_back({event, {event.unit}});
      continue;
    }
    it->event.bytes += event.bytes;
    it->event.sent += event.sent;
    it->units.push_back(event.unit);
  }
  return rows;
}

std::string how_text(const Event& event) {
  std::string text = planning::name(event.how);
  if (event.quantized) text += event.what == What::Gradients ? ", 4 bits" : ", 8 bits";
  if (event.neighbours) text += " of neighbours";
  const std::string from = MemoryReport::name(event.from), to = MemoryReport::name(event.to);
  if (event.how == How::Copy) text += " " + from + " to " + to;
  if (event.how == How::Update) text += " on " + to;
  return text;
}

bool is_collective(How how) { return how != How::Read && how != How::Write && how != How::Copy && how != How::Update; }

std::string bytes_text(std::int64_t bytes) {
  return bytes == 0 ? "-" : report::human_bytes(static_cast<std::uint64_t>(bytes));
}

// One phase of the table, and its micro-batches.
struct Part {
  std::string label;
  Phase phase;
  int micro = 0;
  std::int64_t times = 1;
  std::vector<Row> rows;
};

std::vector<Part> parts_of(const Schedule& schedule, int step) {
  std::vector<Part> parts;
  const auto add = [&](const std::string& label, Phase phase, int micro, std::int64_t times) {
    parts.push_back({label, phase, micro, times, rows_of(schedule, step, phase, micro)});
  };
  add("building", Phase::Build, 0, 1);
  const auto k = static_cast<int>(schedule.accumulation);
  for (int begin = 0; begin < k;) {
    int end = begin + 1;
    while (end < k && rows_of(schedule, step, Phase::Forward, end) == rows_of(schedule, step, Phase::Forward, begin) &&
           rows_of(schedule, step, Phase::Backward, end) == rows_of(schedule, step, Phase::Backward, begin))
      ++end;
    std::string which;
    if (k > 1 && end - begin == k) which = base::join(" x", k);
    if (k > 1 && end - begin < k)
      which = end - begin == 1 ? base::join(" ", end) : base::join(" ", begin + 1, "-", end);
    add("forward" + which, Phase::Forward, begin, end - begin);
    add("backward" + which, Phase::Backward, begin, end - begin);
    begin = end;
  }
  add("step", Phase::Step, 0, 1);
  add("during next step", Phase::Background, 0, 1);
  return parts;
}

// How a state of these units is transferred in a phase: "file read, all-gather".
std::string ways(const Schedule& schedule, int step, Phase phase, What what, const std::set<std::string>& units) {
  std::vector<std::string> all;
  for (const auto& event : schedule.events) {
    if (event.phase != phase || event.what != what || event.how == How::Update ||
        (phase != Phase::Build && event.step != step))
      continue;
    if (units.count(event.unit) == 0) continue;
    const auto text = how_text(event);
    if (std::find(all.begin(), all.end(), text) == all.end()) all.push_back(text);
  }
  std::string text;
  for (const auto& one : all) text += (text.empty() ? "" : ", ") + one;
  return text;
}

struct Cells {
  std::string forward, backward, step;
};

Cells cells_of(const Schedule& s, const Explained& what, const Holding& holding) {
  const std::set<std::string> units(holding.units.begin(), holding.units.end());
  const auto by = [&](Phase phase, What state) { return ways(s, what.shown, phase, state, units); };
  const auto with = [](const std::string& text, const std::string& more) {
    return more.empty() ? text : text + ": " + more;
  };
  if (holding.state == "parameters") {
    const std::string in_use = holding.sharded || holding.tier != Tier::Device ? "whole, unit by unit" : "whole";
    return {with(in_use, by(Phase::Forward, What::Parameters)), with(in_use, by(Phase::Backward, What::Parameters)),
            with(what.delayed                        ? "those of the step before come into use"
                 : holding.sharded                   ? "own part is new"
                 : s.stage >= 1 && holding.ranks > 1 ? "own part is new, then whole"
                                                     : "new",
                 by(Phase::Step, What::Parameters))};
  }
  if (holding.state == "gradients") {
    const auto sum = by(Phase::Backward, What::Gradients), late = by(Phase::Step, What::Gradients);
    return {"-", with(s.stage >= 2 && holding.ranks > 1 ? "of a unit whole, then own part" : "made, whole", sum),
            what.delayed ? "handed over" : with("read by the update", late)};
  }
  if (holding.state == "gradients handed over")
    return {"read by the update in background", "read by the update in background", "-"};
  if (holding.state == "parameters to come") return {"written by the update", "written by the update", "come into use"};
  if (holding.state == "second shards") return {"-", "read by neighbours", "void"};
  const auto moved = by(Phase::Step, What::OptimizerStates);
  if (what.delayed)
    return {with("updated in background", by(Phase::Background, What::OptimizerStates)), "updated in background", "-"};
  const auto early = by(Phase::Backward, What::OptimizerStates);
  return {"-", early.empty() ? "-" : early, with("updated", moved)};
}

std::string wrapped(const std::string& text, std::size_t columns) {
  std::string out;
  for (const auto& line : report::wrap(text, columns)) out += line + "\n";
  return out;
}

std::string rule(const std::string& title, std::size_t columns) { return "\n" + wrapped(title, columns); }

std::string holdings_text(const Schedule& s, const Explained& what, std::size_t columns) {
  report::Table table({{"state", Align::Left, Narrow::Wrap, 11},
                       {"a rank"},
                       {"tier"},
                       {"bytes", Align::Right},
                       {"forward", Align::Left, Narrow::Wrap, 12},
                       {"backward", Align::Left, Narrow::Wrap, 14},
                       {"step", Align::Left, Narrow::Wrap, 12}});
  for (const auto& holding : s.holdings) {
    const auto cells = cells_of(s, what, holding);
    const auto part = holding.state == "second shards" ? std::string("part")
                      : holding.sharded                ? base::join("1/", holding.ranks)
                                                       : std::string("whole");
    table.row({base::join(holding.state, holding.experts ? " of experts, " : ", ",
                          dtype_of(what, holding.width, holding.state)),
               part, MemoryReport::name(holding.tier), bytes_text(holding.bytes) + (holding.passing ? "*" : ""),
               cells.forward, cells.backward, cells.step});
  }
  return table.render(columns);
}

std::string moves_text(const Schedule& s, const Explained& what, std::size_t columns) {
  report::Table table({{"phase"},
                       {"what", Align::Left, Narrow::Wrap, 12},
                       {"how", Align::Left, Narrow::Wrap, 14},
                       {"units, in this order", Align::Left, Narrow::Wrap, 14},
                       {"bytes", Align::Right},
                       {"sent", Align::Right}});
  for (const auto& part : parts_of(s, what.shown)) {
    if (part.rows.empty() && (part.phase == Phase::Build || part.phase == Phase::Background)) continue;
    if (part.rows.empty()) table.row({part.label, "-", "nothing moves", "", "-", "-"});
    std::string label = part.label;
    for (const auto& row : part.rows) {
      table.row({label, base::join(planning::name(row.event.what), ", ", row.event.purpose), how_text(row.event),
                 joined_units(row.units), bytes_text(row.event.bytes),
                 row.event.how == How::InPlace ? "-" : bytes_text(row.event.sent)});
      label.clear();
    }
  }
  return table.render(columns);
}

struct Totals {
  std::int64_t sent = 0, mapped = 0, read = 0, written = 0, copied = 0;
};

Totals totals_of(const Schedule& s, int step, Phase phase) {
  Totals t;
  for (const auto& event : s.events) {
    if (event.phase != phase || (phase != Phase::Build && event.step != step)) continue;
    if (event.how == How::InPlace)
      t.mapped += event.sent;
    else
      t.sent += event.sent;
    if (event.how == How::Read) t.read += event.bytes;
    if (event.how == How::Write) t.written += event.bytes;
    if (event.how == How::Copy) t.copied += event.bytes;
  }
  return t;
}

// Bytes of activations that a rank sends in a step; the second run of segments is a part of backward.
std::int64_t activations_sent(const Explained& what, std::int64_t accumulation, Phase phase) {
  std::int64_t sum = 0;
  for (const auto& e : what.exchanges)
    if (phase == Phase::Forward ? e.phase == "forward" : phase == Phase::Backward && e.phase != "forward")
      sum += e.bytes;
  return sum * accumulation;
}

std::string totals_text(const Schedule& s, const Explained& what, std::size_t columns) {
  const bool mesh = !what.exchanges.empty();
  std::vector<Column> header{{"phase"}, {mesh ? "sent by ZeRO" : "sent", Align::Right}};
  if (mesh) header.push_back({"of activations", Align::Right});
  for (const char* name : {"mapped instead", "file read", "file written", "copied"})
    header.push_back({name, Align::Right});
  report::Table table(header);
  const auto row = [&](const std::string& name, const Totals& t, std::int64_t activations) {
    std::vector<std::string> cells{name, bytes_text(t.sent)};
    if (mesh) cells.push_back(bytes_text(activations));
    for (const auto bytes : {t.mapped, t.read, t.written, t.copied}) cells.push_back(bytes_text(bytes));
    table.row(cells);
  };
  Totals all;
  std::int64_t activations = 0;
  for (const auto phase : {Phase::Forward, Phase::Backward, Phase::Step, Phase::Background}) {
    const auto t = totals_of(s, what.shown, phase);
    all.sent += t.sent, all.mapped += t.mapped, all.read += t.read, all.written += t.written, all.copied += t.copied;
    if (phase == Phase::Background && t.read + t.written + t.copied == 0) continue;
    const auto own = activations_sent(what, s.accumulation, phase);
    activations += own;
    row(planning::name(phase), t, own);
  }
  table.rule();
  row("whole step", all, activations);
  return table.render(columns);
}

// The states that collectives transfer, and those that they do not.
std::string movers_text(const Schedule& s, const Explained& what) {
  std::string moved, never;
  for (const auto state : {What::Parameters, What::Gradients, What::OptimizerStates}) {
    std::vector<std::string> ways;
    for (const auto& event : s.events)
      if (event.phase != Phase::Build && event.step == what.shown && event.what == state && is_collective(event.how) &&
          std::find(ways.begin(), ways.end(), how_text(event)) == ways.end())
        ways.push_back(how_text(event));
    auto& text = ways.empty() ? never : moved;
    text += (text.empty() ? "" : ", ") + std::string(planning::name(state));
    for (std::size_t i = 0; i < ways.size(); ++i) text += (i == 0 ? " (" : ", ") + ways[i];
    if (!ways.empty()) text += ")";
  }
  return base::join("Sent: ", moved.empty() ? "nothing" : moved, ". Not sent: ", never.empty() ? "-" : never, ".");
}

std::string fixed_times(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

// The bytes that are sharded over as many ranks: all of a model, or all but experts and experts.
struct PartBytes {
  std::int64_t parameters = 0, gradients = 0;  // gradients: as reductions send them
  std::int64_t padded_parameters = 0, padded_gradients = 0, persistent = 0;
};
std::map<int, PartBytes> parts_by_ranks(const Schedule& s) {
  std::map<int, PartBytes> parts;
  for (std::size_t u = 0; u < s.units.size(); ++u) {
    const auto& unit = s.units[u];
    const auto parameter = step::width(s.precision[u].param), gradient = step::width(s.precision[u].reduce);
    auto& part = parts[unit.layout.world()];
    part.parameters += unit.numel() * parameter;
    part.gradients += unit.numel() * gradient;
    part.padded_parameters += unit.padded_numel() * parameter;
    part.padded_gradients += unit.padded_numel() * gradient;
    if (unit.persistent) part.persistent += unit.padded_numel() * parameter;
  }
  return parts;
}

std::string volume_text(const Schedule& s, const Explained& what, std::size_t columns) {
  if (s.world == 1)
    return wrapped(what.ranks == 1 ? "With one rank nothing is sent."
                                   : "ZeRO sends nothing: no other rank has the same part of the model.",
                   columns);
  const auto v = volume_of(s, what);
  std::int64_t bytes = 0;
  std::string share;  // of P
  for (const auto& [ranks, part] : parts_by_ranks(s)) {
    const auto fraction = base::join("(", ranks - 1, "/", ranks, ")");
    bytes += part.parameters;
    share = what.experts.ep_size == 1
                ? "P x " + fraction
                : base::join(share, share.empty() ? "(" : " + ", part.parameters, " x ", fraction);
  }
  if (what.experts.ep_size > 1) share += ")";
  const bool mapped =
      std::any_of(s.events.begin(), s.events.end(), [](const auto& e) { return e.how == How::InPlace; });
  std::string text =
      base::join("Volume of a rank and step: ", v.sent, " bytes = ", fixed_times(v.times), " ", share,
                 mapped ? ", counting mapped reads as the all-gathers they replace" : "", "; P = ", bytes,
                 " bytes of parameters", what.products.empty() && what.experts.ep_size == 1 ? "" : " of a rank's part",
                 ". The papers' formula for this stage gives ", static_cast<std::int64_t>(v.paper + 0.5),
                 " bytes; with the padding of units (", s.padded_numel - what.parameters, " elements) ",
                 static_cast<std::int64_t>(v.padded + 0.5), ".");
  return wrapped(text, columns);
}

planning::Scheme scheme_of(int stage) {
  using planning::Scheme;
  constexpr Scheme kSchemes[] = {Scheme::Stage0, Scheme::Stage1, Scheme::Stage2, Scheme::Stage3};
  return kSchemes[stage];
}

Json event_json(const Event& e) {
  Json json = {{"step", e.step},
               {"micro_batch", e.micro},
               {"phase", planning::name(e.phase)},
               {"what", planning::name(e.what)},
               {"how", planning::name(e.how)},
               {"purpose", e.purpose},
               {"unit", e.unit},
               {"from", MemoryReport::name(e.from)},
               {"to", MemoryReport::name(e.to)},
               {"bytes", e.bytes},
               {"sent_bytes", e.sent}};
  if (e.quantized) json["quantized"] = true;
  if (e.neighbours) json["neighbours"] = true;
  return json;
}

}  // namespace

VolumeLine volume_of(const Schedule& s, const Explained& what) {
  VolumeLine line;
  for (const auto phase : {Phase::Forward, Phase::Backward, Phase::Step}) {
    const auto t = totals_of(s, what.shown, phase);
    line.sent += t.sent + t.mapped;
  }
  const double k = static_cast<double>(s.accumulation);
  double once = 0;
  for (const auto& [world, part] : parts_by_ranks(s)) {
    const double ranks = world;
    const auto volume = [&](std::int64_t parameters, std::int64_t gradients, std::int64_t persistent) {
      return planning::sent_bytes(scheme_of(s.stage), {.parameter_bytes = static_cast<double>(parameters),
                                                       .gradient_bytes = static_cast<double>(gradients),
                                                       .ranks = ranks,
                                                       .micro_steps = k,
                                                       .persistent_bytes = static_cast<double>(persistent)});
    };
    line.paper += volume(part.parameters, part.gradients, 0);
    line.padded += volume(part.padded_parameters, part.padded_gradients, part.persistent);
    once += static_cast<double>(part.parameters) * (ranks - 1) / ranks;
  }
  if (once > 0) line.times = static_cast<double>(line.sent) / once;
  return line;
}

std::string explain_text(const Schedule& s, const Explained& what, std::size_t columns) {
  std::string text = wrapped(
      base::join(what.title, ", ", what.recipe, ", ", what.optimizer, "; ", what.ranks,
                 what.ranks == 1 ? " rank" : " ranks", what.gpu ? " with a GPU each" : " on CPUs",
                 what.mesh.empty() ? "" : base::join(" = ", what.mesh, ", states sharded over ", s.world),
                 what.experts.ep_size > 1 ? base::join(", of experts over ", s.world / what.experts.ep_size) : "",
                 what.ranks == 1 ? "" : ", transport " + what.transport,
                 s.accumulation > 1 ? base::join("; gradients of ", s.accumulation, " micro-batches a step") : ""),
      columns);
  text += wrapped(base::join(what.model, ", in ", s.units.size(), " units"), columns);
  text += rule("Where states are stored: part per rank, tier, bytes", columns);
  text += holdings_text(s, what, columns);
  if (std::any_of(s.holdings.begin(), s.holdings.end(), [](const auto& h) { return h.passing; }))
    text += wrapped("* only from backward to the end of the step", columns);
  if (s.world > 1 && std::any_of(s.holdings.begin(), s.holdings.end(), [](const auto& h) { return h.sharded; }))
    text +=
        wrapped(base::join("1/", s.world, ": rank r of 0 to ", s.world - 1, what.mesh.empty() ? "" : " along dp and sp",
                           " keeps the r-th of ", s.world, " equal parts of every unit."),
                columns);
  if (!what.products.empty() || what.experts.ep_size > 1)
    text += wrapped("whole: all of this rank's part of the model", columns);
  if (what.experts.count > 0) {
    text += rule("Experts", columns);
    text += wrapped(experts_text(what.experts, what.expert_layers, s.world, what.data_before_experts), columns);
  }
  text += rule("Transfers of one optimizer step: bytes of all units, bytes sent by each rank", columns);
  text += moves_text(s, what, columns);
  if (!what.products.empty()) {
    text += rule("A layer's split products in one micro-batch: what is cut, and f and g", columns);
    text += products_text(what.products, columns);
  }
  if (!what.exchanges.empty()) {
    text += rule("Activations of one micro-batch, sent by each rank to ranks of its mesh", columns);
    text += exchanges_text(what.exchanges, columns);
  }
  text += rule("Totals for each rank", columns);
  text += totals_text(s, what, columns);
  text += "\n" + wrapped(movers_text(s, what), columns) + volume_text(s, what, columns);
  return text;
}

std::string live_text(const Schedule& s, const Activations& activations, const LiveRun& run,
                      const std::string& difference, std::size_t columns) {
  report::Table table({{"step"},
                       {"phase"},
                       {"operation", Align::Left, Narrow::Wrap, 10},
                       {"calls", Align::Right},
                       {"sent, scheduled", Align::Right},
                       {"sent, counted", Align::Right}});
  std::map<LiveRecord::Moment, std::vector<Event>> by_moment;
  for (const auto& event : s.events) by_moment[{event.step, event.micro, event.phase}].push_back(event);
  std::size_t events = 0;
  const std::size_t of = run.ranks.empty() || activations.empty() ? 0 : run.ranks.size() - 1;
  if (!run.ranks.empty()) {
    const auto& shown = run.ranks[of];
    events = shown.events.size();
    for (const auto& [moment, counted] : shown.sent) {
      auto all = expected_of(by_moment[moment], moment, &activations);
      const auto scheduled = all;
      for (const auto& [operation, row] : counted) all[operation];
      const bool building = std::get<2>(moment) == Phase::Build;
      for (const auto& [operation, row] : all) {
        const auto want = scheduled.count(operation) != 0 ? scheduled.at(operation) : planning::Sent{};
        const auto have = counted.count(operation) != 0 ? counted.at(operation) : planning::Sent{};
        table.row({building ? "-" : std::to_string(std::get<0>(moment) + 1), name_of(moment, s.accumulation), operation,
                   want.calls == have.calls ? std::to_string(have.calls) : base::join(want.calls, "/", have.calls),
                   std::to_string(want.bytes), std::to_string(have.bytes)});
      }
    }
  }
  std::string text =
      rule(base::join("What happened: ", run.overflowed.size(), " steps on ", run.ranks.size(),
                      run.ranks.size() == 1 ? " rank" : " ranks", " over ", run.transport, ", bytes of rank ", of),
           columns);
  text += table.rows() == 0 ? std::string("nothing was sent\n") : table.render(columns);
  text += difference.empty()
              ? wrapped(base::join("The run agrees with the schedule on every rank: ", events,
                                   " gathers, reductions, updates, copies, reads and writes, in the same order and "
                                   "with the same bytes, and the bytes stored between steps."),
                        columns)
              : wrapped("The run differs from the schedule: " + difference, columns);
  return text;
}

Json explain_json(const Schedule& s, const Explained& what) {
  Json units = Json::array(), holdings = Json::array(), events = Json::array(), totals = Json::object();
  for (const auto& u : s.units)
    units.push_back({{"name", u.name},
                     {"elements", u.numel()},
                     {"padded_elements", u.padded_numel()},
                     {"shard_elements", u.shard_numel()},
                     {"ranks", u.layout.world()},
                     {"trainable", u.trainable},
                     {"persistent", u.persistent}});
  for (const auto& h : s.holdings) {
    const auto cells = cells_of(s, what, h);
    holdings.push_back({{"state", h.state},
                        {"dtype", dtype_of(what, h.width, h.state)},
                        {"sharded", h.sharded},
                        {"ranks", h.ranks},
                        {"tier", MemoryReport::name(h.tier)},
                        {"bytes_a_rank", h.bytes},
                        {"between_steps", !h.passing},
                        {"units", h.units},
                        {"forward", cells.forward},
                        {"backward", cells.backward},
                        {"step", cells.step}});
  }
  for (const auto& e : s.events)
    if (e.phase == Phase::Build || e.step == what.shown) events.push_back(event_json(e));
  for (const auto phase : {Phase::Build, Phase::Forward, Phase::Backward, Phase::Step, Phase::Background}) {
    const auto t = totals_of(s, what.shown, phase);
    totals[planning::name(phase)] = {{"sent_bytes", t.sent},
                                     {"mapped_bytes", t.mapped},
                                     {"read_bytes", t.read},
                                     {"written_bytes", t.written},
                                     {"copied_bytes", t.copied}};
  }
  const auto v = volume_of(s, what);
  return {
      {"schema", "zero.explain/1"},
      {"title", what.title},
      {"stage", s.stage},
      {"recipe", what.recipe},
      {"optimizer", what.optimizer},
      {"model", what.model},
      {"world", what.ranks},
      {"mesh", what.mesh.empty() ? Json(nullptr) : Json(what.mesh)},
      {"sharded_over", s.world},
      {"split_products", products_json(what.products)},
      {"activations_of_a_micro_batch", exchanges_json(what.exchanges)},
      {"transport", what.transport},
      {"gpu", what.gpu},
      {"accumulation", s.accumulation},
      {"parameters_elements", what.parameters},
      {"padded_elements", s.padded_numel},
      {"units", units},
      {"holdings", holdings},
      {"events", events},
      {"totals", totals},
      {"volume",
       {{"sent_bytes", v.sent}, {"paper_bytes", v.paper}, {"padded_bytes", v.padded}, {"times_parameters", v.times}}}};
}

Json live_json(const Schedule& s, const LiveRun& run, const std::string& difference) {
  Json ranks = Json::array();
  for (const auto& rank : run.ranks) {
    Json events = Json::array(), sent = Json::array();
    for (const auto& e : rank.events)
      events.push_back({{"step", e.step},
                        {"micro_batch", e.micro},
                        {"phase", planning::name(e.phase)},
                        {"kind", name(lane_of(e))},
                        {"unit", e.unit},
                        {"bytes", e.bytes}});
    for (const auto& [moment, rows] : rank.sent)
      for (const auto& [operation, row] : rows)
        sent.push_back({{"step", std::get<0>(moment)},
                        {"phase", name_of(moment, s.accumulation)},
                        {"operation", operation},
                        {"calls", row.calls},
                        {"sent_bytes", row.bytes}});
    ranks.push_back({{"events", events}, {"sent", sent}});
  }
  return {{"agrees", difference.empty()},   {"difference", difference},  {"transport", run.transport},
          {"steps", run.overflowed.size()}, {"skipped", run.overflowed}, {"ranks", ranks}};
}

}  // namespace zero::cli
