// The sections of the page.
#include "tools/report/page/html_page.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "tools/report/page/chart_data.h"
#include "tools/report/page/html_parts.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

bool on_mesh(const Runs& runs) {
  return std::any_of(runs.begin(), runs.end(), [](const RunRecord& run) { return run.mesh.exchange_activations(); });
}

// Ranks that the table of all ranks shows of a run.
constexpr std::size_t kMostRanks = 64;

// "4 runs: stage 0, stage 1, stage 2 and stage 3", unless the list is too long.
std::string title_of(const Runs& runs) {
  if (runs.size() == 1) return runs[0].stage < 0 ? "The run " + runs[0].label : "A run at " + runs[0].label;
  std::string text = std::to_string(runs.size()) + " runs: ";
  for (std::size_t i = 0; i < runs.size(); ++i)
    text += (i == 0 ? "" : i + 1 == runs.size() ? " and " : ", ") + runs[i].label;
  return text.size() > 120 ? std::to_string(runs.size()) + " runs" : text;
}

std::string subtitle_of(const Runs& runs) {
  const RunRecord& r = runs[0];
  if (r.stage < 0) return "";
  std::string text = human_parameters(static_cast<double>(r.parameters)) + " parameters, " + r.recipe + ", " +
                     ranks_text(r) + " on " + (r.device == "cpu" ? "CPUs" : "GPUs") + " (" + r.transport + "), " +
                     grouped(static_cast<double>(r.tokens_per_step)) + " tokens a step; begun " + r.started;
  const bool equal = std::all_of(runs.begin(), runs.end(), [&](const RunRecord& o) {
    return o.parameters == r.parameters && o.recipe == r.recipe && o.world == r.world && o.mesh == r.mesh &&
           o.device == r.device && o.transport == r.transport && o.tokens_per_step == r.tokens_per_step;
  });
  if (equal) return text;
  text = "The runs differ in model, recipe, ranks or batch: see the tables. The first: " + text;
  if (!on_mesh(runs)) return text;
  for (std::size_t i = 0; i < runs.size(); ++i)
    text += (i == 0 ? ". Ranks: " : "; ") + runs[i].label + ": " + ranks_text(runs[i]);
  return text;
}

std::string summary_table(const Runs& runs) {
  HtmlTable table(
      "runs", "The runs in numbers: medians over all steps of the log, peaks of rank 0",
      {"run", "steps", "last loss", "held-out loss", "tokens per second", "step, ms", "peak memory", "sent per step"});
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunRecord& r = runs[i];
    const auto peak = highest_of(r, &StepPoint::memory_bytes), sent = median_of(r, &StepPoint::bytes_sent);
    table.row(
        r.label,
        {count(r.log.empty() ? 0 : static_cast<double>(r.log.back().step)), fixed("%.4f", last_of(r, &StepPoint::loss)),
         fixed("%.4f", r.heldout), grouped_or_none(median_of(r, &StepPoint::tokens_per_s)),
         fixed("%.2f", median_of(r, &StepPoint::step_ms)),
         peak ? bytes(static_cast<std::uint64_t>(*peak)) : Cell{"\u2013", ""},
         sent ? bytes(static_cast<std::uint64_t>(*sent)) : Cell{"\u2013", ""}},
        color_of_run(i));
  }
  return table.done();
}

// What the runs reached on their held-out parts; "" if they say nothing but the loss.
std::string metrics_table(const Runs& runs) {
  std::vector<std::string> names;
  for (const RunRecord& run : runs)
    for (const auto& [name, value] : run.metrics)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  if (names.empty()) return "";
  std::vector<std::string> columns{"run"};
  columns.insert(columns.end(), names.begin(), names.end());
  HtmlTable table("metrics", "The held-out part at the end of the runs", columns);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<Cell> cells;
    for (const std::string& name : names) {
      std::optional<double> found;
      for (const auto& [own, value] : runs[i].metrics)
        if (own == name) found = value;
      cells.push_back(fixed("%.4f", found));
    }
    table.row(runs[i].label, cells, color_of_run(i));
  }
  return table.done();
}

// Whether the loss scale changed; only then it is drawn.
bool scale_moves(const Runs& runs) {
  for (const RunRecord& run : runs)
    for (const StepPoint& point : run.log)
      if (point.loss_scale && *point.loss_scale != 1) return true;
  return false;
}

