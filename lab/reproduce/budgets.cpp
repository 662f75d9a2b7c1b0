// What fits a budget of memory: DDP compared with FSDP by size, the largest model of each stage, and of each tier. A
// budget is the configuration's block `memory`, which the planner and the ranks decide by the same code; a run that
// would exceed it is refused with exit code 4 and the smallest budget that works.
#include <cmath>
#include <limits>

#include "base/check.h"
#include "lab/reproduce/gpt_runs.h"
#include "plan/formulas.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::string size_text(double parameters) { return report::human_count(parameters); }

// The engine's words end with a hint of the smallest budget.
std::string first_part(const std::string& reason) {
  const auto end = reason.find(" Hint:");
  const auto text = reason.substr(0, std::min<std::size_t>(end, 400));
  const auto at = text.rfind("memory.device: got");
  const auto begin = at == std::string::npos ? 0 : at;
  return text.substr(begin, text.find(" with everything", begin) - begin);
}

Json json_of_largest(const Largest& found) {
  return {{"planned_layers", found.planned_layers},
          {"layers", found.layers},
          {"parameters_elements", found.parameters},
          {"next_parameters_elements", found.next_parameters},
          {"peak_bytes", found.layers > 0 ? Json(found.trained.peak_bytes()) : Json(nullptr)},
          {"refusal", found.refusal}};
}

}  // namespace

