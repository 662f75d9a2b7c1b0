// `zero bench profile`: the speeds of this machine for `zero plan --profile`. Trains GPTs of several shapes at every
// stage with as many ranks as the machine has room for, and fits speeds to the measured step times and the amounts of
// work that a plan counts. One rank's steps are in step_rank.h, files in io_measurement.h, the fit in core/plan.
#include <zero/library.h>
#include <zero/plan.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "lab/bench/bench.h"
#include "lab/bench/bench_gpt.h"
#include "lab/bench/io_measurement.h"
#include "lab/bench/step_rank.h"
#include "plan/nnls.h"
#include "tools/launch/machine/host.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_plan.h"
#include "tools/support/options.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {
namespace profile_bench {
namespace {

constexpr const char* kName = "bench profile";
constexpr std::int64_t kFileBytes = std::int64_t{256} << 20;

struct Setup {
  std::int64_t world = 0, threads = 1, steps = 7;
  std::string recipes = "fp32,bf16,fp16", out, path = "/tmp";
  bool no_files = false, quick = false;
};

// Shapes with different bottlenecks: fixed costs, matrix products, attention, narrow heads, logits.
struct Shape {
  models::GptConfig gpt;
  std::int64_t batch;
};
std::vector<Shape> shapes() {
  const auto gpt = [](std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t sequence,
                      std::int64_t vocabulary) {
    models::GptConfig config;
    config.layers = layers, config.hidden = hidden, config.heads = heads;
    config.sequence = sequence, config.vocabulary = vocabulary;
    return config;
  };
  return {{gpt(2, 64, 2, 32, 256), 1},    {gpt(8, 64, 2, 64, 256), 2},   {gpt(4, 256, 4, 128, 512), 2},
          {gpt(2, 384, 6, 128, 4096), 2}, {gpt(2, 128, 4, 256, 256), 4}, {gpt(6, 192, 12, 64, 1024), 4}};
}

StepTask task_of(const Shape& shape, const std::string& recipe, int stage, const Setup& setup) {
  StepTask task;
  task.recipe = recipe, task.stage = stage, task.steps = setup.steps, task.warmup = 3;
  task.batch = shape.batch, task.threads = setup.threads, task.gpt = shape.gpt;
  return task;
}

Plan plan_of(const StepTask& task, std::int64_t world) {
  PlanModel model;
  model.layers = task.gpt.layers, model.hidden = task.gpt.hidden, model.heads = task.gpt.heads;
  model.sequence = task.gpt.sequence, model.vocabulary = task.gpt.vocabulary;
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = static_cast<int>(world);
  machine.shared_memory = world > 1;
  auto counted = task;
  counted.stage = std::max(counted.stage, 0);
  return plan(with_gpt_pass(model), options_of(counted), machine);
}

double median_of(const Json& result) { return quantile(result.at("step_s").get<std::vector<double>>(), 0.5); }
double speed(double seconds) { return seconds > 0 ? 1 / seconds : 0; }

// The largest relative error of the fit.
double worst_of(const std::vector<double>& fit, const std::vector<planning::FitRow>& rows) {
  double worst = 0;
  for (const auto& row : rows)
    worst = std::max(worst, std::abs(planning::predicted(fit, row.amounts) - row.seconds) * row.weight);
  return worst;
}

struct Found {
  PlanProfile profile;
  Json fits = Json::object();  // the largest relative error of each
  Json rows = Json::array();   // the measurements
};

constexpr const char* kTrained[] = {"fp32", "bf16"};
PlanSpeed& speed_of(PlanProfile& profile, const std::string& recipe) {
  return recipe == "fp32" ? profile.fp32 : recipe == "bf16" ? profile.bf16 : profile.fp16;
}

// Fits all stages and recipes together: what they share shows best if everything else differs. seconds: the lowest
// median of each task.
Found fitted(const std::vector<StepTask>& tasks, const std::vector<double>& seconds, const Setup& setup) {
  Found found;
  found.profile.ranks = static_cast<int>(setup.world);
  std::vector<planning::FitRow> steps, passes;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const auto& task = tasks[i];
    const auto plan = plan_of(task, setup.world);
    const std::vector<double> pass{plan.work.flops, plan.work.elements, plan.work.heads,
                                   static_cast<double>(plan.work.layers)};
    Json row = {{"recipe", task.recipe},
                {"model", task.json().at("gpt")},
                {"micro_batch_size", task.batch},
                {"step_s", seconds[i]}};
    if (task.stage == StepTask::kCompute) {
      passes.push_back({pass, seconds[i], 1 / seconds[i]});
    } else {
      row["stage"] = task.stage;
      std::vector<double> amounts;
      for (const char* recipe : kTrained)
        for (const double amount : pass) amounts.push_back(task.recipe == recipe ? amount : 0);
      for (const double amount : {static_cast<double>(plan.traffic.sent()), static_cast<double>(plan.work.collectives),
                                  static_cast<double>(plan.work.updated), 1.0})
        amounts.push_back(amount);
      steps.push_back({std::move(amounts), seconds[i], 1 / seconds[i]});
    }
    found.rows.push_back(row);
  }
  if (!steps.empty()) {
    const auto fit = planning::nonnegative_fit(steps);
    std::size_t at = 0;
    for (const char* recipe : kTrained) {
      speed_of(found.profile, recipe) = {speed(fit[at]), speed(fit[at + 1]), speed(fit[at + 2]), fit[at + 3]};
      at += 4;
    }
    found.profile.link_bytes = speed(fit[at]);
    found.profile.collective_s = fit[at + 1];
    found.profile.device_update_elements = found.profile.host_update_elements = speed(fit[at + 2]);
    found.profile.step_s = fit[at + 3];
    found.fits["steps"] = worst_of(fit, steps);
  }
  if (!passes.empty()) {
    const auto fit = planning::nonnegative_fit(passes);
    found.profile.fp16 = {speed(fit[0]), speed(fit[1]), speed(fit[2]), fit[3]};
    found.fits["fp16"] = worst_of(fit, passes);
  }
  return found;
}

void measure_files(PlanProfile& profile, const Setup& setup) {
  IoMeasurement files(setup.path, kFileBytes, {.block_size = 1 << 20, .queue_depth = 8});
  profile.write_bytes = files.run(IoPattern::Write, 1.5).write_bytes_per_s;
  profile.read_bytes = files.run(IoPattern::Read, 1.5).read_bytes_per_s;
}

std::string text_of(const Found& found, const Setup& setup) {
  using report::Align;
  auto profile = found.profile;
  report::Table passes({{"forward and backward"},
                        {"GFLOP/s", Align::Right},
                        {"M elements/s", Align::Right},
                        {"M heads/s", Align::Right},
                        {"us a layer", Align::Right}});
  // A speed whose time is too small to measure.
  const auto cell = [](double per_second, double unit, int digits) {
    return per_second > 0 ? fixed(per_second / unit, digits) : std::string("-");
  };
  for (const char* recipe : {"fp32", "bf16", "fp16"}) {
    const auto& speed = speed_of(profile, recipe);
    if (speed.flops > 0 || speed.elements > 0 || speed.heads > 0 || speed.layer_s > 0)
      passes.row({recipe, cell(speed.flops, 1e9, 1), cell(speed.elements, 1e6, 0), cell(speed.heads, 1e6, 2),
                  fixed(speed.layer_s * 1e6, 0)});
  }
  std::string text = machine_line() + "\n" + std::to_string(setup.world) + (setup.world == 1 ? " rank" : " ranks") +
                     " at once, threads a rank " + std::to_string(setup.threads) + "\n\n" + passes.render(80) + "\n";
  const auto line = [&](const char* what, double per_second, const char* unit) {
    if (per_second > 0) text += std::string(what) + report::human_count(per_second) + unit + "\n";
  };
  line("collectives           ", profile.link_bytes, "B/s");
  text += "a collective besides  " + report::human_duration(profile.collective_s) + "\n";
  line("update                ", profile.device_update_elements, " elements/s");
  text += "a step besides        " + report::human_duration(profile.step_s) + "\n";
  line("files, read           ", profile.read_bytes, "B/s");
  line("files, written        ", profile.write_bytes, "B/s");
  for (const auto& [name, worst] : found.fits.items())
    text += "the fit of " + name + " is within " + fixed(100 * worst.get<double>(), 0) + " % of every time measured\n";
  return text;
}

}  // namespace
}  // namespace profile_bench