std::vector<std::pair<std::string, std::string>> purposes_shown(const Runs& runs) {
  std::vector<std::pair<std::string, std::string>> entries;
  const std::vector<std::string>* names = nullptr;
  for (const RunRecord& run : runs)
    if (!names && !run.purposes.empty()) names = &run.purposes;
  for (std::size_t p = 0; names && p < names->size(); ++p) {
    bool used = false;
    for (const RunRecord& run : runs) {
      for (const MemorySample& sample : run.samples) used = used || sample.bytes[p] > 0;
      for (const PhaseMemory& phase : run.phases)
        for (const auto& tier : phase.tiers)
          used = used || (tier.tier == "device" && bytes_of(tier.by_purpose, (*names)[p]) > 0);
    }
    if (used) entries.emplace_back("p" + std::to_string(p % 8), (*names)[p]);
  }
  return entries;
}

std::string memory_table(const Runs& runs) {
  const auto purposes = purposes_shown(runs);
  std::vector<std::string> header{"run, phase"};
  for (const auto& [color, name] : purposes) header.push_back(name);
  header.emplace_back("total");
  HtmlTable table("memory", "Device bytes of rank 0 at four moments of one step", header);
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (const PhaseMemory& phase : runs[i].phases) {
      const auto* tier = device_memory(phase.tiers);
      if (!tier) continue;
      std::vector<Cell> cells;
      for (const auto& [color, name] : purposes) cells.push_back(bytes(bytes_of(tier->by_purpose, name)));
      cells.push_back(bytes(sum_of(tier->by_purpose)));
      table.row(runs[i].label + ", " + phase.phase, cells, color_of_run(i));
      if (&phase != &runs[i].phases.back()) continue;
      cells.assign(purposes.size(), Cell{"", ""});
      cells.push_back(bytes(peak_of(runs[i].phases)));
      table.row(runs[i].label + ", peak", cells, color_of_run(i));
    }
  return table.done();
}

std::string lower_tiers_table(const Runs& runs) {
  HtmlTable table("tiers", "Bytes of rank 0 in lower tiers", {"run, phase", "tier", "bytes", "peak"});
  bool any = false;
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (const PhaseMemory& phase : runs[i].phases)
      for (const auto& tier : phase.tiers) {
        if (tier.tier == "device") continue;
        any = true;
        table.row(runs[i].label + ", " + phase.phase,
                  {{tier.tier, ""}, bytes(sum_of(tier.by_purpose)), bytes(tier.peak)}, color_of_run(i));
      }
  return any ? table.done() : "";
}

std::string memory_section(const Runs& runs) {
  std::string areas, out;
  for (std::size_t i = 0; i < runs.size(); ++i)
    if (!runs[i].samples.empty())
      areas += "<div><h3>" + html_text(runs[i].label) + "</h3>\n" +
               chart("area-" + std::to_string(i), runs[i].label + ": bytes by purpose over one step") + "</div>\n";
  if (!areas.empty())
    out += section("Memory over one step",
                   "Device bytes of rank 0 by purpose, on one scale for all runs. The dotted lines are the four "
                   "moments of the table: before forward, after forward, after backward (shaded), after step.",
                   legend(purposes_shown(runs)) + "<div class=\"pair\">" + areas + "</div>\n" +
                       details("The same as a table", memory_table(runs)));
  bool rest = false, planned = false;
  for (const RunRecord& run : runs)
    rest = rest || device_memory(run.phases, "before forward"), planned = planned || !run.planned.empty();
  if (!rest) return out;
  std::string body =
      legend(purposes_shown(runs)) + chart("rest", "Bytes at rest and at the peak") + lower_tiers_table(runs);
  if (areas.empty()) body += details("The same as a table", memory_table(runs));
  return out +
         section(
             "At rest and at the peak",
             std::string("Bars: what rank 0 holds between steps. The line continues to the highest sum within a step") +
                 (planned ? "; the diamond is the peak that was planned." : "."),
             body);
}

Cell difference(std::uint64_t planned, std::uint64_t measured) {
  if (planned == 0) return {measured == 0 ? "0 %" : "\u2013", ""};
  const double part = (static_cast<double>(measured) / static_cast<double>(planned) - 1) * 100;
  return {printed("%+.2f %%", part), printed("%.17g", part)};
}

