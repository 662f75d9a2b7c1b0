// Memory needs and placement of states under budgets: the order in which states leave the device, refusals, that the
// smallest feasible budget is the smallest, and that no step exceeds the need that a budget was compared with.
#include <gtest/gtest.h>

#include <memory>

#include "config/byte_count.h"
#include "plan/dry_run.h"
#include "plan/model.h"
#include "plan/model_pass.h"
#include "plan/topology.h"
#include "step/placement.h"
#include "tools/support/gpt_plan.h"

namespace zero::step::placement_test {
namespace {

// A root of 1000 and eight units of 4000 elements each, fp32 on two ranks at stage 3, Adam: 36000 parameters, of which
// a rank keeps 18000, 4 bytes each, and moments of 8.
std::vector<Unit> units() {
  const auto unit = [](const std::string& name, std::vector<std::int64_t> numels, std::int64_t alignment) {
    Unit made{.name = name, .parameters = {}, .layout = sharding::ShardLayout(std::move(numels), 2, alignment)};
    made.parameters.resize(made.layout.num_parameters());
    made.states = {"exp_avg", "exp_avg_sq"};
    return made;
  };
  std::vector<Unit> all{unit("root", {500, 500}, 512)};
  all.back().root = true;
  for (int i = 0; i < 8; ++i) all.push_back(unit("blocks." + std::to_string(i), {1000, 1000, 1000, 1000}, 1024));
  return all;
}

constexpr std::int64_t kShards = 512 + 8 * 2048;
// The root and two units are unsharded at once; the root's and three units' gradients wait for their sums: two are
// under way while the next arrive.
constexpr std::int64_t kUnsharded = (1024 + 2 * 4096) * 4, kReduced = (1024 + 3 * 4096) * 4;
constexpr std::int64_t kTransient = kUnsharded + kReduced;

// A task and the objects that it references.
struct Task {
  explicit Task(int stage = 3, PlacementFreedom freedom = {.optimizer = true, .params = true}, bool gpu = false)
      : freedom(freedom), gpu(gpu) {
    settings.zero.stage = stage;
    settings.zero.sub_group_size = 8192;
  }
  Task& with(std::optional<std::int64_t> device, std::optional<std::int64_t> host = {},
             std::optional<std::int64_t> file = {}, std::int64_t activations = 0) {
    settings.memory.device = device;
    settings.memory.host = host;
    settings.memory.file = file;
    settings.memory.activations = activations;
    return *this;
  }
  PlacementTask get() {
    run = run_facts(settings, planning::topology_of(2, gpu ? "nccl" : "thread", gpu), 1);
    return {run, settings, all, freedom};
  }
  PlacementPlan place() { return step::place(get()); }
  Need need() { return *place().need; }

