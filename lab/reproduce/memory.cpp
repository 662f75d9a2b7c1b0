// Bytes of the stages: the homework's table of six configurations at four moments of an iteration, and ZeRO's figure 1.
#include <cmath>
#include <limits>

#include "base/check.h"
#include "lab/reproduce/gpt_runs.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

constexpr const char* kMoments[] = {"before_forward", "after_forward", "after_backward", "after_step"};

struct HomeworkRow {
  const char *name, *recipe;
  int stage;
  bool optimizer_away, parameters_away;
  double theirs[4];  // bytes, as the homework gives them
};

// The homework: `torch.cuda.memory_allocated()` of six commands.
constexpr HomeworkRow kHomework[] = {
    {"1: ZeRO 1", "fp32", 1, false, false, {10179905024., 20256247568., 10179905024., 10179905024.}},
    {"2: ZeRO 2", "fp32", 2, false, false, {5477366272., 15553698816., 5477366272., 5477366272.}},
    {"3: ZeRO 2, offload", "fp32", 2, true, false, {4953077760., 15029409792., 4953077760., 4953077760.}},
    {"4: ZeRO 3", "fp32", 3, false, false, {5540048384., 18918346752., 5803241472., 5540048384.}},
    {"5: ZeRO 3, offload", "fp32", 3, true, true, {3602097152., 16946578432., 3865513472., 3602097152.}},
    {"6: ZeRO 3, fp16", "fp16", 3, false, false, {2617984000., 9385241600., 2749418496., 3394085376.}}};

GptRun homework_run(const HomeworkRow& row, bool quick) {
  GptRun run;
  run.gpt = quick ? models::GptConfig{.layers = 2, .hidden = 64, .heads = 2, .sequence = 32}
                  : models::GptConfig{.layers = 6, .hidden = 192, .heads = 6, .sequence = 128};
  run.recipe = row.recipe, run.stage = row.stage;
  run.batch = quick ? 2 : 4, run.steps = quick ? 4 : 20;
  if (row.recipe == std::string("fp16")) run.more["fp16"]["initial_scale_power"] = 12;
  if (row.optimizer_away) run.more["zero_optimization"]["offload_optimizer"]["device"] = "cpu";
  if (row.parameters_away) run.more["zero_optimization"]["offload_param"]["device"] = "cpu";
  return run;
}

// What docs/memory.md expects on the device between steps.
double resting_bytes(const HomeworkRow& row, double parameters, double ranks) {
  const double p = row.recipe == std::string("fp32") ? 4 : 2, states = row.recipe == std::string("fp32") ? 8 : 12;
  const double g = row.optimizer_away ? 0 : p;  // gradients go to the host with the optimizer
  return parameters * ((row.parameters_away ? 0 : p / (row.stage >= 3 ? ranks : 1)) + g / (row.stage >= 2 ? ranks : 1) +
                       (row.optimizer_away ? 0 : states / ranks));
}

// Device bytes by moment of every iteration; before the first forward there is no line to read.
struct Iteration {
  double bytes[4];
};
std::vector<Iteration> iterations_of(const Trained& trained) {
  std::vector<Iteration> all;
  double before = std::numeric_limits<double>::quiet_NaN();
  for (const auto& step : trained.steps) {
    if (!step.contains("memory")) continue;
    Iteration one{{before, 0, 0, 0}};
    for (int m = 1; m < 4; ++m) one.bytes[m] = step.at("memory").at(kMoments[m]).at("bytes").get<double>();
    before = one.bytes[3];
    all.push_back(one);
  }
  return all;
}

}  // namespace

