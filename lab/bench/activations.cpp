// `zero bench activations`: the largest batch of one GPT whose step fits a budget of device memory, for each way of
// storing activations: kept, recomputed by checkpointing, offloaded to host memory or to a file. Memory is measured by
// the Engine's ledger. Also checks that all ways give the same result.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/types.h>
#include <zero/library.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>

#include "lab/bench/bench.h"
#include "lab/bench/bench_gpt.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_segments.h"
#include "tools/support/measurement.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace activations_bench {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

struct Plan {
  std::int64_t budget_mib = 96, stage = 0, threads = 0, most = 4096;
  std::string recipe = "fp32", folder = std::filesystem::temp_directory_path().string();
  GptChoice choice;
  models::GptConfig gpt;
  std::int64_t budget() const { return budget_mib << 20; }
};

struct Way {
  std::string name;
  std::vector<Setting> settings;
};

std::vector<Way> ways_of(const Plan& plan) {
  const auto one_a_layer = std::to_string(plan.gpt.layers);
  const auto set = [](std::string key, std::string value) { return Setting{std::move(key), std::move(value), "way"}; };
  const Setting again = set("activation_checkpointing.number_checkpoints", one_a_layer);
  return {
      {"kept", {}},
      {"computed again", {again}},
      {"computed again, inputs in host memory", {again, set("activation_checkpointing.cpu_checkpointing", "true")}},
      {"computed again, inputs in a file", {again, set("libzero.activation_file_path", plan.folder)}},
      {"away in host memory", {set("libzero.activation_offload.device", "cpu")}},
      {"away in a file",
       {set("libzero.activation_offload.device", "nvme"), set("libzero.activation_offload.nvme_path", plan.folder)}}};
}

struct Taken {
  std::int64_t device = 0, activations = 0, host = 0, file = 0;  // peak bytes within a step
  double seconds = 0;                                            // of that step
  std::string hash;
};

Taken train(const Plan& plan, const Way& way, std::int64_t batch) {
  Json config = {{"train_micro_batch_size_per_gpu", batch},
                 {"optimizer", {{"type", "AdamW"}}},
                 {"zero_optimization", {{"stage", plan.stage}}}};
  if (plan.recipe != "fp32") config[plan.recipe]["enabled"] = true;
  const auto options = Options::from_json(config.dump(), "<zero bench activations>", way.settings);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});
  const auto tokens = at::randint(0, plan.gpt.vocabulary, {batch, plan.gpt.sequence + 1}, generator, at::kLong);
  const auto inputs = tokens.narrow(1, 0, plan.gpt.sequence), targets = tokens.narrow(1, 1, plan.gpt.sequence);
  auto model = make_gpt(plan.gpt, 1);
  place_segments(model, segments_of(options, plan.gpt));
  Engine engine(model, options, Communicator::local());
  Taken taken;
  for (int step = 0; step < 2; ++step) {  // the first step allocates buffers that later steps reuse
    engine.reset_peak_memory();
    const auto begin = std::chrono::steady_clock::now();
    engine.backward(model->forward(inputs, targets));
    engine.step();
    taken.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  const auto memory = engine.memory();
  const auto peak = [&](Tier tier) { return static_cast<std::int64_t>(memory.peak(tier)); };
  taken.device = peak(Tier::Device);
  taken.activations = static_cast<std::int64_t>(memory.peak(Tier::Device, Purpose::Activations));
  taken.host = peak(Tier::Host);
  taken.file = peak(Tier::File);
  taken.hash = engine.state_hash();
  return taken;
}

// The largest batch that fits the budget, 0 if none. Bytes grow nearly linearly with the batch size, so two
// measurements predict the result.
std::int64_t largest(const Plan& plan, const std::function<std::int64_t(std::int64_t)>& bytes_of) {
  std::int64_t fits = 0, fails = plan.most + 1, guess = 1, bytes_of_one = 0, bytes_of_fits = 0;
  while (fits + 1 < fails) {
    const auto bytes = bytes_of(guess);
    if (guess == 1) bytes_of_one = bytes;
    if (bytes > plan.budget()) {
      fails = guess;
    } else {
      fits = guess;
      bytes_of_fits = bytes;
    }
    if (fits == 0) return 0;
    std::int64_t line = 4;  // the second measurement
    if (fits > 1) {
      const auto slope = std::max<std::int64_t>(1, (bytes_of_fits - bytes_of_one) / (fits - 1));
      line = fits + (plan.budget() - bytes_of_fits) / slope;
    }
    guess = std::clamp(line, fits + 1, std::max(fits + 1, fails - 1));
  }
  return fits;
}