std::string planned_section(const Runs& runs) {
  HtmlTable table("planned", "Rank 0: planned and measured", {"run, what", "planned", "measured", "difference"});
  HtmlTable purposes("planned purposes", "At rest, by purpose", {"run, purpose", "planned", "measured", "off"});
  bool any = false;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunRecord& run = runs[i];
    const auto* planned = device_memory(run.planned);
    const auto* rest = device_memory(run.phases, "before forward");
    if (!planned || !rest) continue;
    any = true;
    const AxisBytes sent = sent_by_axis(run);
    const auto p = sum_of(planned->by_purpose), m = sum_of(rest->by_purpose), peak = peak_of(run.phases);
    const auto row = [&](const std::string& what, std::uint64_t foreseen, std::uint64_t measured) {
      table.row(run.label + ", " + what, {bytes(foreseen), bytes(measured), difference(foreseen, measured)},
                color_of_run(i));
    };
    row("at rest", p, m);
    row("peak", planned->peak, peak);
    row("sent in a step", run.planned_sent.sum(), sent.sum());
    for (const Axis& axis : kAxes)
      if (axis.on(run.mesh)) row(std::string("sent by ") + axis.name, run.planned_sent.*axis.bytes, sent.*axis.bytes);
    for (const std::string& name : run.purposes) {
      const auto here = bytes_of(planned->by_purpose, name), there = bytes_of(rest->by_purpose, name);
      if (here + there > 0)
        purposes.row(run.label + ", " + name, {bytes(here), bytes(there), difference(here, there)}, color_of_run(i));
    }
  }
  if (!any) return "";
  return section("Planned and measured",
                 std::string("What zero plan foresees from the shape of the model alone, and what the recorded step "
                             "needed.") +
                     (on_mesh(runs) ? " On a mesh, the plan is of the rank with the largest part of the model." : ""),
                 table.done() + details("By purpose", purposes.done()));
}

std::string wire_section(const Runs& runs) {
  const auto operations = operations_of(runs);
  if (operations.empty()) return "";
  std::vector<std::string> header{"run"};
  std::vector<std::pair<std::string, std::string>> entries;
  for (std::size_t o = 0; o < operations.size(); ++o) {
    header.push_back(operations[o]);
    entries.emplace_back(color_of_operation(operations[o]), operations[o]);
  }
  header.insert(header.end(), {"all", "calls"});
  HtmlTable table("traffic", "Payload that one rank sends in one step, by collective", header);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<Cell> cells;
    std::uint64_t sum = 0, calls = 0;
    for (const std::string& operation : operations) {
      cells.push_back(bytes(sent_by(runs[i], operation)));
      sum += sent_by(runs[i], operation);
    }
    for (const TrafficRow& row : runs[i].traffic)
      if (row.operation != "control") calls += row.calls;
    cells.push_back(bytes(sum));
    cells.push_back(count(static_cast<double>(calls)));
    table.row(runs[i].label, cells, color_of_run(i));
  }
  return section(
      "Bytes on the wire",
      "Payload of the collectives of one step, by the volume of a ring; a rank receives as much as it sends.",
      legend(entries) + chart("wire", "Bytes sent in one step") + table.done());
}

bool any_experts(const Runs& runs) {
  return std::any_of(runs.begin(), runs.end(), [](const RunRecord& run) { return !run.loads.empty(); });
}