Record reproduce_homework(Study& study) {
  Record record;
  record.question =
      "How much memory does each of six configurations hold before forward, after forward, after backward and after "
      "step, and how long do 20 iterations take? (A homework on DeepSpeed; its "
      "model "
      "and its number of GPUs are not in it.)";
  RecordTable ours{
      "Device MB of rank 0 in the last iteration, and host MB; formula: of docs/memory.md, after step",
      {"configuration", "formula", "before forward", "after forward", "after backward", "after step", "on the host"},
      {}};
  RecordTable times{
      "Time of the iterations", {"configuration", "iterations", "s", "CPU s", "skipped", "last loss"}, {}};
  RecordTable theirs{"The homework's table, in GB",
                     {"configuration", "before forward", "after forward", "after backward", "after step"},
                     {}};
  RecordTable shapes{"What forward adds, of what it adds at stage 1", {"configuration", "homework", "here"}, {}};
  report::Chart chart;
  chart.title = "Device bytes of rank 0 at four moments of an iteration", chart.y_name = "MB";
  for (const char* moment : kMoments) {
    std::string name = moment;
    std::replace(name.begin(), name.end(), '_', ' ');
    chart.series.push_back({name});
  }
  Json runs = Json::array();
  double added[6] = {}, before[6] = {}, after[6] = {};
  std::int64_t repeated = 0;
  GptRun first;
  for (std::size_t i = 0; i < std::size(kHomework); ++i) {
    const auto& row = kHomework[i];
    const auto run = homework_run(row, study.quick);
    if (i == 0) first = run;
    const auto trained = train(study, "configuration-" + std::to_string(i + 1), run);
    const auto& memory = trained.result.at("memory");
    const auto total = [&](const char* moment) { return memory.at(moment).at("total_bytes").get<double>(); };
    const auto formula = resting_bytes(row, static_cast<double>(run.parameters()), run.ranks);
    const auto iterations = iterations_of(trained);
    Json list = Json::array();
    for (std::size_t k = 0; k < iterations.size(); ++k) {
      list.push_back(Json::array());
      for (const double bytes : iterations[k].bytes)
        list.back().push_back(std::isfinite(bytes) ? Json(bytes) : Json(nullptr));
      const auto same = [&](int m) { return iterations[k].bytes[m] == iterations[k - 1].bytes[m]; };
      if (k > 1 && same(0) && same(1) && same(3)) ++repeated;
    }
    before[i] = total(kMoments[0]), added[i] = total(kMoments[1]) - before[i], after[i] = total(kMoments[3]);
    std::vector<std::string> cells{row.name, megabytes(formula)};
    std::vector<std::string> cells_of_theirs{row.name};
    chart.categories.emplace_back(std::string(row.name).substr(3));
    for (int m = 0; m < 4; ++m) {
      cells.push_back(megabytes(total(kMoments[m])));
      cells_of_theirs.push_back(fixed(row.theirs[m] / 1e9, 2));
      chart.series[static_cast<std::size_t>(m)].y.push_back(total(kMoments[m]) / 1e6);
    }
    const auto& last = trained.steps.back();
    cells.push_back(megabytes(memory.at(kMoments[0]).at("host_bytes").get<double>()));
    times.rows.push_back({row.name, std::to_string(run.steps), fixed(trained.result.at("seconds").get<double>(), 1),
                          fixed(trained.cpu_seconds, 1), trained.result.at("skipped_steps").dump(),
                          last.at("loss").is_number() ? fixed(last.at("loss").get<double>(), 4) : std::string("-")});
    study.trials.tell(base::join(row.name, ": ", cells[2], " ", cells[3], " ", cells[4], " ", cells[5], " MB, ",
                                 times.rows.back()[2], " s"));
    ours.rows.push_back(std::move(cells));
    theirs.rows.push_back(std::move(cells_of_theirs));
    shapes.rows.push_back(
        {row.name, fixed((row.theirs[1] - row.theirs[0]) / (kHomework[0].theirs[1] - kHomework[0].theirs[0]), 3),
         fixed(added[i] / added[0], 3)});
    runs.push_back({{"name", row.name},
                    {"stage", row.stage},
                    {"recipe", row.recipe},
                    {"optimizer_on_host", row.optimizer_away},
                    {"parameters_on_host", row.parameters_away},
                    {"formula_bytes", formula},
                    {"memory", memory},
                    {"iterations_bytes", list},
                    {"seconds", trained.result.at("seconds")},
                    {"cpu_seconds", trained.cpu_seconds},
                    {"skipped_steps", trained.result.at("skipped_steps")},
                    {"theirs_bytes", row.theirs}});
  }
  record.setup = base::join("GPT of ", report::human_count(static_cast<double>(first.parameters())), " parameters (",
                            shape_text(first.gpt), "), ", first.ranks, " ranks, ", first.batch, " x ",
                            first.gpt.sequence, " tokens a rank, AdamW, ", first.steps, " iterations");
  record.tables = {ours, theirs, times, shapes};
  record.charts = {chart};
  const auto percent = [](double a, double b) { return fixed(100 * (a / b - 1), 1) + " %"; };
  record.comparisons = {
      {"what forward adds at stage 2, and at stage 2 with offload, compared with stage 1", "0.0 % and 0.0 %",
       percent(added[1], added[0]) + " and " + percent(added[2], added[0]),
       "Activations do not depend on the stage or on where states are. At stage 3 forward adds more in the homework, "
       "as "
       "unsharded parameters stay in memory; between processes of one host they are read in place here and cost "
       "nothing."},
      {"stage 2 after step, of stage 1's", "0.54", fixed(after[1] / after[0], 2),
       "fp32 and N ranks: (4 + 12/N) / (8 + 8/N) bytes a parameter, 0.83 on two ranks and towards 0.5 on many."},
      {"stage 3 in fp16, of stage 3 in fp32, what forward adds", "0.51", fixed(added[5] / added[3], 2),
       "16-bit activations are half as large; what stays in fp32, such as the loss, is small."},
      {"stage 3 in fp16 after the step, of before forward", "1.30", fixed(after[5] / before[5], 2),
       "Optimizers of torch make their states in the first step; here they exist from the start."}};
  record.notes = {
      base::join(
          "Before forward, after forward and after step, bytes were the same in ", repeated, " of ",
          static_cast<std::int64_t>(std::size(kHomework)) * (first.steps - 2),
          " iterations from the third on. After backward they differ by a reduce buffer, whose reuse depends on "
          "timing. At stage 1 the memory of gradients is kept after step, for the next backward; the reading before "
          "forward has returned it."),
      "The homework's jobs ended at a time limit before 20 epochs; here all iterations of all configurations ran."};
  record.data = {{"parameters_elements", first.parameters()}, {"ranks", first.ranks}, {"runs", runs}};
  return record;
}