void declare(Command& c, Plan& p) {
  c.section("What is measured");
  c.option("--budget", p.budget_mib, "MIB", "device memory of a step: all purposes of the ledger (96)", 1, 1 << 20);
  c.option("--stage", p.stage, "S", "ZeRO stage, with one rank (0)", 0, 3);
  c.choice("--recipe", p.recipe, {"fp32", "bf16", "fp16"}, "dtype of parameters and compute (fp32)");
  c.option("--most", p.most, "N", "largest batch to try (4096)", 1, 1 << 20);
  c.option("--folder", p.folder, "DIR", "for files (the system's temporary folder)");
  c.section("Model");
  p.choice.declare(c);
  c.option("--threads", p.threads, "N", "threads (OMP_NUM_THREADS, else all cores)", 1, 1024);
}

}  // namespace
}  // namespace activations_bench

int bench_activations(int argc, char** argv) {
  using namespace activations_bench;
  Plan plan;
  plan.choice.shape = {.layers = 8, .hidden = 128, .heads = 4, .sequence = 128, .vocabulary = 256};
  Command command("bench activations", "the largest batch within a memory budget, by storage of activations",
                  "[options]", "  zero bench activations --budget 96 --layers 8 --hidden 128\n");
  declare(command, plan);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink("bench activations", global);
  plan.gpt = plan.choice.chosen(command);
  if (plan.threads > 0) at::set_num_threads(static_cast<int>(plan.threads));
  const bool tells = log_threshold(global) <= LogLevel::Info;

  struct Row {
    Way way;
    std::int64_t batch = 0;
    Taken taken;
  };
  std::vector<Row> rows;
  std::string hash, different;
  for (const auto& way : ways_of(plan)) {
    if (tells) print_note("bench activations", LogLevel::Info, way.name);
    Row row{way, 0, {}};
    std::map<std::int64_t, Taken> seen;
    row.batch = largest(plan, [&](std::int64_t batch) {
      auto& taken = seen[batch] = train(plan, way, batch);
      return taken.device;
    });
    row.taken = seen[std::max<std::int64_t>(1, row.batch)];
    // Batch 1 was measured for every way.
    if (hash.empty()) hash = seen[1].hash;
    if (seen[1].hash != hash) different += (different.empty() ? "" : ", ") + way.name;
    rows.push_back(std::move(row));
  }
  if (global.json) {
    Json document = {{"schema", "zero.bench.activations/1"},
                     {"machine", machine()},
                     {"model",
                      {{"layers", plan.gpt.layers},
                       {"hidden", plan.gpt.hidden},
                       {"heads", plan.gpt.heads},
                       {"sequence_tokens", plan.gpt.sequence},
                       {"vocabulary", plan.gpt.vocabulary},
                       {"parameters_elements", plan.gpt.num_parameters()}}},
                     {"recipe", plan.recipe},
                     {"stage", plan.stage},
                     {"budget_bytes", plan.budget()},
                     {"equal_state", different.empty()},
                     {"ways", Json::array()}};
    for (const auto& row : rows)
      document["ways"].push_back({{"name", row.way.name},
                                  {"largest_batch", row.batch},
                                  {"device_peak_bytes", row.taken.device},
                                  {"activations_peak_bytes", row.taken.activations},
                                  {"host_peak_bytes", row.taken.host},
                                  {"file_peak_bytes", row.taken.file},
                                  {"step_s", row.taken.seconds}});
    print_result(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    using report::Align;
    report::Table table({{"activations"},
                         {"largest batch", Align::Right},
                         {"device", Align::Right},
                         {"of it activations", Align::Right},
                         {"host", Align::Right},
                         {"file", Align::Right},
                         {"ms a sample", Align::Right}});
    const auto bytes = [](std::int64_t value) { return report::human_bytes(static_cast<std::uint64_t>(value)); };
    for (const auto& row : rows)
      table.row({row.way.name, row.batch == 0 ? "none" : std::to_string(row.batch), bytes(row.taken.device),
                 bytes(row.taken.activations), bytes(row.taken.host), bytes(row.taken.file),
                 fixed(row.taken.seconds * 1e3 / static_cast<double>(std::max<std::int64_t>(1, row.batch)), 1)});
    print_result(machine_line() + "\nGPT of " + report::human_count(static_cast<double>(plan.gpt.num_parameters())) +
                 " parameters (" + std::to_string(plan.gpt.layers) + " layers, hidden " +
                 std::to_string(plan.gpt.hidden) + ", sequence " + std::to_string(plan.gpt.sequence) + "), " +
                 plan.recipe + ", stage " + std::to_string(plan.stage) + ", one rank; a step within " +
                 bytes(plan.budget()) + "\n" +
                 table.render(static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  }
  if (!different.empty())
    throw InternalError("[zero bench activations] got another state than with kept activations from " + different +
                        ", expected equal ones");
  return 0;
}

}  // namespace zero::cli