// Curves of the highest load and of dropped tokens, and a picture and a table of each layer.
std::string experts_section(const Runs& runs) {
  if (!any_experts(runs)) return "";
  std::string out = "<div class=\"two\">";
  out += section("Load of the busiest expert",
                 "Tokens that chose it, over the mean of its layer; the highest of all layers. 1 is even.",
                 legend_of_runs(runs) + chart("load", "Load of the busiest expert over steps") +
                     "<p class=\"note\" id=\"load-note\"></p>\n" +
                     curve_table(runs, "load", "Load of the busiest expert", &StepPoint::load_max, "%.3f"));
  out += section("Dropped choices", "The share of choices of experts that had no room left, of all layers.",
                 legend_of_runs(runs) + chart("dropped", "Dropped choices over steps") +
                     "<p class=\"note\" id=\"dropped-note\"></p>\n" +
                     curve_table(runs, "dropped", "Share of dropped choices", &StepPoint::dropped, "%.4f"));
  out += "</div>\n";
  HtmlTable table("experts", "Each layer's experts, over the last part of the run",
                  {"run, block", "from step", "to step", "choices", "busiest / mean", "least / mean", "dropped"});
  std::string pictures;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].loads.empty()) continue;
    const ExpertLoad& last = runs[i].loads.back();
    for (const LayerLoad& layer : last.layers) {
      const auto block = std::to_string(layer.block);
      const auto name = runs[i].label + ", block " + block;
      pictures += "<div><h3>" + html_text(name) + "</h3>\n" +
                  chart("experts-" + std::to_string(i) + "-" + block, name + ": tokens of each expert over the mean") +
                  "</div>\n";
      table.row(name,
                {count(static_cast<double>(last.first)), count(static_cast<double>(last.last)),
                 count(static_cast<double>(layer.sum())), fixed("%.3f", layer.max_over_mean()),
                 fixed("%.3f", layer.min_over_mean()), fixed("%.4f", layer.dropped())},
                color_of_run(i));
    }
  }
  return out + section("Experts",
                       "A row is an expert. The darker, the more tokens chose it: white none, half dark as many as the "
                       "mean of the layer, fully dark twice as many or more.",
                       "<div class=\"pair\">" + pictures + "</div>\n" + table.done());
}

std::string axes_section(const Runs& runs) {
  if (!on_mesh(runs)) return "";
  std::vector<std::pair<std::string, std::string>> entries;
  for (const Axis& axis : kAxes) entries.emplace_back(axis.color, axis.name);
  HtmlTable table("axes", "Bytes that rank 0 sends in one step",
                  {"run", kAxes[0].name, kAxes[1].name, kAxes[2].name, kAxes[3].name, "all"});
  HtmlTable meshes("meshes", "Rank (d * sp + i) * tp + j has the coordinates d, i and j",
                   {"run", "dp", "sp", "tp", "ep", "samples a step", "tokens a step", "parameters of the model",
                    "parameters of rank 0"});
  HtmlTable ranks(
      "ranks", "Every rank: coordinates, device bytes and bytes sent in one step",
      {"run, rank", "dp", "sp", "tp", "at rest", "peak", kAxes[0].name, kAxes[1].name, kAxes[2].name, kAxes[3].name});
  bool details_of_ranks = false;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunRecord& run = runs[i];
    const auto number = [](std::int64_t value) { return count(static_cast<double>(value)); };
    meshes.row(run.label,
               {number(run.mesh.data), number(run.mesh.sequence), number(run.mesh.tensor), number(run.mesh.expert),
                number(run.samples_per_step), number(run.tokens_per_step), number(run.parameters),
                run.own_parameters > 0 ? number(run.own_parameters) : Cell{"\u2013", ""}},
               color_of_run(i));
    if (!run.traffic.empty()) {
      const AxisBytes sent = sent_by_axis(run);
      table.row(run.label,
                {bytes(sent.zero), bytes(sent.tensor), bytes(sent.sequence), bytes(sent.expert), bytes(sent.sum())},
                color_of_run(i));
    }
    for (std::size_t k = 0; k < std::min(run.ranks.size(), kMostRanks); ++k) {
      const RankRow& rank = run.ranks[k];
      details_of_ranks = true;
      ranks.row(run.label + ", " + std::to_string(rank.rank),
                {number(rank.data), number(rank.sequence), number(rank.tensor), bytes(rank.at_rest), bytes(rank.peak),
                 bytes(rank.sent.zero), bytes(rank.sent.tensor), bytes(rank.sent.sequence), bytes(rank.sent.expert)},
                color_of_run(i));
    }
  }
  return section(
      "The mesh",
      "Tensor-parallel ranks hold different parts of each layer, sequence-parallel ranks different tokens of "
      "each sample; both see the same samples, so samples and tokens count data-parallel ranks. ZeRO shards "
      "over data- and sequence-parallel ranks, of which ep share the experts of a layer.",
      meshes.done() + legend(entries) + chart("axes", "Bytes sent in one step, by kind of parallelism") + table.done() +
          (details_of_ranks ? details("Every rank", ranks.done()) : ""));
}

