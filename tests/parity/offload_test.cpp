// The same bits for every placement of states: masters and optimizer states, gradients and parameters on the device, in
// host memory, in a file, or split, at every stage that shards them.
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "parity/training.h"
#include "support/folder.h"

namespace zero::test::offload_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

std::string folder() {
  static const std::string path = temporary_folder();
  return path;
}

std::string optimizer_on(const std::string& device, const std::string& more = "") {
  return R"(, "offload_optimizer": {"device": ")" + device + R"(", "nvme_path": ")" + folder() + "\"" + more + "}";
}
std::string parameters_on(const std::string& device, const std::string& more = R"(, "max_in_cpu": 0)") {
  return R"(, "offload_param": {"device": ")" + device + R"(", "nvme_path": ")" + folder() + "\"" + more + "}";
}

Training setup_of(int stage, int world, const std::string& recipe, const std::string& zero = "") {
  Training setup;
  setup.stage = stage;
  setup.world = world;
  setup.steps = 4;
  setup.recipe = recipe;
  setup.clip = 0.1;
  setup.zero = zero;
  return setup;
}

struct Case {
  std::string name, zero;
  int least_stage = 1;
};

std::vector<Case> cases() {
  std::vector<Case> all{
      {"optimizer on host", optimizer_on("cpu")},
      {"optimizer in file", optimizer_on("nvme")},
      {"most of the optimizer on host", optimizer_on("cpu", R"(, "ratio": 0.7)")},
      {"some of the optimizer in file", optimizer_on("nvme", R"(, "ratio": 0.3)")},
      {"in file without a pipeline", optimizer_on("nvme", R"(, "pipeline_read": false, "pipeline_write": false)")},
      {"in file with one buffer", optimizer_on("nvme", R"(, "buffer_count": 4)") + R"(, "sub_group_size": 0)"},
  };
  for (const char* optimizer : {"none", "cpu", "nvme"})
    for (const char* parameters : {"cpu", "nvme"})
      all.push_back({std::string("optimizer ") + optimizer + ", parameters " + parameters,
                     optimizer_on(optimizer) + parameters_on(parameters), 3});
  all.push_back(
      {"parameters in file, one buffer", parameters_on("nvme", R"(, "max_in_cpu": 0, "buffer_count": 1)"), 3});
  all.push_back({"some parameters in file", parameters_on("nvme", R"(, "max_in_cpu": 30000)"), 3});
  return all;
}

class Offload : public testing::TestWithParam<std::tuple<int, int, std::string>> {};

TEST_P(Offload, GivesTheBitsOfTheDevice) {
  const auto [stage, world, recipe] = GetParam();
  const auto plain = train_threads(setup_of(stage, world, recipe));
  for (const auto& one : cases()) {
    if (stage < one.least_stage) continue;
    const auto run = train_threads(setup_of(stage, world, recipe, one.zero));
    EXPECT_EQ(run.hash, plain.hash) << one.name;
    EXPECT_EQ(run.losses, plain.losses) << one.name;
    EXPECT_TRUE(equal_bits(run.masters, plain.masters)) << one.name;
    for (std::size_t rank = 0; rank < plain.stats.size(); ++rank)
      EXPECT_EQ(run.stats[rank].bytes_sent(), plain.stats[rank].bytes_sent()) << one.name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Offload,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(1, 2, 3),
                                          testing::Values("fp32", "bf16")),
                         [](const auto& info) {
                           return "stage" + std::to_string(std::get<0>(info.param)) + "_world" +
                                  std::to_string(std::get<1>(info.param)) + "_" + std::get<2>(info.param);
                         });