Record reproduce_stages(Study& study) {
  Record record;
  record.question =
      "How much of the model states does a rank hold at each stage, and what does it send? (ZeRO, arXiv:1910.02054, "
      "figure 1 and table 1, section 7; lecture notes: \"4x, 8x, linear\".)";
  const std::string ranks = "2";
  std::vector<std::string> words{"bench", "stages", "--json", "--quiet", "--world", ranks, "--iterations", "3"};
  if (study.quick) words.insert(words.end(), {"--layers", "2", "--hidden", "64", "--heads", "2", "--sequence", "32"});
  const auto bench = json_document(study.trials.run("bench stages", {words, 1, 1}).out, "zero bench stages");
  const auto parameters = bench.at("model").at("parameters_elements").get<double>();
  const auto world = bench.at("world").get<double>();
  RecordTable table{"MB of a rank, measured between steps and by the formula of docs/memory.md",
                    {"recipe, stage", "formula", "at rest", "over it", "of stage 0", "peak in a step", "sent per step",
                     "of stage 0", "same result"},
                    {}};
  report::Chart chart;
  chart.kind = report::Chart::Kind::Stacked;
  chart.title = "Model states of a rank between steps, 16-bit with fp32 masters", chart.y_name = "MB";
  chart.series = {{"parameters"}, {"gradients"}, {"masters and optimizer states"}};
  double first_rest = 0, first_sent = 0, worst = 0;
  Json runs = Json::array();
  for (const auto& run : bench.at("runs")) {
    const auto recipe = run.at("recipe").get<std::string>();
    const auto stage = run.at("stage").get<int>();
    const auto& rest = run.at("memory").at("before_forward");
    const double parts[] = {rest.at("parameters_bytes").get<double>(), rest.at("gradients_bytes").get<double>(),
                            rest.at("master_and_optimizer_states_bytes").get<double>()};
    const double measured = parts[0] + parts[1] + parts[2];
    const double formula = bytes_per_parameter(recipe, stage, world) * parameters;
    double peak = 0;
    for (const auto& phase : run.at("memory")) peak = std::max(peak, phase.at("peak_bytes").get<double>());
    const auto sent = run.at("bytes_sent_per_step").get<double>();
    if (stage == 0) first_rest = measured, first_sent = sent;
    worst = std::max(worst, std::abs(measured / formula - 1));
    table.rows.push_back({recipe + ", stage " + std::to_string(stage), megabytes(formula), megabytes(measured),
                          fixed(100 * (measured / formula - 1), 2) + " %", "1/" + fixed(first_rest / measured, 2),
                          megabytes(peak), megabytes(sent), fixed(sent / first_sent, 2),
                          bench.at("equal_state").at(recipe).get<bool>() ? "yes" : "NO"});
    study.trials.tell(table.rows.back()[0] + ": " + table.rows.back()[2] + " MB at rest");
    if (recipe == "bf16") {
      chart.categories.push_back("stage " + std::to_string(stage));
      for (std::size_t i = 0; i < 3; ++i) chart.series[i].y.push_back(parts[i] / 1e6);
    }
    runs.push_back({{"recipe", recipe},
                    {"stage", stage},
                    {"formula_bytes", formula},
                    {"parameters_bytes", parts[0]},
                    {"gradients_bytes", parts[1]},
                    {"states_bytes", parts[2]},
                    {"peak_bytes", peak},
                    {"bytes_sent_per_step", sent}});
  }
  const auto gb = [](int stage) { return fixed(bytes_per_parameter("bf16", stage, 64) * 7.5, stage == 3 ? 2 : 1); };
  record.setup = base::join("GPT of ", report::human_count(parameters), " parameters, ", ranks, " ranks as threads (",
                            bench.at("transport").get<std::string>(), "), AdamW");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"GB of a rank, 7.5 B parameters on 64 ranks, stages 0 to 3", "120, 31.4, 16.6, 1.88",
       base::join(gb(0), ", ", gb(1), ", ", gb(2), ", ", gb(3)),
       base::join("The formula for 64 ranks. On two ranks the measured bytes exceed it by at most ",
                  fixed(100 * worst, 2),
                  " %: parameters are padded to multiples of 64 bytes, which matters in small models only.")},
      {"bytes sent, stages 1, 2 and 3, of stage 0's", "1, 1, 1.5",
       [&] {
         std::string text;
         for (const auto& row : table.rows)
           if (row[0].starts_with("bf16") && !row[0].ends_with("0")) text += (text.empty() ? "" : ", ") + row[7];
         return text;
       }(),
       "The same: a reduce-scatter and an all-gather send what an all-reduce does, and stage 3 gathers twice."},
      {"savings", "4x at stage 1, 8x at stage 2, Nx at stage 3", "see \"of stage 0\"",
       "4 and 8 are the limits of 16/(4 + 12/N) and 16/(2 + 14/N) for many ranks; with two ranks they are 1.6 and "
       "1.78."}};
  record.data = {{"parameters_elements", parameters}, {"ranks", world}, {"runs", runs}};
  return record;
}

}  // namespace zero::cli