Record reproduce_ddp_vs_fsdp(Study& study) {
  Record record;
  record.question =
      "Up to which size does data parallelism with a whole copy on each rank (DDP: stage 0) fit, and what does "
      "sharding "
      "everything (FSDP: stage 3) cost where both fit? (Lecture notes on FSDP: T5 of 611 M, 2.28 B and 11.3 B "
      "parameters on 8 to 512 A100; Zhao et al., arXiv:2304.11277, figure 6.)";
  GptRun run;
  run.gpt = {.layers = 1, .hidden = 128, .heads = 4, .sequence = 128};
  run.ranks = 2, run.batch = 1, run.steps = study.quick ? 3 : 6;
  run.device_budget = study.quick ? 6'000'000 : 112'000'000;
  std::vector<std::int64_t> sizes{6, 12, 24, 48, 72};
  if (study.quick) {
    run.gpt.hidden = 32, run.gpt.heads = 2, run.gpt.sequence = 32;
    sizes = {8, 16, 32};
  }
  RecordTable tables[2];
  for (int side = 0; side < 2; ++side)
    tables[side] = {
        base::join(side == 0 ? "DDP" : "FSDP", " within ", megabytes(static_cast<double>(run.device_budget)),
                   " MB a rank: the plan, and what ranks did"),
        {"parameters", "planned peak MB", "fits by plan", "ranks", "peak MB", "ms a step", "GFLOP/s a rank"},
        {}};
  report::Chart chart;
  chart.title = "Speed of a rank by size of the model", chart.y_name = "GFLOP/s a rank";
  chart.x_name = "parameters", chart.absent = "does not fit";
  chart.series = {{"DDP (stage 0)"}, {"FSDP (stage 3)"}};
  Json rows = Json::array();
  double ratio_sum = 0;
  int both = 0;
  std::string last_ddp, first_refused;
  for (const auto layers : sizes) {
    run.gpt.layers = layers;
    const auto parameters = static_cast<double>(run.parameters());
    const auto tokens = static_cast<double>(run.batch * run.gpt.sequence);
    const auto size = size_text(parameters);
    Json row = {{"parameters_elements", run.parameters()}};
    chart.categories.push_back(size);
    double ms[2] = {kNone, kNone};
    for (int side = 0; side < 2; ++side) {
      run.stage = side == 0 ? 0 : 3;
      auto unlimited = run;
      unlimited.device_budget = 0;
      const auto planned = plan_of(unlimited, study.folder).memory.peak(MemoryReport::Tier::Device);
      const bool fits = fits_by_plan(run, study.folder);
      const auto trained = train(study, base::join(side == 0 ? "ddp-" : "fsdp-", layers, "-layers"), run, true);
      std::vector<std::string> cells{size, megabytes(static_cast<double>(planned)), fits ? "yes" : "no"};
      double speed = kNone;
      if (trained.refused) {
        cells.insert(cells.end(), {"refused", "-", "-", "-"});
      } else {
        ms[side] = trained.median_step_s() * 1e3;
        speed = 6 * parameters * tokens / ms[side] / 1e6;
        cells.insert(cells.end(), {"trained", megabytes(static_cast<double>(trained.peak_bytes())), fixed(ms[side], 0),
                                   fixed(speed, 1)});
        if (side == 0) last_ddp = size;
      }
      if (side == 0 && trained.refused && first_refused.empty()) first_refused = size;
      tables[side].rows.push_back(std::move(cells));
      chart.series[static_cast<std::size_t>(side)].y.push_back(speed);
      row[side == 0 ? "ddp" : "fsdp"] = {
          {"planned_peak_bytes", planned},
          {"planned_fits", fits},
          {"refused", trained.refused},
          {"reason", first_part(trained.reason)},
          {"peak_bytes", trained.refused ? Json(nullptr) : Json(trained.peak_bytes())},
          {"step_s", trained.refused ? Json(nullptr) : Json(trained.median_step_s())},
          {"cpu_seconds", trained.cpu_seconds},
          {"last_loss", trained.refused ? Json(nullptr) : trained.steps.back().at("loss")}};
    }
    if (std::isfinite(ms[0]) && std::isfinite(ms[1])) ratio_sum += ms[0] / ms[1], ++both;
    study.trials.tell(base::join(size, ": DDP ", tables[0].rows.back()[3], ", FSDP ", tables[1].rows.back()[3]));
    rows.push_back(std::move(row));
  }
  record.setup = base::join("GPTs of hidden ", run.gpt.hidden, " with ", sizes.front(), " to ", sizes.back(),
                            " layers, bf16, AdamW, ", run.batch, " x ", run.gpt.sequence, " tokens a rank, ", run.ranks,
                            " ranks of one thread; a budget of ", megabytes(static_cast<double>(run.device_budget)),
                            " MB a rank and no other memory");
  record.tables = {tables[0], tables[1]};
  record.charts = {chart};
  record.comparisons = {
      {"sizes where DDP runs; where it does not any more", "611 M and 2.28 B; 11.3 B (80 GB a GPU)",
       base::join("up to ", last_ddp.empty() ? "none" : last_ddp, "; ", first_refused.empty() ? "none" : first_refused,
                  " (", megabytes(static_cast<double>(run.device_budget)), " MB a rank)"),
       "DDP needs 16 bytes a parameter on every rank, FSDP 16/N: 11.3 B are 181 GB of states, more than any one GPU of "
       "theirs had. With two ranks FSDP reaches twice DDP's size, with 8 or more theirs reached many times it."},
      {"speed of FSDP, of DDP's, where both fit", "about 1", both == 0 ? "-" : fixed(ratio_sum / both, 2),
       "Their network hides the all-gathers behind computation; here the two ranks read each other's shards in "
       "place."}};
  record.notes = {
      "The refused runs ended at start-up with exit code 4. Speed is 6 x parameters x tokens over the median "
      "step, wall time of two ranks on two cores; it says nothing about more ranks."};
  record.data = {{"budget_bytes", run.device_budget}, {"ranks", run.ranks}, {"rows", rows}};
  return record;
}

