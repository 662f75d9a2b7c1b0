// The predicted schedule matches an Engine: for stages, recipes, tiers, transports, accumulation and policies, three
// steps of a small GPT on forked ranks agree in every unit, byte and call.
#include <gtest/gtest.h>
#include <zero/plan.h>

#include <filesystem>

#include "config/batch.h"
#include "config/document.h"
#include "config/settings.h"
#include "plan/model.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/shm_ranks.h"
#include "tools/explain/live_steps.h"
#include "tools/support/gpt_plan.h"

namespace zero::test::schedule_live_test {
namespace {

using cli::LiveRun;
using cli::LiveTask;

const std::string& folder() {
  static const std::string path = temporary_folder();
  return path;
}

struct Case {
  std::string name;
  int stage = 0;
  std::string zero = {}, keys = {}, recipe = "fp32";  // keys of zero_optimization, of the file
  int accumulation = 1;
  std::string optimizer = "AdamW";
  std::int64_t hidden = 64, layers = 3;
};

std::string text_of(const Case& one) {
  std::string text = R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": ")" + one.optimizer +
                     R"(", "params": {"lr": 0.001}}, "gradient_accumulation_steps": )" +
                     std::to_string(one.accumulation) + R"(, "zero_optimization": {"stage": )" +
                     std::to_string(one.stage) + one.zero + "}" + one.keys;
  if (one.recipe != "fp32")
    text += ", \"" + one.recipe + "\": {\"enabled\": true" +
            (one.recipe == "fp16" ? ", \"initial_scale_power\": 4" : "") + "}";
  return text + "}";
}

// "" or the first difference. other: the case of the schedule, if it differs from the case that runs.
std::string difference(const Case& one, const Comm& comm, const Case* other = nullptr) {
  LiveTask task;
  task.text = text_of(one);
  task.gpt = {.layers = one.layers, .hidden = one.hidden, .heads = 4, .sequence = 16, .vocabulary = 64};
  task.folder = folder();
  task.world = comm->size();
  const auto run = cli::live_steps(task, comm);
  if (comm->rank() != 0) return "";
  if (other != nullptr) task.text = text_of(*other);
  const auto options = task.options();
  const PlanModel model{.kind = PlanModel::Kind::Gpt,
                        .name = "",
                        .layers = one.layers,
                        .hidden = one.hidden,
                        .heads = 4,
                        .sequence = 16,
                        .vocabulary = 64};
  planning::ScheduleInput input;
  input.parameters = planning::parameters_of(model);
  const auto& document = options.document();
  const bool checkpoints = document.is_set("activation_checkpointing.number_checkpoints");
  input.pass = planning::pass_of(cli::with_gpt_pass(model), input.parameters,
                                 checkpoints ? options.settings().activations.num_checkpoints : 0);
  input.topology = planning::topology_of(comm->size(), comm->transport(), /*gpu=*/false);
  input.freedom = step::placement_freedom(step::ShardingPolicy::of_stage(options.settings().zero.stage), /*gpu=*/false,
                                          [&](const char* key) { return document.is_set(key); });
  const auto schedule = planning::schedule(
      input, options.settings(), config::resolve_batch(options, comm->size()).accumulation, 0, 3, run.overflowed);
  std::size_t events = 0;
  for (const auto& rank : run.ranks) events += rank.events.size();
  if (run.overflowed.size() != 3 || events == 0) return "nothing was recorded";
  return cli::first_difference(schedule, run);
}

std::string optimizer_on(const std::string& device, const std::string& more = "") {
  return R"(, "offload_optimizer": {"device": ")" + device + R"(", "nvme_path": ")" + folder() + "\"" + more + "}";
}
std::string parameters_on(const std::string& device, const std::string& more = R"(, "max_in_cpu": 0)") {
  return R"(, "offload_param": {"device": ")" + device + R"(", "nvme_path": ")" + folder() + "\"" + more + "}";
}

