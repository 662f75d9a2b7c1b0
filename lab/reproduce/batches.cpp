// Batches that grow when memory is free: super-linear scaling, and activation checkpointing.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "lab/reproduce/gpt_runs.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

std::vector<std::string> shape_words(const models::GptConfig& gpt) {
  return {"--layers",     std::to_string(gpt.layers),    "--hidden",   std::to_string(gpt.hidden),
          "--heads",      std::to_string(gpt.heads),     "--sequence", std::to_string(gpt.sequence),
          "--vocabulary", std::to_string(gpt.vocabulary)};
}

void append(std::vector<std::string>& words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
}

}  // namespace

Record reproduce_superlinear(Study& study) {
  Record record;
  record.question =
      "Does the speed of a rank rise with the number of ranks, because its share of the states shrinks and its batch "
      "grows? (ZeRO, arXiv:1910.02054, figure 3: 60 B parameters on 64 to 400 GPUs; DeepSpeed's \"super-linear\" "
      "speed-up.)";
  GptRun run;
  run.gpt = study.quick ? models::GptConfig{.layers = 2, .hidden = 64, .heads = 2, .sequence = 32}
                        : models::GptConfig{.layers = 12, .hidden = 256, .heads = 4, .sequence = 32};
  run.stage = 2, run.batch = 1;
  // Stage 2 of one rank holds all states: they and one sample fit.
  run.ranks = 1;
  auto one = plan_of(run, study.folder).memory.peak(MemoryReport::Tier::Device);
  const auto budget = static_cast<std::int64_t>(one);
  const std::vector<int> worlds = study.quick ? std::vector<int>{1, 4} : std::vector<int>{1, 2, 4, 8};
  RecordTable table{
      base::join("One rank of N, alone on a core, within ", megabytes(static_cast<double>(budget)), " MB"),
      {"ranks", "states MB", "largest batch", "planned peak MB", "measured peak MB", "CPU ms a step", "of it step()",
       "tokens/s a rank", "of one rank's", "batch of 1, tokens/s"},
      {}};
  report::Chart chart;
  chart.kind = report::Chart::Kind::Lines;
  chart.title = "Tokens a second of N ranks, each with the largest batch that fits", chart.x_name = "ranks";
  chart.y_name = "tokens/s, without communication", chart.log_x = true;
  chart.series = {{"largest batch"}, {"N times one rank (linear)", {}, {}, true}, {"a batch of 1"}};
  Json rows = Json::array();
  double first = 0;
  std::string ours;
  for (const int world : worlds) {
    run.ranks = world;
    auto fits = [&](std::int64_t batch) {
      auto sized = run;
      sized.batch = batch;
      return plan_of(sized, study.folder).memory.peak(MemoryReport::Tier::Device) <= static_cast<std::uint64_t>(budget);
    };
    const auto batch = std::max<std::int64_t>(1, largest_whole(1 << 14, fits));
    const auto measure = [&](std::int64_t samples) {
      std::vector<std::string> words{"bench",
                                     "step",
                                     "--json",
                                     "--quiet",
                                     "--transport",
                                     "fake",
                                     "--world",
                                     std::to_string(world),
                                     "--stages",
                                     std::to_string(run.stage),
                                     "--recipes",
                                     run.recipe,
                                     "--no-compute",
                                     "--rounds",
                                     study.quick ? "1" : "2",
                                     "--warmup",
                                     "2",
                                     "--steps",
                                     study.quick ? "2" : "6",
                                     "--batch",
                                     std::to_string(samples)};
      append(words, shape_words(run.gpt));
      const auto what = base::join("one of ", world, " ranks, batch ", samples);
      return json_document(study.trials.run(what, {words, 1, 1}).out, "zero bench step").at("runs").at(0);
    };
    const auto full = measure(batch);
    const auto alone = batch == 1 ? full : measure(1);
    auto sized = run;
    sized.batch = batch;
    const auto planned = plan_of(sized, study.folder).memory;
    const auto peak = planned.peak(MemoryReport::Tier::Device);
    const auto step = full.at("alone").at("cpu_step_s").at("median").get<double>();
    const auto speed = static_cast<double>(batch * run.gpt.sequence) / step;
    const auto speed_of_one =
        static_cast<double>(run.gpt.sequence) / alone.at("alone").at("cpu_step_s").at("median").get<double>();
    const auto states = bytes_per_parameter(run.recipe, run.stage, world) * static_cast<double>(run.parameters());
    const auto measured = full.at("alone").at("device_peak_bytes").get<double>();
    if (first == 0) first = speed;
    table.rows.push_back({std::to_string(world), megabytes(states), std::to_string(batch),
                          megabytes(static_cast<double>(peak)), megabytes(measured), fixed(step * 1e3, 1),
                          fixed(full.at("alone").at("cpu_optimizer_s").at("median").get<double>() * 1e3, 1),
                          fixed(speed, 0), fixed(speed / first, 2), fixed(speed_of_one, 0)});
    study.trials.tell(base::join(world, " ranks: batch ", batch, ", ", table.rows.back()[7], " tokens/s a rank"));
    ours += (ours.empty() ? "" : ", ") + table.rows.back()[8];
    for (auto& series : chart.series) series.x.push_back(world);
    chart.series[0].y.push_back(speed * world);
    chart.series[1].y.push_back(first * world);
    chart.series[2].y.push_back(speed_of_one * world);
    rows.push_back({{"ranks", world},
                    {"batch", batch},
                    {"states_bytes", states},
                    {"planned_peak_bytes", peak},
                    {"measured_peak_bytes", measured},
                    {"step_s", step},
                    {"tokens_per_s", speed},
                    {"tokens_per_s_batch_1", speed_of_one}});
  }
  record.setup = base::join("GPT of ", report::human_count(static_cast<double>(run.parameters())), " parameters (",
                            shape_text(run.gpt), "), bf16, stage 2; the budget is what one rank needs for one sample");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"speed of a rank, of that on the fewest", "26, 37, 39, 36 TFLOP/s a GPU on 64, 128, 256, 400: 1, 1.4, 1.5, 1.4",
       base::join(ours, " on ", worlds.front(), " to ", worlds.back(), " ranks"),
       "Both rise for the same reasons: a larger batch uses the processor better, and the update of a rank's share is "
       "spread over more samples. Theirs includes communication and ends to rise when it dominates. More ranks than "
       "cores "
       "share them, so here one rank runs alone, whose collectives copy as much but wait for nobody: no speed-up of "
       "several ranks is claimed."}};
  record.notes = {"Times are processor time of the rank, which has one thread: what a core of its own would take."};
  record.data = {
      {"budget_bytes", budget}, {"stage", run.stage}, {"parameters_elements", run.parameters()}, {"rows", rows}};
  return record;
}

