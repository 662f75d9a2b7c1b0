// `zero bench stages`: trains the same GPT at stages 0 to 3 in each recipe, one after another. Shows memory by phase,
// step times, bytes sent, and the state's hash, which must not depend on the stage. Memory tables are in
// memory_phases.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/types.h>
#include <torch/version.h>
#include <zero/library.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "lab/bench/bench.h"
#include "lab/bench/bench_gpt.h"
#include "lab/bench/bench_ranks.h"
#include "models/gpt.h"
#include "tools/launch/machine/host.h"
#include "tools/report/text/memory_phases.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/measurement.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace stages_bench {
namespace {

struct Setup {
  std::int64_t world = 0, iterations = 20, warmup = 2, batch = 4, threads = 0, seed = 1;
  std::string stages = "0,1,2,3", recipes = "fp32,bf16,fp16";
  GptChoice choice;
  models::GptConfig gpt;  // the chosen one
  std::vector<std::string> set;
};

// Rank 0's results for one stage and recipe.
struct Run {
  std::string recipe, hash, transport;
  int stage = 0;
  report::MemoryPhases phases;
  std::vector<double> step_s;
  CommStats stats;  // of all measured steps
  double first_loss = 0, last_loss = 0;
  std::int64_t skipped = 0;
};

Options options_for(const Setup& setup, int stage, const std::string& recipe) {
  Json config = {{"train_micro_batch_size_per_gpu", setup.batch},
                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-4}, {"weight_decay", 0.01}}}}},
                 {"zero_optimization", {{"stage", stage}}}};
  if (recipe != "fp32") config[recipe]["enabled"] = true;
  // With the default, 16, the first steps search for a scale that does not overflow.
  if (recipe == "fp16") config[recipe]["initial_scale_power"] = 12;
  return Options::from_json(config.dump(), "<zero bench stages>", settings_of(setup.set));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One rank of one run.
Run train(const Setup& setup, int stage, const std::string& recipe, const std::shared_ptr<Communicator>& comm) {
  auto model = make_gpt(setup.gpt, setup.seed);
  Engine engine(model, options_for(setup, stage, recipe), comm);
  // The same tokens for every stage and recipe, different for every rank and step.
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(setup.seed * 1000003 + comm->rank()));
  Run run;
  run.stage = stage;
  run.recipe = recipe;
  run.transport = comm->transport();
  const auto step = [&](std::int64_t k, report::MemoryPhases* phases) {
    const auto note = [&](report::Phase phase) {
      if (phases != nullptr) phases->note_and_reset(phase, engine);
    };
    const auto tokens =
        at::randint(0, setup.gpt.vocabulary, {setup.batch, setup.gpt.sequence + 1}, generator, at::kLong);
    const auto inputs = tokens.narrow(1, 0, setup.gpt.sequence).contiguous();
    const auto targets = tokens.narrow(1, 1, setup.gpt.sequence).contiguous();
    const auto start = std::chrono::steady_clock::now();
    note(report::Phase::BeforeForward);
    auto loss = model->forward(inputs, targets);
    note(report::Phase::AfterForward);
    engine.backward(loss);
    const double value = loss.item<double>();
    loss = at::Tensor();
    note(report::Phase::AfterBackward);
    const auto result = engine.step();
    note(report::Phase::AfterStep);
    if (k < 0 || phases != nullptr) return;
    run.step_s.push_back(seconds_since(start));
    run.skipped += result.overflow ? 1 : 0;
    if (k == 0) run.first_loss = value;
    run.last_loss = value;
  };
  for (std::int64_t k = -setup.warmup; k < 0; ++k) step(k, nullptr);
  comm->barrier();
  comm->reset_stats();
  for (std::int64_t k = 0; k < setup.iterations; ++k) step(k, nullptr);
  run.stats = comm->stats();
  run.hash = engine.state_hash();
  // Reading memory returns idle memory to the kernel, which takes time, so phases are measured in two extra steps.
  for (std::int64_t k = 0; k < 2; ++k) step(setup.iterations + k, &run.phases);
  return run;
}

double total_of(const Run& run) {
  double sum = 0;
  for (const double s : run.step_s) sum += s;
  return sum;
}