// Accumulation, loss scaling with skipped steps, and rules with other states than two zeros.
TEST(OffloadRecipes, AccumulationScalingAndOtherRulesChangeNothing) {
  for (const char* where : {"cpu", "nvme"}) {
    for (const int stage : {1, 2, 3}) {
      auto setup = setup_of(stage, 2, "fp16");
      setup.accumulation = 3;
      auto offloaded = setup;
      offloaded.zero = optimizer_on(where);
      EXPECT_EQ(train_threads(offloaded).hash, train_threads(setup).hash) << where << ", stage " << stage;
    }
    for (const char* rule :
         {R"({"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}})",
          R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})", R"({"type": "SGD", "params": {"lr": 0.01}})",
          R"({"type": "Lion", "params": {"lr": 0.001}})"}) {
      auto setup = setup_of(2, 2, "bf16");
      setup.optimizer = rule;
      auto offloaded = setup;
      offloaded.zero = optimizer_on(where);
      EXPECT_EQ(train_threads(offloaded).hash, train_threads(setup).hash) << where << ", " << rule;
    }
  }
}

// Every kind of module, with frozen, tied and unused parameters, dropout and running statistics.
TEST(OffloadModules, AnyModuleTrainsFromAFile) {
  for (const auto& task : problems()) {
    auto setup = setup_of(3, 2, "fp32");
    setup.problem = task.name;
    setup.clip = 0;
    auto offloaded = setup;
    offloaded.zero = optimizer_on("nvme") + parameters_on("nvme");
    EXPECT_EQ(train_threads(offloaded).hash, train_threads(setup).hash) << task.name;
  }
}

struct Held {
  MemoryReport resting, peak;
  std::uint64_t numel = 0;
};

Held held_by(const std::string& zero, const std::string& recipe, int world) {
  const auto setup = setup_of(3, world, recipe, zero);
  Held held;
  std::mutex mutex;
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto& task = problem("padded_free_gpt");
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    for (int step = 0; step < 3; ++step) {
      engine.reset_peak_memory();
      engine.backward(loss_of(task, *module, comm->rank(), step, dtype_of(setup)));
      engine.step();
    }
    std::lock_guard lock(mutex);
    if (comm->rank() != 0) return;
    held.resting = held.peak = engine.memory();
    for (const auto& [name, numel] : engine.units()) held.numel += static_cast<std::uint64_t>(numel);
  });
  return held;
}

// The ledger's tiers follow the placement: states are booked only on the tier where they are stored.
TEST(OffloadMemory, EveryStateIsBookedOnItsTier) {
  const int world = 2;
  const auto device = held_by("", "bf16", world);
  const auto P = device.numel, shard = P / world;
  EXPECT_EQ(device.resting.current(Tier::Device, Purpose::OptimizerStates), 8 * shard);
  EXPECT_EQ(device.resting.current(Tier::Host), 0U);

  const auto host = held_by(optimizer_on("cpu"), "bf16", world);
  EXPECT_EQ(host.resting.current(Tier::Host, Purpose::OptimizerStates), 8 * shard);
  EXPECT_EQ(host.resting.current(Tier::Host, Purpose::MasterParameters), 4 * shard);
  EXPECT_EQ(host.resting.current(Tier::Host, Purpose::Gradients), 2 * shard);
  EXPECT_EQ(host.resting.current(Tier::Device, Purpose::OptimizerStates), 0U);
  EXPECT_EQ(host.resting.current(Tier::Device, Purpose::MasterParameters), 0U);
  EXPECT_EQ(host.resting.current(Tier::Device, Purpose::Gradients), 0U);
  EXPECT_EQ(host.resting.current(Tier::Device, Purpose::Parameters), 2 * shard);

  const auto file = held_by(optimizer_on("nvme") + parameters_on("nvme"), "bf16", world);
  const std::uint64_t padding = 4096 * 16;  // a region takes whole blocks
  const auto near = [&](std::uint64_t got, std::uint64_t wanted) {
    EXPECT_GE(got, wanted);
    EXPECT_LE(got, wanted + padding);
  };
  near(file.resting.current(Tier::File, Purpose::OptimizerStates), 8 * shard);
  near(file.resting.current(Tier::File, Purpose::MasterParameters), 4 * shard);
  near(file.resting.current(Tier::File, Purpose::Parameters), 2 * shard);
  EXPECT_EQ(file.resting.current(Tier::Host, Purpose::OptimizerStates), 0U);
  EXPECT_EQ(file.resting.current(Tier::Device, Purpose::Parameters), 0U);
  EXPECT_LT(file.peak.peak(Tier::Device), device.peak.peak(Tier::Device));
}