Record reproduce_largest_model(Study& study) {
  Record record;
  record.question =
      "How large can a model be at each stage within one budget a rank? (ZeRO, arXiv:1910.02054, table 2, first row; "
      "found by the planner, then trained for three steps, and one layer more refused.)";
  GptRun run;
  run.gpt = {.layers = 1, .hidden = 64, .heads = 4, .sequence = 64};
  run.ranks = study.quick ? 2 : 4, run.batch = 1, run.steps = 3;
  run.device_budget = study.quick ? 4'000'000 : 24'000'000;
  if (study.quick) run.gpt.hidden = 32, run.gpt.heads = 2, run.gpt.sequence = 16;
  const auto ranks = static_cast<double>(run.ranks), budget = static_cast<double>(run.device_budget);
  RecordTable table{
      base::join("The largest GPT that trains within ", megabytes(budget), " MB a rank on ", run.ranks, " ranks"),
      {"stage", "by states alone", "planned", "trained", "of states alone", "of stage 0", "peak MB", "one layer more"},
      {}};
  report::Chart chart;
  chart.title = base::join("The largest model within ", megabytes(budget), " MB a rank, ", run.ranks, " ranks");
  chart.y_name = "million parameters";
  chart.series = {{"by states alone (formula)", {}, {}, true}, {"trained"}};
  Json rows = Json::array();
  double first = 0;
  std::string ours, formula_ratios, parts;
  for (int stage = 0; stage < 4; ++stage) {
    run.stage = stage;
    const auto formula = planning::most_parameters(planning::kMixedAdam, stage, budget, ranks);
    const auto found = find_largest(study, base::join("stage-", stage), run, 4096);
    auto planned = run;
    planned.gpt.layers = std::max<std::int64_t>(1, found.planned_layers);
    const auto most = static_cast<double>(found.parameters);
    if (stage == 0) first = most;
    table.rows.push_back({std::to_string(stage), size_text(formula),
                          size_text(static_cast<double>(planned.parameters())), size_text(most),
                          fixed(100 * most / formula, 1) + " %", first > 0 ? fixed(most / first, 2) : "-",
                          found.layers > 0 ? megabytes(static_cast<double>(found.trained.peak_bytes())) : "-",
                          found.refusal.empty() ? "fits" : "refused"});
    chart.categories.push_back("stage " + std::to_string(stage));
    chart.series[0].y.push_back(formula / 1e6);
    chart.series[1].y.push_back(most / 1e6);
    study.trials.tell(base::join("stage ", stage, ": ", table.rows.back()[3], " parameters trained, ",
                                 size_text(static_cast<double>(found.next_parameters)), " ", table.rows.back()[7]));
    ours += (stage == 0 ? "" : ", ") + table.rows.back()[5];
    parts += (stage == 0 ? "" : ", ") + table.rows.back()[4];
    formula_ratios += (stage == 0 ? "" : ", ") + fixed(formula / (budget / 16), 2);
    Json row = json_of_largest(found);
    row["stage"] = stage, row["formula_parameters"] = formula;
    rows.push_back(std::move(row));
  }
  record.setup = base::join("GPTs of hidden ", run.gpt.hidden, ", sequence ", run.gpt.sequence,
                            ", that grow by layers; bf16, AdamW, one sample a rank, ", run.ranks,
                            " ranks; all bytes of the ledger count, activations and buffers too");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"largest models at stages 0 to 3, of stage 0's", "1, 3.82, 7.21, 64 (64 ranks: 2, 7.6, 14.4, 128 B)", ours,
       base::join("By the formula 1, 16/(4 + 12/N), 16/(2 + 14/N) and N: with ", run.ranks, " ranks ", formula_ratios,
                  ". The rest of a rank's memory, activations and buffers, grows with the layers but is not sharded.")},
      {"measured, of what states alone allow", "65 % (baseline), 82 % (stage 1)", parts,
       "Theirs includes activations, fragmentation and buffers of a fixed size in 32 GB; here all of it is "
       "counted, and one sample of few tokens needs less."}};
  record.notes = {
      "`zero plan --paper table2 --measure` finds the same by measured peaks without a budget, with tensor "
      "parallelism too (docs/planner.md)."};
  record.data = {{"budget_bytes", run.device_budget}, {"ranks", run.ranks}, {"rows", rows}};
  return record;
}