std::string times_table(const Setup& setup, const std::vector<Run>& runs, std::size_t columns) {
  using report::Align;
  report::Table table({{"stage"},
                       {std::to_string(setup.iterations) + " steps s", Align::Right},
                       {"median ms", Align::Right},
                       {"p10 ms", Align::Right},
                       {"p90 ms", Align::Right},
                       {"sent/step", Align::Right},
                       {"last loss", Align::Right},
                       {"state hash"}});
  for (const auto& run : runs)
    table.row({std::to_string(run.stage), fixed(total_of(run), 2), fixed(quantile(run.step_s, 0.5) * 1e3, 1),
               fixed(quantile(run.step_s, 0.1) * 1e3, 1), fixed(quantile(run.step_s, 0.9) * 1e3, 1),
               report::human_bytes(run.stats.bytes_sent() / static_cast<std::uint64_t>(setup.iterations)),
               fixed(run.last_loss, 4), run.hash.substr(0, 12)});
  return table.render(columns);
}

bool all_equal(const std::vector<Run>& runs) {
  return std::all_of(runs.begin(), runs.end(), [&](const Run& run) { return run.hash == runs[0].hash; });
}

std::string text_of(const Setup& setup, const std::string& recipe, const std::vector<Run>& runs, std::size_t columns) {
  std::string out;
  std::vector<std::pair<std::string, report::MemoryPhases>> sides;
  for (const auto& run : runs) {
    out += "\n" + recipe + ", stage " + std::to_string(run.stage) + ": memory of rank 0\n" + run.phases.table(columns);
    sides.emplace_back(std::to_string(run.stage), run.phases);
  }
  out += "\n" + recipe + ": memory of rank 0 by stage\n" + report::compare_phases(sides, "stage", columns);
  out += "\n" + recipe + ": time, bytes rank 0 sends, result\n" + times_table(setup, runs, columns);
  if (runs[0].skipped > 0) out += std::to_string(runs[0].skipped) + " of the steps skipped for overflow\n";
  out += runs.size() == 1  ? "state hash " + runs[0].hash + "\n"
         : all_equal(runs) ? "state hash equal at all stages: " + runs[0].hash + "\n"
                           : "STATE HASHES DIFFER\n";
  return out;
}

Json json_of(const Run& run) {
  const auto steps = static_cast<double>(run.step_s.size());
  Json sent = Json::object();
  for (const auto& [op, row] : run.stats.by_op)
    sent[op] = {{"calls_per_step", static_cast<double>(row.calls) / steps},
                {"bytes_sent_per_step", static_cast<double>(row.bytes_sent) / steps}};
  return {
      {"recipe", run.recipe},
      {"stage", run.stage},
      {"total_s", total_of(run)},
      {"step_s",
       {{"median", quantile(run.step_s, 0.5)}, {"p10", quantile(run.step_s, 0.1)}, {"p90", quantile(run.step_s, 0.9)}}},
      {"bytes_sent_per_step", static_cast<double>(run.stats.bytes_sent()) / steps},
      {"by_op", sent},
      {"skipped_steps", run.skipped},
      {"first_loss", run.first_loss},
      {"last_loss", run.last_loss},
      {"state_hash", run.hash},
      {"memory", Json::parse(run.phases.json())}};
}

void declare(Command& c, Setup& s) {
  c.section("What is measured");
  c.option("--world", s.world, "N", "ranks as threads of this process (2); under a launcher its ranks are used", 1, 64);
  c.option("--stages", s.stages, "LIST", "stages, comma-separated (0,1,2,3)");
  c.option("--recipes", s.recipes, "LIST", "recipes, comma-separated (fp32,bf16,fp16)");
  c.option("--iterations,--steps", s.iterations, "N", "measured steps (20)", 1, 1000000);
  c.option("--warmup", s.warmup, "N", "warm-up steps (2)", 0, 1000000);
  c.repeated("--set", s.set, "KEY=VALUE", "set one key of the configuration");
  c.section("Model");
  s.choice.declare(c);
  c.option("--micro-batch-size", s.batch, "N", "samples per rank and step (4)", 1, 1 << 20);
  c.option("--seed", s.seed, "N", "seed of initial values and tokens (1)", 0, 1 << 30);
  c.option("--threads", s.threads, "N", "threads per rank (OMP_NUM_THREADS, else cores/ranks)", 1, 1024);
}

}  // namespace
}  // namespace stages_bench