  config::Settings settings;
  PlacementFreedom freedom;
  const bool gpu;
  RunFacts run;
  std::vector<Unit> all = units();
};

constexpr std::int64_t kPlenty = std::int64_t{1} << 40;

TEST(Budget, OfStageThreeIsTheShardsTwoUnitsAndThreeReductions) {
  const auto need = Task().with(kPlenty).need();
  EXPECT_EQ(need.of(Tier::Device, Purpose::Parameters), kShards * 4);
  EXPECT_EQ(need.of(Tier::Device, Purpose::OptimizerStates), kShards * 8);
  EXPECT_EQ(need.of(Tier::Device, Purpose::GatherBuffers), kUnsharded);
  EXPECT_EQ(need.of(Tier::Device, Purpose::ReduceBuffers), kReduced);
  EXPECT_EQ(need.total(Tier::Device), kShards * (4 + 4 + 8) + kTransient);
  EXPECT_EQ(need.total(Tier::Host), 0);
  EXPECT_EQ(need.total(Tier::File), 0);
}

TEST(Placement, WithRoomNothingMoves) {
  const auto plan = Task().with(kShards * 16 + kTransient).place();
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(plan.placements, std::vector<Placement>(9));
}

TEST(Placement, OptimizerStatesLeaveFirstAndNoMoreThanNeeded) {
  const auto plan = Task().with(kShards * 16 + kTransient - 1).place();
  ASSERT_TRUE(plan.fits);
  int moved = 0;
  for (const auto& placement : plan.placements) {
    EXPECT_EQ(placement.params, Tier::Device);
    moved += placement.optimizer == Tier::Host;
  }
  EXPECT_EQ(moved, 1);
  // The parameter was also the master; now there is a separate master on the host.
  EXPECT_EQ(plan.need->total(Tier::Host), 2048 * (4 + 8 + 4));
}

TEST(Placement, ThenParameters) {
  const auto plan = Task().with(kTransient + 1000 * 4).place();
  ASSERT_TRUE(plan.fits);
  int optimizer = 0, params = 0;
  for (const auto& placement : plan.placements) {
    optimizer += placement.optimizer == Tier::Host;
    params += placement.params == Tier::Host;
  }
  EXPECT_EQ(optimizer, 9);
  EXPECT_GE(params, 8);
}

TEST(Placement, WhatTheHostCannotHoldGoesToTheFileOnlyIfThereIsOne) {
  constexpr std::int64_t kDevice = kTransient + 1000 * 4, kHost = 500'000;
  EXPECT_FALSE(Task().with(kDevice, 200'000).place().fits);
  const auto plan = Task().with(kDevice, kHost, 10'000'000).place();
  ASSERT_TRUE(plan.fits);
  EXPECT_LE(plan.need->total(Tier::Device), kDevice);
  EXPECT_LE(plan.need->total(Tier::Host), kHost);
}

TEST(Placement, TheSmallestBudgetNamedWorksAndOneByteLessDoesNot) {
  int named = 0;
  for (const int stage : {1, 2, 3}) {
    for (const auto tier : {Tier::Device, Tier::Host}) {
      Task task(stage);
      const auto with = [&](std::int64_t bytes) {
        return tier == Tier::Device ? task.with(bytes, 10'000'000).get() : task.with(250'000, bytes).get();
      };
      const auto first = with(1);
      if (place(first).fits) continue;
      const auto smallest = smallest_budget(first, tier);
      if (!smallest) continue;
      ++named;
      EXPECT_TRUE(place(with(*smallest)).fits) << "stage " << stage;
      EXPECT_FALSE(place(with(*smallest - 1)).fits) << "stage " << stage;
    }
  }
  EXPECT_GT(named, 3);
}

TEST(Placement, WhatIsFixedStays) {
  Task task(3, {.params = true});
  task.settings.zero.offload_optimizer.device = config::OffloadDevice::Cpu;
  const auto plan = task.with({}, 1000, 1'000'000'000).place();
  EXPECT_FALSE(plan.fits);
  EXPECT_EQ(plan.placements[0].optimizer, Tier::Host);
}

TEST(Placement, PersistentParametersStay) {
  Task task;
  task.all[8].persistent = true;
  const auto plan = task.with(1, kPlenty).place();
  EXPECT_EQ(plan.placements[8].params, Tier::Device);
  EXPECT_EQ(plan.placements[8].optimizer, Tier::Host);
  EXPECT_EQ(plan.placements[7].params, Tier::Host);
}

TEST(Placement, OnADeviceWithKernelsOfItsOwnOptimizerStatesMoveTogether) {
  Task task(3, {.optimizer = true, .params = true, .together = true}, /*gpu=*/true);
  const auto plan = task.with(kShards * 16 + kTransient - 1).place();
  ASSERT_TRUE(plan.fits);
  for (const auto& placement : plan.placements) EXPECT_EQ(placement.optimizer, Tier::Host);
}

TEST(Placement, RoomForActivationsCounts) {
  EXPECT_TRUE(Task(3, {}).with(kShards * 16 + kTransient + 99, {}, {}, 99).place().fits);
  EXPECT_FALSE(Task(3, {}).with(kShards * 16 + kTransient + 99, {}, {}, 100).place().fits);
}

TEST(Placement, TheTextNamesTiersBudgetsAndWhatMoved) {
  Task task;
  const auto budget = kShards * 16 + kTransient - 1;
  const auto plan = task.with(budget).place();
  const auto text = describe(task.get(), plan);
  EXPECT_NE(text.find("of " + std::to_string(budget)), std::string::npos) << text;
  EXPECT_NE(text.find("optimizer states in host memory: blocks.7"), std::string::npos) << text;
}

TEST(Placement, ARefusalNamesTheNeedAndTheSmallestBudget) {
  Task task(3, {});
  const auto least = kShards * 16 + kTransient;
  const auto plan = task.with(1000).place();
  ASSERT_FALSE(plan.fits);
  EXPECT_EQ(refusal(task.get(), plan, "rank 0/2"),
            "memory.device: got 1000 bytes, expected at least " + std::to_string(least) +
                " with everything moved off it that may move (rank 0/2). Hint: the smallest budget that works is "
                "memory.device = " +
                std::to_string(least) + ".");
}

// --- no step takes more -----------------------------------------------------------------------

struct Trained {
  std::string name;
  config::Settings settings;
  RunTopology topology;
  std::int64_t accumulation = 1;
};

// Five cases, each with its tier, in which an earlier formula over units was too low; and a plain case.
std::vector<std::pair<Tier, Trained>> trained() {
  using config::OffloadDevice;
  using planning::topology_of;
  std::vector<std::pair<Tier, Trained>> all;
  const auto add = [&](Tier tier, const char* name, int stage, const RunTopology& topology) -> config::Settings& {
    Trained made{.name = name, .settings = {}, .topology = topology};
    made.settings.zero.stage = stage;
    made.settings.precision = config::Precision::Bf16;
    all.emplace_back(tier, std::move(made));
    return all.back().second.settings;
  };
  add(Tier::Device, "plain", 3, topology_of(2, "thread", false));
  add(Tier::Device, "three reductions", 2, topology_of(4, "thread", false)).zero.overlap_comm = true;
  add(Tier::Device, "reductions of one rank", 0, topology_of(1, "local", false));
  all.back().second.accumulation = 2;
  add(Tier::Device, "integers of qwZ", 3, topology_of(4, "gloo", false)).zero.quantized_weights = true;
  add(Tier::Device, "reuse distance", 3, topology_of(2, "thread", false)).zero.max_reuse_distance = 1'000'000'000;
  auto& persistent = add(Tier::Device, "small parameters of all layers are one unit", 3, topology_of(2, "gloo", false));
  persistent.zero.persistence_threshold = 300;
  persistent.zero.model_persistence_threshold = 1'000'000;
  auto& cut = add(Tier::Device, "units and the root in pieces", 1, topology_of(1, "local", false));
  cut.zero.reduce_bucket_size = 10'000;
  cut.zero.offload_optimizer.device = OffloadDevice::Cpu;
  auto& converted = add(Tier::Device, "peers read another dtype", 2, topology_of(2, "shm", false));
  converted.communication_dtype = config::Precision::Fp32;
  auto& params = add(Tier::Host, "states on the device, parameters in files", 3, topology_of(2, "thread", false));
  params.zero.offload_param.device = OffloadDevice::Nvme;
  params.zero.offload_param.max_in_cpu = 0;
  return all;
}

// Steps of a GPT, without activations, compared with the need that budgets are checked against.
TEST(Budget, NoStepOfAGptTakesMore) {
  PlanModel model{.kind = PlanModel::Kind::Gpt, .name = "", .layers = 6, .hidden = 64, .heads = 4};
  model.sequence = 32;
  model.vocabulary = 128;
  model = cli::with_gpt_pass(model);
  const auto parameters = planning::parameters_of(model);
  for (const auto& [checked, one] : trained()) {
    const auto run = run_facts(one.settings, one.topology, one.accumulation);
    const auto units =
        planning::cut_into_units(parameters, one.settings, one.topology.world, width(run.precision.param), false);
    const auto plan = place({run, one.settings, units, {}});
    const auto groups = group_facts(run, one.settings, units, plan.placements);
    const auto need = need_of(run, groups);
    ByteCounter counter(run);
    planning::DryRun dry(run, units, groups, counter);
    for (int step = 0; step < 6; ++step) {
      for (std::int64_t micro = 0; micro < one.accumulation; ++micro)
        planning::run_micro_batch(model, parameters, {.samples = 2, .element = width(run.precision.param)}, dry);
      dry.step();
    }
    const auto report = dry.report();
    for (const auto tier : kTiers)
      for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
        if (const auto purpose = static_cast<Purpose>(p); purpose != Purpose::Activations) {
          EXPECT_LE(report.peak(tier, purpose), static_cast<std::uint64_t>(need.of(tier, purpose)))
              << one.name << ", " << MemoryReport::name(tier) << ", " << MemoryReport::name(purpose);
        }
    // The need is not far too high either: at most the sum of the purposes' peaks in a longer training.
    std::int64_t held = 0;
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (const auto purpose = static_cast<Purpose>(p); purpose != Purpose::Activations)
        held += static_cast<std::int64_t>(report.peak(checked, purpose));
    EXPECT_GT(held, 0) << one.name;
    EXPECT_LE(need.total(checked), held + held / 4) << one.name;
  }
}

TEST(ByteCount, AsPeopleWriteThem) {
  using config::byte_count;
  EXPECT_EQ(byte_count("0"), 0);
  EXPECT_EQ(byte_count("9223372036854775807"), 9223372036854775807);
  EXPECT_EQ(byte_count("2GB"), 2'000'000'000);
  EXPECT_EQ(byte_count("2GiB"), 2147483648);
  EXPECT_EQ(byte_count(" 1.5 gib "), 1610612736);
  EXPECT_EQ(byte_count("40g"), 40'000'000'000);
  EXPECT_EQ(byte_count("512KiB"), 524288);
  EXPECT_EQ(byte_count("3PB"), 3'000'000'000'000'000);
  for (const char* bad :
       {"", "GB", "-1", "1e9", "2 GB free", "2XB", "1.2.3", "999999PB", "nan", "0x10", ".5GB", "1.5", "1.5 B"})
    EXPECT_EQ(byte_count(bad), std::nullopt) << bad;
}

}  // namespace
}  // namespace zero::step::placement_test