Record reproduce_offload(Study& study) {
  Record record;
  record.question =
      "How much larger can a model be with host memory (ZeRO-Offload, arXiv:2101.06840) and with files (ZeRO-Infinity, "
      "arXiv:2104.07857, figure 1)?";
  GptRun run;
  run.gpt = {.layers = 1, .hidden = study.quick ? 32 : 96, .heads = study.quick ? 2 : 4, .sequence = 32};
  run.ranks = 2, run.batch = 1, run.steps = 2, run.reserves = true, run.checkpoints = true;
  const std::int64_t device = study.quick ? 2'000'000 : 12'000'000;
  struct Row {
    const char* name;
    int stage;
    std::int64_t host, file;  // in devices
  };
  const Row rows[] = {
      {"DDP, device", 0, 0, 0}, {"ZeRO 3, device", 3, 0, 0}, {"+ host memory", 3, 4, 0}, {"+ files", 3, 4, 8}};
  RecordTable table{base::join("The largest GPT within ", megabytes(static_cast<double>(device)),
                               " MB of device memory a rank, 4 times as much host memory and 8 times as much file"),
                    {"states may be", "planned", "trained", "of DDP", "device MB", "host MB", "file MB", "s a step",
                     "one layer more"},
                    {}};
  report::Chart chart;
  chart.title = "The largest model by the tiers that its states may use", chart.y_name = "million parameters";
  chart.series = {{"trained"}};
  Json list = Json::array();
  double first = 0;
  std::string ours;
  for (std::size_t i = 0; i < std::size(rows); ++i) {
    const auto& row = rows[i];
    run.stage = row.stage, run.device_budget = device;
    run.host_budget = row.host * device, run.file_budget = row.file * device;
    // Parameters that are small enough stay in host memory by DeepSpeed's default.
    const auto found = find_largest(study, base::join("tiers-", i + 1), run, 8192);
    auto planned = run;
    planned.gpt.layers = std::max<std::int64_t>(1, found.planned_layers);
    const auto most = static_cast<double>(found.parameters);
    if (i == 0) first = most;
    const auto phase_most = [&](const char* key) {
      double highest = 0;
      if (found.layers > 0)
        for (const auto& phase : found.trained.result.at("memory")) highest = std::max(highest, phase.value(key, 0.0));
      return highest;
    };
    table.rows.push_back({row.name, size_text(static_cast<double>(planned.parameters())), size_text(most),
                          first > 0 ? fixed(most / first, 2) : "-", megabytes(phase_most("peak_bytes")),
                          megabytes(phase_most("host_peak_bytes")), megabytes(phase_most("file_bytes")),
                          found.layers > 0 ? fixed(found.trained.median_step_s(), 2) : "-",
                          found.refusal.empty() ? "fits" : "refused"});
    chart.categories.emplace_back(row.name);
    chart.series[0].y.push_back(most / 1e6);
    study.trials.tell(base::join(row.name, ": ", table.rows.back()[2], " parameters"));
    ours += (i == 0 ? "" : ", ") + table.rows.back()[3];
    Json one = json_of_largest(found);
    one["name"] = row.name, one["stage"] = row.stage;
    one["device_budget_bytes"] = device, one["host_budget_bytes"] = run.host_budget;
    one["file_budget_bytes"] = run.file_budget;
    list.push_back(std::move(one));
  }
  record.setup = base::join("GPTs of hidden ", run.gpt.hidden, " that grow by layers; bf16, AdamW, one sample of ",
                            run.gpt.sequence, " tokens a rank, activation checkpointing, ", run.ranks, " ranks");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"largest models, of DDP's", "1.4 B with DDP on one V100; 13 B (9.3x) with ZeRO-Offload; a DGX-2: 1 T with files",
       ours,
       "What counts is the memory in addition to the device's: theirs had 1.5 TB of host memory for 32 GB GPUs and 28 "
       "TB of "
       "NVMe. Here the host has 4 times and the file 8 times the device's budget. 12 of 16 bytes a parameter may leave "
       "the "
       "device in ZeRO-Offload, all of them in ZeRO-Infinity."}};
  record.notes = {
      "A rank's device, host and file bytes are counted by its ledger; on CPUs device and host are the same "
      "RAM. script/larger-than-memory shows the same under a limit of the kernel.",
      "The plan's peak of a step is about 3 % above the measured one, so where states fill the device's budget to the "
      "last "
      "bytes the plan stops at a smaller model than ranks train.",
      "Time of a step is of ranks whose states are in files of this machine's disk; no speed is claimed."};
  record.data = {{"ranks", run.ranks}, {"rows", list}};
  return record;
}

}  // namespace zero::cli
