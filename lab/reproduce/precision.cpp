// Mixed precision: the bytes of a 16-bit copy in addition to fp32 masters, and the search of the dynamic loss scale.
#include <cmath>

#include "base/check.h"
#include "lab/reproduce/gpt_runs.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

// The notebook's log : steps with an overflow, by the scale that they used, until the first
// clean step. The first overflow keeps the scale (hysteresis 2), then each halves it.
std::vector<double> notebook_scales() {
  std::vector<double> powers{32};
  for (double power = 32; power >= 13; --power) powers.push_back(power);
  powers.push_back(12);  // the first clean step
  return powers;
}

}  // namespace

Record reproduce_mixed_precision(Study& study) {
  Record record;
  record.question =
      "What does a 16-bit copy of the parameters cost in addition to fp32, and how does the dynamic loss scale find "
      "its value? "
      "(A notebook from mixed precision to ZeRO-Infinity; Micikevicius et al., arXiv:1710.03740.)";
  std::vector<std::string> words{"bench",    "stages", "--json",    "--quiet",   "--world",      "2",
                                 "--stages", "0",      "--recipes", "fp32,fp16", "--iterations", "3"};
  if (study.quick) words.insert(words.end(), {"--layers", "2", "--hidden", "64", "--heads", "2", "--sequence", "32"});
  const auto bench = json_document(study.trials.run("bench stages", {words, 1, 1}).out, "zero bench stages");
  const auto parameters = bench.at("model").at("parameters_elements").get<double>();
  RecordTable bytes{
      "Bytes a parameter on a rank, stage 0, Adam",
      {"recipe", "parameters", "gradients", "masters and moments", "sum", "activations after forward, MB"},
      {}};
  report::Chart chart;
  chart.kind = report::Chart::Kind::Stacked;
  chart.title = "Bytes of a parameter, stage 0, Adam", chart.y_name = "bytes";
  chart.series = {{"parameters"}, {"gradients"}, {"masters and moments"}};
  Json runs = Json::array();
  double activations[2] = {}, copies[2] = {};
  for (std::size_t i = 0; i < bench.at("runs").size(); ++i) {
    const auto& run = bench.at("runs")[i];
    const auto recipe = run.at("recipe").get<std::string>();
    const auto& rest = run.at("memory").at("before_forward");
    const double parts[] = {rest.at("parameters_bytes").get<double>() / parameters,
                            rest.at("gradients_bytes").get<double>() / parameters,
                            rest.at("master_and_optimizer_states_bytes").get<double>() / parameters};
    const auto forward = run.at("memory").at("after_forward").at("activations_bytes").get<double>();
    if (i < 2) activations[i] = forward, copies[i] = parts[0];
    bytes.rows.push_back({recipe, fixed(parts[0], 2), fixed(parts[1], 2), fixed(parts[2], 2),
                          fixed(parts[0] + parts[1] + parts[2], 2), megabytes(forward)});
    chart.categories.push_back(recipe);
    for (std::size_t p = 0; p < 3; ++p) chart.series[p].y.push_back(parts[p]);
    runs.push_back({{"recipe", recipe},
                    {"parameters_bytes", rest.at("parameters_bytes")},
                    {"gradients_bytes", rest.at("gradients_bytes")},
                    {"states_bytes", rest.at("master_and_optimizer_states_bytes")},
                    {"activations_bytes", forward}});
  }

  GptRun run;
  run.gpt = {.layers = 2, .hidden = 64, .heads = 2, .sequence = 32};
  run.recipe = "fp16", run.stage = 1, run.batch = 4, run.lr = 3e-4;
  run.steps = study.quick ? 30 : 60;
  run.more["fp16"] = {{"enabled", true},           {"loss_scale", 0}, {"initial_scale_power", 32},
                      {"loss_scale_window", 1000}, {"hysteresis", 2}, {"min_loss_scale", 1}};
  const auto trained = train(study, "loss-scale", run);
  report::Chart scales;
  scales.kind = report::Chart::Kind::Lines;
  scales.title = "Loss scale of each step, as a power of two", scales.x_name = "step", scales.y_name = "log2";
  scales.series = {{"here"}, {"the notebook's log", {}, {}, true}};
  Json used = Json::array();
  std::int64_t skipped = 0, first_clean = 0;
  double power = 32;  // a line has the scale that the step after it uses
  for (const auto& step : trained.steps) {
    const auto number = step.at("step").get<std::int64_t>(), so_far = step.at("skipped").get<std::int64_t>();
    if (so_far == skipped && first_clean == 0) first_clean = number;
    skipped = so_far;
    scales.series[0].x.push_back(static_cast<double>(number));
    scales.series[0].y.push_back(power);
    used.push_back(power);
    power = std::round(std::log2(step.at("loss_scale").get<double>()));
  }
  const auto theirs = notebook_scales();
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    scales.series[1].x.push_back(static_cast<double>(i + 1));
    scales.series[1].y.push_back(theirs[i]);
  }
  record.setup =
      base::join("Bytes: GPT of ", report::human_count(parameters), " parameters, 2 ranks. Loss scale: GPT of ",
                 report::human_count(static_cast<double>(run.parameters())), " parameters in fp16, ", run.steps,
                 " steps from a scale of 2^32, hysteresis 2, window 1000, as in the notebook");
  record.tables = {bytes};
  record.charts = {chart, scales};
  record.comparisons = {
      {"fp32 parameters with a 16-bit copy, of fp32 parameters alone", "1.50 (1.5029 of 1.0020 MiB)",
       fixed((4 + copies[1]) / 4, 2), "The same: 4 + 2 bytes of 4. The fp32 values are called masters here."},
      {"activations of 16 bits, of fp32's", "half", fixed(activations[1] / activations[0], 2),
       "Some of what backward needs has 32 bits in both, such as the statistics of norms."},
      {"first clean step, from a scale of 2^32", "22, at 2^12",
       base::join(first_clean, ", at 2^",
                  [&] {
                    return first_clean > 0 ? fixed(used[static_cast<std::size_t>(first_clean - 1)].get<double>(), 0)
                                           : "-";
                  }()),
       "The pattern is the same: the first overflow keeps the scale, each further one halves it. Where it ends depends "
       "on "
       "the size of the gradients, which model and data decide."},
      {"steps skipped", "23 of 301", base::join(skipped, " of ", run.steps),
       "The notebook's scale fell twice more when the loss had changed."}};
  record.data = {{"parameters_elements", parameters},
                 {"runs", runs},
                 {"scale_powers", used},
                 {"first_clean_step", first_clean},
                 {"skipped_steps", skipped}};
  return record;
}

}  // namespace zero::cli