TEST(OffloadCheckpoint, ContinuesFromAFileAndBetweenTiers) {
  const auto root = folder() + "/checkpoints";
  const std::vector<std::string> places{"", optimizer_on("cpu"), optimizer_on("nvme") + parameters_on("nvme")};
  std::string expected;
  for (std::size_t from = 0; from < places.size(); ++from) {
    for (std::size_t to = 0; to < places.size(); ++to) {
      std::string hash;
      std::mutex mutex;
      run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
        at::set_num_threads(1);
        const auto& task = problem("gpt");
        const auto run = [&](const std::string& zero, int first, int last, bool load) {
          const auto setup = setup_of(3, 2, "bf16", zero);
          auto module = make_module(task);
          Engine engine(module, Options::from_json(json_of(setup)), comm);
          if (load) engine.load_checkpoint(root);
          for (int step = first; step < last; ++step) {
            engine.backward(loss_of(task, *module, comm->rank(), step, at::kBFloat16));
            engine.step();
          }
          if (!load) engine.save_checkpoint(root, "at" + std::to_string(from) + std::to_string(to));
          return engine.state_hash();
        };
        run(places[from], 0, 2, false);
        const auto last = run(places[to], 2, 4, true);
        std::lock_guard lock(mutex);
        hash = last;
      });
      if (expected.empty()) expected = hash;
      EXPECT_EQ(hash, expected) << from << " to " << to;
    }
  }
}

// A scope in which the program writes parameters whose states are in files, and unsharded masters.
TEST(OffloadScopes, ParametersInFilesCanBeWrittenAndReadWhole) {
  std::map<std::string, at::Tensor> masters[2];
  std::string hashes[2];
  for (const int offloaded : {0, 1}) {
    std::mutex mutex;
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      const auto& task = problem("gpt");
      auto module = make_module(task);
      Engine engine(module,
                    Options::from_json(
                        json_of(setup_of(3, 2, "bf16", offloaded ? optimizer_on("nvme") + parameters_on("nvme") : ""))),
                    comm);
      for (int step = 0; step < 2; ++step) {
        engine.backward(loss_of(task, *module, comm->rank(), step, at::kBFloat16));
        engine.step();
        auto scope = engine.gathered_parameters(/*modify=*/true);
        at::NoGradGuard no_grad;
        for (auto& parameter : module->parameters())
          if (parameter.dim() == 1) parameter.mul_(1.5);
      }
      const auto hash = engine.state_hash();
      auto whole = engine.full_state_dict();
      std::lock_guard lock(mutex);
      if (comm->rank() != 0) return;
      hashes[offloaded] = hash;
      masters[offloaded] = std::move(whole);
    });
  }
  EXPECT_EQ(hashes[0], hashes[1]);
  EXPECT_TRUE(equal_bits(masters[0], masters[1]));
}

TEST(OffloadFaults, AFolderThatIsNotThereAndAFileThatDoesNotFitEndTheStart) {
  const auto start = [&](const std::string& zero) {
    std::string text;
    try {
      auto module = make_module(problem("gpt"));
      Engine engine(module, Options::from_json(json_of(setup_of(3, 1, "fp32", zero))), Communicator::local());
    } catch (const IoError& e) {
      text = e.what();
    } catch (const ConfigError& e) {
      text = e.what();
    }
    return text;
  };
  const auto missing = start(R"(, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere/at/all"})");
  EXPECT_NE(missing.find("/nowhere/at/all"), std::string::npos) << missing;
  EXPECT_NE(missing.find("rank 0/1"), std::string::npos) << missing;
  const auto small = start(parameters_on("nvme", R"(, "max_in_cpu": 0, "buffer_size": 10)"));
  EXPECT_NE(small.find("buffer_size: got 10 elements, expected at least"), std::string::npos) << small;
}

}  // namespace
}  // namespace zero::test::offload_test