int bench_profile(int argc, char** argv) {
  using namespace profile_bench;
  Setup setup;
  Command command(kName, "the speeds of this machine's CPUs, for `zero plan --profile`; about three minutes",
                  "[options]", "  zero bench profile --out this-machine.json\n");
  command.section("What is measured");
  command.option("--world", setup.world, "N", "concurrent ranks, each a process (cores / threads)", 1, 64);
  command.option("--threads", setup.threads, "N", "threads per rank (1)", 1, 1024);
  command.option("--recipes", setup.recipes, "LIST", "fp32, bf16, fp16, comma-separated (all)");
  command.option("--steps", setup.steps, "N", "measured steps per shape and stage (7)", 2, 1000);
  command.option("--path", setup.path, "DIR", "folder for measuring files (/tmp)");
  command.flag("--no-files", setup.no_files, "do not measure files");
  command.flag("--quick", setup.quick,
               "one round instead of four: under a minute, but less reliable on a busy machine");
  command.section("Results");
  command.option("--out", setup.out, "FILE", "the profile");
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink(kName, global);
  const auto recipes = list_of("--recipes", setup.recipes, {"fp32", "bf16", "fp16"});
  if (setup.world == 0)
    setup.world = std::max<std::int64_t>(1, machine().at("cores").get<std::int64_t>() / setup.threads);

  std::vector<StepTask> tasks;
  for (const auto& recipe : recipes)
    for (const auto& shape : shapes()) {
      if (recipe == "fp16") {  // slow on CPUs; derived from bf16
        tasks.push_back(task_of(shape, recipe, StepTask::kCompute, setup));
        tasks.back().steps = 2, tasks.back().warmup = 1;
        continue;
      }
      for (int stage = 0; stage <= 3; ++stage) tasks.push_back(task_of(shape, recipe, stage, setup));
    }
  Json list = {tasks.front().json()};  // an extra task, discarded as a warm-up
  const int rounds = setup.quick ? 1 : 4;
  for (int round = 0; round < rounds; ++round)
    for (const auto& task : tasks)
      if (round == 0 || task.stage != StepTask::kCompute) list.push_back(task.json());
  const RankProcesses ranks{.command = kName, .world = setup.world, .threads = setup.threads, .transport = "shm"};
  const auto outcome = run_rank_processes(ranks, {{"tasks", list}}, global);
  if (outcome.exit_code != 0) return outcome.exit_code;
  // The fastest of the rounds, because other load on the machine comes and goes.
  std::vector<double> seconds(tasks.size(), std::numeric_limits<double>::infinity());
  std::size_t at = 1;
  for (int round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i < tasks.size(); ++i)
      if (round == 0 || tasks[i].stage != StepTask::kCompute)
        seconds[i] = std::min(seconds[i], median_of(outcome.result[at++]));
  auto found = fitted(tasks, seconds, setup);
  if (!setup.no_files) measure_files(found.profile, setup);
  found.profile.name = machine().at("processor").get<std::string>() + ", " + std::to_string(setup.world) +
                       (setup.world == 1 ? " rank" : " ranks");
  auto document = Json::parse(found.profile.json());
  document["machine"] = machine();
  document["machine"]["worst_relative_error"] = found.fits;
  document["machine"]["measured"] = found.rows;
  const auto text = document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (!setup.out.empty()) {
    std::ofstream file(setup.out, std::ios::binary);
    file << text;
    file.close();
    if (!file) throw IoError("[--out] got no file " + setup.out + ", expected one that can be written");
  }
  print_result(global.json ? text : text_of(found, setup));
  return 0;
}

int bench_profile_rank(int argc, char** argv) {
  using namespace profile_bench;
  const auto task = RankTask::from("profile-rank", argc, argv);
  const auto comm = Communicator::from_env();
  Json results = Json::array();
  for (const auto& one : task.task.at("tasks")) {
    comm->barrier();
    results.push_back(measure_step(StepTask::from(one), comm));
  }
  if (comm->rank() == 0) task.hand_over(results);
  return 0;
}

}  // namespace zero::cli