// Each placement in two recipes, of which alternately one has two micro-batches.
std::vector<Case> with_recipes(const std::vector<Case>& places) {
  std::vector<Case> all;
  for (const auto& place : places)
    for (const std::string recipe : {"fp32", "bf16"}) {
      auto one = place;
      one.recipe = recipe;
      one.accumulation = 1 + static_cast<int>(all.size() / 2 + all.size()) % 2;
      one.name = "stage " + std::to_string(one.stage) + " " + place.name + ", " + recipe + ", " +
                 std::to_string(one.accumulation) + " micro-batches";
      all.push_back(one);
    }
  return all;
}

constexpr const char* kNormsInFp32 = R"(, "libzero": {"keep_fp32": "*norm*"})";

std::vector<Case> tiers() {
  std::vector<Case> places;
  for (const int stage : {0, 1, 2, 3}) places.push_back({"", stage});
  for (const int stage : {1, 2, 3})
    for (const char* device : {"cpu", "nvme"})
      places.push_back({std::string("optimizer ") + device, stage, optimizer_on(device)});
  places.push_back({"optimizer in part", 2, optimizer_on("nvme", R"(, "ratio": 0.3)")});
  places.push_back({"small tiles", 2, optimizer_on("nvme", R"(, "buffer_count": 8)") + R"(, "sub_group_size": 0)"});
  for (const char* optimizer : {"none", "cpu", "nvme"})
    for (const char* parameters : {"cpu", "nvme"})
      places.push_back({std::string("optimizer ") + optimizer + ", parameters " + parameters, 3,
                        optimizer_on(optimizer) + parameters_on(parameters)});
  places.push_back({"parameters in part", 3, parameters_on("nvme", R"(, "max_in_cpu": 30000)")});
  places.push_back({"norms in fp32, files", 3, optimizer_on("nvme") + parameters_on("nvme"), kNormsInFp32});
  OneIn part(3);
  std::erase_if(places, [&](const Case&) { return !part.take(); });
  for (const int stage : {0, 2, 3}) {
    auto& muon = places.emplace_back(Case{"Muon", stage});
    muon.optimizer = "Muon";
  }
  return with_recipes(places);
}

std::vector<Case> policies() {
  const std::string late = R"(, "delayed_update": {"enabled": true, "start_step": 1})";
  std::vector<Case> places{
      {"kept", 3, R"(, "stage3_max_reuse_distance": 1000000000)"},
      {"kept in part", 3, R"(, "stage3_max_reuse_distance": 1)"},
      {"on demand", 3, R"(, "stage3_prefetch_bucket_size": 0)"},
      {"little at once", 3, R"(, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1000000000)"},
      {"small ones whole", 3, R"(, "stage3_param_persistence_threshold": 200)"},
      {"small ones whole, files", 3,
       R"(, "stage3_param_persistence_threshold": 200)" + optimizer_on("nvme") + parameters_on("nvme")},
      {"one buffer", 3, parameters_on("nvme", R"(, "max_in_cpu": 0, "buffer_count": 1)")},
      {"late, host", 2, optimizer_on("cpu") + late},
      {"late, host, whole gradients", 1, optimizer_on("cpu") + late},
      {"late, files", 3, optimizer_on("nvme") + parameters_on("nvme") + late},
  };
  for (const int stage : {0, 1, 2, 3}) {
    places.push_back({"pieces", stage, R"(, "reduce_bucket_size": 5000)"});
    places.push_back({"overlap", stage, R"(, "overlap_comm": true, "reduce_bucket_size": 5000)"});
    places.push_back({"no overlap", stage, R"(, "overlap_comm": false)"});
    places.push_back({"fp32 on the wire", stage, "", R"(, "communication_data_type": "fp32")"});
    places.push_back({"16 bits on the wire", stage, "", R"(, "communication_data_type": "bf16")"});
    places.push_back({"gradients in bf16", stage, "", R"(, "data_types": {"grad_accum_dtype": "bf16"})"});
    places.push_back({"norms in fp32", stage, "", kNormsInFp32});
    places.push_back({"boundary by step()", stage, "", R"(, "managed_gradient_accumulation": false)"});
    places.push_back({"units joined", stage, "", R"(, "libzero": {"unit_min_numel": 60000})"});
    places.push_back({"checkpointed in one", stage, "",
                      R"(, "activation_checkpointing": {"number_checkpoints": 1, "cpu_checkpointing": true})"});
    places.push_back({"checkpointed in three", stage, "",
                      R"(, "activation_checkpointing": {"number_checkpoints": 3, "cpu_checkpointing": true})"});
    places.push_back({"no moments", stage, stage > 0 ? optimizer_on("nvme") : ""});
    places.back().optimizer = "SGD";
  }
  OneIn part(5);
  std::erase_if(places, [&](const Case&) { return !part.take(); });
  return with_recipes(places);
}