Record reproduce_checkpointing(Study& study) {
  Record record;
  record.question =
      "How much larger can a batch be within one budget if activations are computed again in backward, or are "
      "elsewhere? "
      "(Chen et al., arXiv:1604.06174; ZeRO, section 6.1.)";
  GptRun run;
  run.gpt = study.quick ? models::GptConfig{.layers = 6, .hidden = 64, .heads = 2, .sequence = 64}
                        : models::GptConfig{.layers = 12, .hidden = 64, .heads = 2, .sequence = 64};
  run.ranks = 1, run.stage = 0, run.recipe = "fp32";
  const std::int64_t mib = study.quick ? 12 : 24;
  std::vector<std::string> words{"bench",    "activations",       "--json",   "--quiet",
                                 "--budget", std::to_string(mib), "--folder", study.folder};
  append(words, shape_words(run.gpt));
  const auto bench = json_document(study.trials.run("bench activations", {words, 1, 1}).out, "zero bench activations");
  RecordTable table{base::join("The largest batch within ", mib, " MiB of device memory, one rank, fp32"),
                    {"activations", "largest batch", "planned", "of kept", "device MB", "of it activations", "host MB",
                     "file MB", "ms a sample"},
                    {}};
  report::Chart chart;
  chart.title = base::join("The largest batch within ", mib, " MiB"), chart.y_name = "samples";
  chart.series = {{"largest batch"}};
  const auto planned = [&](bool again) {
    auto sized = run;
    sized.device_budget = 0;
    sized.checkpoints = again;
    return largest_whole(1 << 14, [&](std::int64_t batch) {
      sized.batch = batch;
      return plan_of(sized, study.folder).memory.peak(MemoryReport::Tier::Device) <= static_cast<std::uint64_t>(mib)
                                                                                         << 20;
    });
  };
  Json rows = Json::array();
  double kept = 0, kept_ms = 0, again_ratio = 0, again_ms = 0;
  for (std::size_t i = 0; i < bench.at("ways").size(); ++i) {
    const auto& way = bench.at("ways")[i];
    const auto batch = way.at("largest_batch").get<double>();
    const auto ms = way.at("step_s").get<double>() * 1e3 / std::max(1.0, batch);
    if (i == 0) kept = batch, kept_ms = ms;
    if (i == 1) again_ratio = batch / kept, again_ms = ms;
    const auto plan = i < 2 ? planned(i == 1) : -1;
    const auto mb = [&](const char* key) { return megabytes(way.at(key).get<double>()); };
    table.rows.push_back({way.at("name").get<std::string>(), fixed(batch, 0), plan < 0 ? "-" : std::to_string(plan),
                          kept > 0 ? fixed(batch / kept, 2) : "-", mb("device_peak_bytes"),
                          mb("activations_peak_bytes"), mb("host_peak_bytes"), mb("file_peak_bytes"), fixed(ms, 2)});
    study.trials.tell(base::join(table.rows.back()[0], ": batch ", table.rows.back()[1]));
    static constexpr const char* kShort[] = {"kept", "again", "again, host", "again, file", "away, host", "away, file"};
    chart.categories.emplace_back(i < std::size(kShort) ? kShort[i] : "?");
    chart.series[0].y.push_back(batch);
    Json row = way;
    row["planned_batch"] = plan < 0 ? Json(nullptr) : Json(plan);
    rows.push_back(std::move(row));
  }
  const auto layers = static_cast<double>(run.gpt.layers);
  record.setup = base::join("GPT of ", report::human_count(static_cast<double>(run.parameters())), " parameters (",
                            shape_text(run.gpt), "), one segment a layer");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"activations kept, of those with recomputation", "60 GB of about 8 GB: 7.5 (1.5 B, 48 layers, sequence 1024)",
       base::join("batch ", fixed(again_ratio, 1), " times as large (", run.gpt.layers, " layers)"),
       base::join("A layer keeps about 34 + 5 a s / h values of two bytes a token and element (Korthikanti et al.), "
                  "recomputation its input alone and one layer at a time: the gain grows with the layers, towards ",
                  fixed(layers, 0), " here.")},
      {"cost in time", "33 % of the computation (one more forward)",
       kept_ms > 0 ? fixed(100 * (again_ms / kept_ms - 1), 0) + " % a sample" : "-",
       "A larger batch makes the update's share of a sample smaller, which hides a part of the cost."}};
  record.notes = {"All ways gave the same state after a step of batch 1, bit for bit."};
  record.data = {{"budget_bytes", mib << 20},
                 {"parameters_elements", run.parameters()},
                 {"layers", run.gpt.layers},
                 {"rows", rows}};
  return record;
}

}  // namespace zero::cli