std::string groups_section(const Runs& runs) {
  std::string body, tables;
  bool any = false, whole = false, tiers = false;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const GroupRows groups = group_rows(runs[i]);
    if (groups.rows.empty()) continue;
    any = true;
    for (const GroupSlice& slice : groups.slices)
      whole = whole || slice.kind == "who", tiers = tiers || slice.kind == "tie";
    body += "<h3>" + html_text(runs[i].label) + "</h3>\n" +
            chart("groups-" + std::to_string(i), runs[i].label + ": what each group did when");
    HtmlTable table("groups-" + std::to_string(i),
                    runs[i].label + ": milliseconds of step " + std::to_string(runs[i].recorded_step) + ", by group",
                    {"group", "gather or publish", "forward", "backward", "reduce", "update", "waits"});
    for (std::size_t row = 0; row < groups.rows.size(); ++row) {
      std::vector<Cell> cells;
      for (const char* kind : {"gat", "fwd", "bwd", "red", "upd", "wai"}) {
        const double ms = groups.total(row, kind);
        cells.push_back(ms > 0 ? Cell{printed("%.3f", ms), printed("%.17g", ms)} : Cell{"", ""});
      }
      table.row(groups.rows[row], cells);
    }
    tables += table.done();
  }
  if (!any) return "";
  std::vector<std::pair<std::string, std::string>> entries{{"fwd", "forward"}, {"bwd", "backward"},
                                                           {"upd", "update"},  {"gat", "gather or publish"},
                                                           {"red", "reduce"},  {"wai", "this rank stands still"}};
  if (whole) entries.insert(entries.begin(), {"who", "whole on this rank"});
  if (tiers) entries.push_back({"tie", "to or from a lower tier"});
  return section(
      "The groups in one step",
      "A row is a group of parameters that travels as one; the broad bars are compute on rank 0, the narrow ones its "
      "communication, which may run during the compute of other groups. The last row is what overlap did not hide.",
      legend(entries) + body + details("The same as tables", tables));
}

std::string configuration_section(const Runs& runs) {
  std::vector<std::string> header{"key"};
  for (const RunRecord& run : runs) header.push_back(run.label);
  HtmlTable differing("differing", "Keys in which the runs differ", header),
      common("configuration", "Keys that were set, and where", {"key", "value", "source"}),
      defaults("defaults", "Keys that kept their default", {"key", "value", "source"});
  std::size_t differ = 0, rows = 0;
  const auto find = [](const RunRecord& run, const std::string& key) -> const ConfigRow* {
    for (const ConfigRow& row : run.configuration)
      if (row.key == key) return &row;
    return nullptr;
  };
  for (const ConfigRow& row : runs[0].configuration) {
    bool same = true;
    for (const RunRecord& run : runs) {
      const ConfigRow* other = find(run, row.key);
      same = same && (!other || other->value == row.value);
    }
    if (same) {
      ++rows;
      (row.is_default ? defaults : common).row(row.key, {words(row.value), words(row.source)});
      continue;
    }
    ++differ;
    std::vector<Cell> cells;
    for (const RunRecord& run : runs) {
      const ConfigRow* other = find(run, row.key);
      cells.push_back(words(other ? other->value + " (" + other->source + ")" : "\u2013"));
    }
    differing.row(row.key, cells);
  }
  if (rows + differ == 0) return "";
  return section("Configuration", "Every value that was in force and where it came from.",
                 (differ > 0 ? differing.done() : "") + details("Keys that were set", common.done()) +
                     details("Defaults", defaults.done()));
}