// All cases on one set of ranks; differences are printed immediately.
std::string differences(const std::vector<Case>& cases, const Comm& comm) {
  at::set_num_threads(1);
  std::string all;
  for (const auto& one : cases) {
    std::string text;
    try {
      text = difference(one, comm);
    } catch (const std::exception& error) {
      throw std::runtime_error(one.name + ": " + error.what());
    }
    if (!text.empty()) all += one.name + ": " + text + "\n";
  }
  return all;
}

void expect_agreement(const std::vector<RankEnd>& ends) {
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.error;
}

void on_shared_memory(int world, const std::vector<Case>& cases) {
  expect_agreement(with_ranks(world, [&](Comm comm) {
    const auto text = differences(cases, comm);
    require(text.empty(), text);
  }));
}

// In a child process, so that this one has no threads of torch.
void on_threads(int world, const std::vector<Case>& cases) {
  expect_agreement(fork_ranks(
      1,
      [&](int) {
        run_ranks(world, [&](Comm comm) {
          const auto text = differences(cases, comm);
          require(text.empty(), text);
        });
      },
      std::chrono::seconds(400)));
}

TEST(ScheduleLive, TiersOverSharedMemory) { on_shared_memory(2, tiers()); }
TEST(ScheduleLive, TiersOverThreads) { on_threads(2, tiers()); }
TEST(ScheduleLive, TiersOfThreeRanks) { on_shared_memory(3, tiers()); }
TEST(ScheduleLive, TiersOfOneRank) {
  expect_agreement(fork_ranks(1, [&](int) {
    const auto text = differences(tiers(), Communicator::local());
    require(text.empty(), text);
  }));
}
TEST(ScheduleLive, PoliciesOverSharedMemory) { on_shared_memory(2, policies()); }
TEST(ScheduleLive, PoliciesOverThreads) { on_threads(2, policies()); }

// The comparison detects differences: a run and the schedule of another configuration.
TEST(ScheduleLive, AnotherConfigurationIsNoticed) {
  const std::vector<std::pair<Case, Case>> pairs{
      {{"", 2}, {"", 1}},
      {{"", 3}, {"", 2}},
      {{"", 3, "", "", "bf16"}, {"", 3}},
      {{"", 2, "", "", "fp32", 2}, {"", 2}},
      {{"", 1, optimizer_on("cpu")}, {"", 1}},
      {{"", 2, optimizer_on("nvme")}, {"", 2, optimizer_on("cpu")}},
      {{"", 3, R"(, "stage3_max_reuse_distance": 1000000000)"}, {"", 3}},
      {{"", 3, R"(, "reduce_bucket_size": 5000)"}, {"", 3}},
  };
  // Ranks as threads: all-gathers are the same whether or not units stay unsharded.
  expect_agreement(fork_ranks(1, [&](int) {
    run_ranks(2, [&](Comm comm) {
      at::set_num_threads(1);
      for (const auto& [ran, forecast] : pairs) {
        const auto text = difference(ran, comm, &forecast);
        if (comm->rank() == 0)
          require(!text.empty(), "nothing noticed of " + text_of(ran) + " compared with " + text_of(forecast));
      }
    });
  }));
}

}  // namespace
}  // namespace zero::test::schedule_live_test
