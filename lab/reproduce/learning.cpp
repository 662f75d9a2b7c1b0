// Curves: what a delayed update does to the loss, and what experts add to a model at equal cost of a token.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "lab/reproduce/gpt_runs.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

std::vector<double> losses_of(const Trained& trained) {
  std::vector<double> all;
  for (const auto& step : trained.steps)
    all.push_back(step.at("loss").is_number() ? step.at("loss").get<double>() : NAN);
  return all;
}

double mean_of_last(const std::vector<double>& values, std::size_t count) {
  count = std::min(count, values.size());
  return std::accumulate(values.end() - static_cast<std::ptrdiff_t>(count), values.end(), 0.0) /
         static_cast<double>(count);
}

// Means of `window` steps, each at its last step.
report::ChartSeries smoothed(std::string name, const std::vector<double>& values, std::size_t window) {
  report::ChartSeries out{std::move(name)};
  for (std::size_t i = window; i <= values.size(); ++i) {
    out.x.push_back(static_cast<double>(i));
    out.y.push_back(std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(i - window),
                                    values.begin() + static_cast<std::ptrdiff_t>(i), 0.0) /
                    static_cast<double>(window));
  }
  return out;
}

// A vocabulary of bytes, as the demo's configuration.
GptRun demo_run(bool quick) {
  GptRun run;
  run.gpt = quick ? models::GptConfig{.layers = 2, .hidden = 64, .heads = 2, .sequence = 32}
                  : models::GptConfig{.layers = 4, .hidden = 192, .heads = 4, .sequence = 128};
  run.ranks = 2, run.stage = 2, run.batch = quick ? 2 : 8;
  return run;
}

}  // namespace

Record reproduce_delayed_update(Study& study) {
  Record record;
  record.question =
      "What does an update that is one step late do to the loss? (ZeRO-Offload, arXiv:2101.06840, sections 5.2 and "
      "6.2; "
      "as notebooks about it quote it.)";
  auto run = demo_run(study.quick);
  run.batch = study.quick ? 2 : 4, run.steps = study.quick ? 24 : 200;
  const std::int64_t start = study.quick ? 6 : 40;
  const std::size_t last = study.quick ? 8 : 50, window = study.quick ? 4 : 20;
  const auto warmup = study.quick ? 8 : 60;
  const std::vector<std::string> rates =
      study.quick ? std::vector<std::string>{"1e-3"} : std::vector<std::string>{"3e-4", "1e-3"};
  run.more["zero_optimization"]["offload_optimizer"]["device"] = "cpu";
  run.more["optimizer"]["params"] = {{"betas", {0.9, 0.95}}, {"weight_decay", 0.1}};
  run.more["scheduler"] = {{"type", "WarmupCosineLR"},
                           {"params",
                            {{"warmup_type", "linear"},
                             {"warmup_num_steps", warmup},
                             {"total_num_steps", run.steps},
                             {"cos_min_ratio", 0.05}}}};
  run.more["memory_breakdown"] = false;
  RecordTable table{
      base::join("Mean training loss of the last ", last, " steps, in nats a byte"),
      {"learning rate", "without delay", "delayed", "adds", "most within", "held-out, without", "held-out, delayed"},
      {}};
  Json rows = Json::array();
  std::vector<report::Chart> charts;
  std::string ours;
  for (const auto& rate : rates) {
    run.lr = std::stod(rate);
    auto late = run;
    late.more["zero_optimization"]["delayed_update"] = {{"enabled", true}, {"start_step", start}};
    const auto plain_run = train(study, "rate-" + rate + "-plain", run);
    const auto late_run = train(study, "rate-" + rate + "-delayed", late);
    const auto plain = losses_of(plain_run), delayed = losses_of(late_run);
    const auto a = mean_of_last(plain, last), b = mean_of_last(delayed, last);
    const auto x = smoothed("without delay", plain, window),
               y = smoothed(base::join("delayed from step ", start), delayed, window);
    double most = 0;
    for (std::size_t i = 0; i < x.y.size(); ++i)
      if (x.x[i] > static_cast<double>(start)) most = std::max(most, std::abs(y.y[i] / x.y[i] - 1));
    const auto heldout = [](const Trained& trained) { return trained.result.value("heldout_nats_per_byte", NAN); };
    table.rows.push_back({rate, fixed(a, 3), fixed(b, 3), fixed(100 * (b / a - 1), 2) + " %",
                          fixed(100 * most, 1) + " %", fixed(heldout(plain_run), 3), fixed(heldout(late_run), 3)});
    study.trials.tell(
        base::join("rate ", rate, ": ", table.rows.back()[1], " without delay, ", table.rows.back()[2], " delayed"));
    ours += (ours.empty() ? "" : ", ") + table.rows.back()[3] + " at " + rate;
    report::Chart chart;
    chart.kind = report::Chart::Kind::Lines;
    chart.title =
        base::join("Training loss with and without delay, learning rate ", rate, ", means of ", window, " steps");
    chart.x_name = "step", chart.y_name = "nats a byte";
    chart.series = {x, y};
    charts.push_back(std::move(chart));
    rows.push_back({{"rate", run.lr},
                    {"loss", a},
                    {"loss_delayed", b},
                    {"largest_distance", most},
                    {"losses", plain},
                    {"losses_delayed", delayed}});
  }
  record.setup =
      base::join("GPT of ", report::human_count(static_cast<double>(run.parameters())), " parameters (",
                 shape_text(run.gpt), ") on ", study.text.empty() ? "the text of the GNU GPL" : "the text given",
                 ", bf16, stage 2, optimizer in host memory, ", run.ranks, " ranks of ", run.batch, " samples, ",
                 run.steps, " steps, warm-up of ", warmup, ", delay from step ", start);
  record.tables = {table};
  record.charts = std::move(charts);
  record.comparisons = {
      {"the loss with delay", "the same curve (GPT-2 pre-training, from step 40 on; BERT fine-tuning too)", ours,
       "The effect is the learning rate's: a gradient of one step ago is a good one if a step changes "
       "little. Theirs were "
       "long runs with small rates; a short run at a large rate separates when the delay starts."}};
  record.data = {{"start_step", start}, {"steps", run.steps}, {"ranks", run.ranks}, {"rows", rows}};
  return record;
}