std::string environment_section(const Runs& runs) {
  std::vector<std::string> header{"", runs.size() == 1 ? "this run" : "all runs"}, names;
  for (const RunRecord& run : runs)
    for (const auto* list : {&run.environment, &run.model})
      for (const auto& [name, value] : *list)
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  if (names.empty()) return "";
  const auto value_of = [](const RunRecord& run, const std::string& name) -> std::string {
    for (const auto* list : {&run.environment, &run.model})
      for (const auto& [other, value] : *list)
        if (other == name) return value;
    return "\u2013";
  };
  const auto command_of = [](const RunRecord& run) {
    std::string text = "zero";
    for (const std::string& word : run.command) text += " " + word;
    return text;
  };
  HtmlTable table("environment", "Machine, versions, model", header);
  for (const std::string& name : names) {
    std::string text = value_of(runs[0], name);
    const bool same =
        std::all_of(runs.begin(), runs.end(), [&](const RunRecord& run) { return value_of(run, name) == text; });
    if (!same) {
      text.clear();
      for (const RunRecord& run : runs) text += (text.empty() ? "" : "; ") + run.label + ": " + value_of(run, name);
    }
    table.row(name, {words(text)});
  }
  HtmlTable commands("commands", "How each run was started", {"run", "command", "folder", "text"});
  for (std::size_t i = 0; i < runs.size(); ++i)
    commands.row(runs[i].label, {words(command_of(runs[i])), words(runs[i].folder), words(runs[i].text)},
                 color_of_run(i));
  return section("Environment", "Where the runs ran.", table.done() + commands.done());
}

}  // namespace

std::string html_page(const Runs& records) {
  Runs runs = records;
  share_purposes(runs);
  std::string out = html_head("zero report: " + title_of(runs)) + "<body><main>\n<h1>" + html_text(title_of(runs)) +
                    "</h1>\n<p>" + html_text(subtitle_of(runs)) + "</p>\n";
  out +=
      "<noscript><p>The charts need a script that is part of this file; the tables show the same numbers without "
      "it.</p></noscript>\n";
  out += "<section>" + summary_table(runs) + metrics_table(runs) + "</section>\n";
  std::string thinned;
  for (const RunRecord& run : runs)
    if (run.log.size() > kMostPoints) thinned = " Long runs are drawn as means of neighbouring steps.";
  out += "<div class=\"two\">";
  const std::string unit = loss_unit(runs);
  out += section("Training loss", "Mean over all ranks of each step, in " + unit + "." + thinned,
                 legend_of_runs(runs) + chart("loss", "Training loss over steps") +
                     "<p class=\"note\" id=\"loss-note\"></p>\n" +
                     curve_table(runs, "loss", "Training loss, " + unit, &StepPoint::loss, "%.5f"));
  out +=
      section("Throughput", "Tokens of all ranks per second, as a running median.",
              legend_of_runs(runs) + chart("throughput", "Tokens per second over steps") +
                  "<p class=\"note\" id=\"throughput-note\"></p>\n" +
                  curve_table(runs, "throughput", "Tokens per second, of each step", &StepPoint::tokens_per_s, "%.0f"));
  out += "</div>\n<div class=\"two\">";
  const bool moves = scale_moves(runs);
  out += curve_card("lr", "Learning rate",
                    std::string("What each step used.") + (moves ? "" : " The loss scale was 1 throughout."),
                    curve_table(runs, "lr", "Learning rate", &StepPoint::lr, "%.6g"));
  out += curve_card("norm", "Gradient norm", "Of all parameters, before clipping; a gap where it was not finite.",
                    curve_table(runs, "norm", "Gradient norm", &StepPoint::grad_norm, "%.5g"));
  if (moves)
    out += curve_card("scale", "Loss scale",
                      "The factor that keeps fp16 gradients above zero; it halves after an overflow.",
                      curve_table(runs, "scale", "Loss scale", &StepPoint::loss_scale, "%.6g"));
  if (std::any_of(runs.begin(), runs.end(),
                  [](const RunRecord& run) { return highest_of(run, &StepPoint::heldout_loss).has_value(); }))
    out += curve_card("heldout", "Held-out loss", "Of evaluations between steps, in " + unit + ".",
                      curve_table(runs, "heldout", "Held-out loss, " + unit, &StepPoint::heldout_loss, "%.5f"));
  out += "</div>\n";
  out += experts_section(runs) + axes_section(runs) + memory_section(runs) + wire_section(runs) + groups_section(runs) +
         planned_section(runs) + configuration_section(runs) + environment_section(runs);
  out +=
      "<footer>Written by zero report. One step of each run was recorded in detail; docs/report.md tells how to read "
      "the pictures.</footer>\n";
  out += "</main>\n<script type=\"application/json\" id=\"data\">" + chart_json(runs) + "</script>\n<script>\n" +
         page_script() + "</script>\n</body></html>\n";
  return out;
}

}  // namespace zero::report