int bench_stages(int argc, char** argv) {
  using namespace stages_bench;
  Setup setup;
  Command command("bench stages", "memory by phase, time, bytes sent and the result of ZeRO stages 0 to 3 on one GPT",
                  "[options]", "  zero bench stages --world 2 --recipes fp32,bf16 --iterations 20\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink("bench stages", global);
  setup.gpt = setup.choice.chosen(command);
  const auto stages = list_of("--stages", setup.stages, {"0", "1", "2", "3"});
  const auto recipes = list_of("--recipes", setup.recipes, {"fp32", "bf16", "fp16"});
  for (const auto& recipe : recipes)  // report faults before anything runs
    for (const auto& stage : stages) (void)options_for(setup, std::stoi(stage), recipe);

  const auto own = join_ranks(command, setup.world, 2);
  const bool launched = own->size() > 1;
  const auto here = launched ? own->local_size() : setup.world;
  const char* omp = std::getenv("OMP_NUM_THREADS");
  if (setup.threads == 0 && (omp == nullptr || *omp == '\0'))
    setup.threads = std::max<std::int64_t>(1, launch::usable_cores() / here);
  if (setup.threads > 0) at::set_num_threads(static_cast<int>(setup.threads));
  const bool speaks = own->rank() == 0;
  const bool tells = speaks && log_threshold(global) <= LogLevel::Info;
  if (tells && !launched)
    print_note("bench stages", LogLevel::Info, std::to_string(setup.world) + " ranks as threads of this process");

  const auto measure = [&](int stage, const std::string& recipe) {
    if (launched) return train(setup, stage, recipe, own);
    Run first;
    run_ranks(static_cast<int>(setup.world), [&](std::shared_ptr<Communicator> comm) {
      auto run = train(setup, stage, recipe, comm);
      if (comm->rank() == 0) first = std::move(run);
    });
    return first;
  };
  std::vector<std::vector<Run>> by_recipe;
  for (const auto& recipe : recipes) {
    by_recipe.emplace_back();
    for (const auto& stage : stages) {
      if (tells)
        print_note("bench stages", LogLevel::Info,
                   recipe + ", stage " + stage + ": " + std::to_string(setup.iterations) + " steps");
      by_recipe.back().push_back(measure(std::stoi(stage), recipe));
    }
  }

  std::string different;
  for (const auto& runs : by_recipe)
    if (!all_equal(runs)) different += (different.empty() ? "" : ", ") + runs[0].recipe;
  if (speaks) {
    const auto& gpt = setup.gpt;
    const auto& transport = by_recipe[0][0].transport;
    if (global.json) {
      Json document = {{"schema", "zero.bench.stages/1"},
                       {"machine",
                        {{"processor", processor()},
                         {"cores", launch::usable_cores()},
                         {"threads_per_rank", at::get_num_threads()},
                         {"libtorch", TORCH_VERSION}}},
                       {"model",
                        {{"layers", gpt.layers},
                         {"hidden", gpt.hidden},
                         {"heads", gpt.heads},
                         {"sequence_tokens", gpt.sequence},
                         {"vocabulary", gpt.vocabulary},
                         {"parameters_elements", gpt.num_parameters()}}},
                       {"world", setup.world},
                       {"transport", transport},
                       {"iterations", setup.iterations},
                       {"micro_batch_size", setup.batch},
                       {"equal_state", Json::object()},
                       {"runs", Json::array()}};
      for (const auto& runs : by_recipe) {
        document["equal_state"][runs[0].recipe] = all_equal(runs);
        for (const auto& run : runs) document["runs"].push_back(json_of(run));
      }
      print_result(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    } else {
      const auto columns = static_cast<std::size_t>(report::describe_terminal(1, global.color).columns);
      std::string text =
          processor() + ", " + std::to_string(launch::usable_cores()) + " cores, libtorch " TORCH_VERSION "\n";
      text += "GPT of " + report::human_count(static_cast<double>(gpt.num_parameters())) + " parameters (" +
              std::to_string(gpt.layers) + " layers, hidden " + std::to_string(gpt.hidden) + "), " +
              std::to_string(setup.batch) + " x " + std::to_string(gpt.sequence) + " tokens a rank\n" +
              std::to_string(setup.world) + " ranks (" + transport + "), threads a rank " +
              std::to_string(at::get_num_threads()) + ", steps " + std::to_string(setup.iterations) + " after " +
              std::to_string(setup.warmup) + " to warm up\n";
      for (std::size_t r = 0; r < recipes.size(); ++r) text += text_of(setup, recipes[r], by_recipe[r], columns);
      print_result(text);
    }
  }
  if (!different.empty())
    throw InternalError("[zero bench stages] got state hashes that differ between stages in " + different +
                        ", expected equal ones");
  return 0;
}

}  // namespace zero::cli