Record reproduce_experts(Study& study) {
  Record record;
  record.question =
      "Does a mixture of experts make a model larger at the same cost of a token? (DeepSpeed's \"MoE\" and its "
      "CIFAR-10 "
      "tutorial; Fedus et al., arXiv:2101.03961.)";
  auto run = demo_run(study.quick);
  run.stage = 1, run.batch = study.quick ? 2 : 4;
  run.steps = study.quick ? 6 : 40;
  run.lr = 2e-3;
  run.more["memory_breakdown"] = false;
  RecordTable table{"Two ranks that share the experts, top-1, in every second block",
                    {"experts", "parameters", "of a token", "of dense", "CPU s of all steps", "of dense", "ms a step",
                     "last loss", "state MB a rank"},
                    {}};
  report::Chart chart;
  chart.title = "Parameters and processor time by experts, of the dense model's", chart.y_name = "of the dense model's";
  chart.x_name = "experts";
  chart.series = {{"parameters"}, {"processor time"}};
  Json rows = Json::array();
  const std::vector<std::int64_t> counts =
      study.quick ? std::vector<std::int64_t>{0, 4} : std::vector<std::int64_t>{0, 2, 4, 8};
  double first_parameters = 0, first_cpu = 0;
  std::string ours;
  for (const auto experts : counts) {
    auto one = run;
    if (experts > 0) one.more["libzero"]["model"]["experts"] = {{"num_experts", experts}, {"ep_size", 2}, {"k", 1}};
    // What starts and ends a run is not a step's: it is measured by a run of one step.
    auto brief = one;
    brief.steps = 1;
    const auto label = base::join("experts-", experts);
    const auto begun = train(study, label + "-start", brief);
    const auto trained = train(study, label, one);
    const auto model = PlanModel::of_options(Options::from_json(one.config(study.folder).dump(), "<zero reproduce>"));
    const auto parameters = static_cast<double>(model.num_parameters());
    const auto active = static_cast<double>(model.num_active_parameters());
    const auto cpu = std::max(1e-9, trained.cpu_seconds - begun.cpu_seconds);
    const auto& rest = trained.result.at("memory").at("before_forward");
    const auto states = rest.at("parameters_bytes").get<double>() + rest.at("gradients_bytes").get<double>() +
                        rest.at("master_and_optimizer_states_bytes").get<double>();
    if (experts == 0) first_parameters = parameters, first_cpu = cpu;
    table.rows.push_back({experts == 0 ? "none (dense)" : std::to_string(experts), report::human_count(parameters),
                          report::human_count(active), fixed(parameters / first_parameters, 2), fixed(cpu, 1),
                          fixed(cpu / first_cpu, 2), fixed(trained.median_step_s() * 1e3, 1),
                          fixed(losses_of(trained).back(), 3), megabytes(states)});
    study.trials.tell(
        base::join(table.rows.back()[0], ": ", table.rows.back()[1], " parameters, ", table.rows.back()[4], " CPU s"));
    chart.categories.push_back(experts == 0 ? "dense" : std::to_string(experts));
    chart.series[0].y.push_back(parameters / first_parameters);
    chart.series[1].y.push_back(cpu / first_cpu);
    ours = table.rows.back()[3] + " times the parameters at " + table.rows.back()[5] + " times the processor time";
    rows.push_back({{"experts", experts},
                    {"parameters_elements", parameters},
                    {"active_parameters_elements", active},
                    {"cpu_seconds", cpu},
                    {"step_s", trained.median_step_s()},
                    {"states_bytes", states},
                    {"last_loss", trained.steps.back().at("loss")}});
  }
  record.setup =
      base::join("GPT of ", report::human_count(first_parameters), " parameters without experts (", shape_text(run.gpt),
                 "), bf16, stage 1, ", run.ranks, " ranks of ", run.batch, " samples, ", run.steps, " steps");
  record.tables = {table};
  record.charts = {chart};
  record.comparisons = {
      {"size at equal cost",
       "\"a larger model at the cost of a smaller one\" (Switch: 7 times as fast to the same loss)", ours,
       "A token passes one expert, so its computation stays. What grows is the update, which is of all "
       "parameters: with "
       "few tokens a step, as here, it shows; with a thousand tokens an expert it does not."}};
  record.notes = {
      "The tutorial's network for CIFAR-10, with its layers of experts, is docs/cifar10.md and "
      "examples/cifar10.cpp: it needs the data set."};
  record.data = {{"ranks", run.ranks}, {"steps", run.steps}, {"rows", rows}};
  return record;
}

}  // namespace zero::cli
