// The step program on the dry backend, beyond what plans cover: groups on separate axes, reductions that end at any
// time, boundaries, refused bookings, and complete release.
#include <gtest/gtest.h>
#include <zero/errors.h>

#include <map>
#include <random>

#include "plan/dry_run.h"
#include "plan/model.h"
#include "plan/model_pass.h"
#include "plan/topology.h"
#include "step/event_list.h"
#include "step/placement.h"
#include "step/whole_update.h"
#include "tools/support/gpt_plan.h"

namespace zero::step::step_program_test {
namespace {

config::Settings settings_of(int stage, config::Precision precision = config::Precision::Fp32) {
  config::Settings settings;
  settings.zero.stage = stage;
  settings.precision = precision;
  return settings;
}

PlanModel small_gpt() {
  PlanModel model{.kind = PlanModel::Kind::Gpt, .name = "", .layers = 4, .hidden = 64, .heads = 4};
  model.sequence = 32;
  model.vocabulary = 128;
  return cli::with_gpt_pass(model);
}

// All objects of a dry run, and the run itself.
struct Training {
  Training(const config::Settings& settings, const RunTopology& topology, std::int64_t accumulation = 1,
           const Completion& completion = {})
      : model(small_gpt()),
        parameters(planning::parameters_of(model)),
        facts(run_facts(settings, topology, accumulation)),
        units(planning::cut_into_units(parameters, settings, topology.world, width(facts.precision.param), false)),
        groups(group_facts(facts, settings, units, place({facts, settings, units, {}}).placements)),
        dry(facts, units, groups, events, completion) {}
  void micro_batch() {
    planning::run_micro_batch(model, parameters, {.samples = 2, .element = width(facts.precision.param)}, dry);
  }
  const PlanModel model;
  const std::vector<planning::Parameter> parameters;
  const RunFacts facts;
  const std::vector<Unit> units;
  const std::vector<GroupFacts> groups;
  EventList events;
  planning::DryRun dry;
};

TEST(StepFacts, AStageIsWhatRestsSharded) {
  for (int stage = 0; stage <= 3; ++stage) {
    const auto sharding = ShardingPolicy::of_stage(stage);
    EXPECT_EQ(sharding.optimizer, stage >= 1);
    EXPECT_EQ(sharding.grads, stage >= 2);
    EXPECT_EQ(sharding.params, stage >= 3);
  }
}

// Two dense units on four ranks, one of experts on an axis of two, one on an axis of one rank: each group is unsharded
// and reduced among the ranks of its axis, and nothing is sent on an axis of one rank.
TEST(StepFacts, EveryGroupHasItsAxis) {
  RunTopology topology;
  topology.axes = {{.name = "dp", .size = 4}, {.name = "edp2", .size = 2}, {.name = "edp1", .size = 1}};
  topology.world = 4;
  const auto settings = settings_of(3);
  const auto run = run_facts(settings, topology, 1);
  std::vector<Unit> units;
  for (const int axis : {0, 0, 1, 2}) {
    units.push_back({.name = "unit" + std::to_string(units.size()),
                     .parameters = {units.size()},
                     .layout = sharding::ShardLayout({6400}, topology.axes[static_cast<std::size_t>(axis)].size, 16),
                     .axis = axis});
  }
  const auto groups = group_facts(run, settings, units, std::vector<Placement>(units.size()));
  EXPECT_TRUE(groups[0].sharding.params);
  EXPECT_TRUE(groups[2].sharding.params);
  EXPECT_FALSE(groups[3].sharding.params) << "one rank has nothing to share";
  EventList events;
  planning::DryRun dry(run, units, groups, events);
  for (std::size_t u = 0; u < units.size(); ++u) dry.use({u});
  dry.begin_backward();
  for (auto u = units.size(); u-- > 0;) dry.gradient(u, dry.make(6400 * 4));
  dry.end_backward();
  dry.step();
  std::map<std::pair<int, OpKind>, std::int64_t> sent;
  for (const auto& event : events.events) sent[{event.op.group, event.op.kind}] += event.op.sent;
  EXPECT_EQ((sent[{0, OpKind::Unshard}]), 6400 * 4 * 3 / 4);
  EXPECT_EQ((sent[{1, OpKind::Reduce}]), 6400 * 4 * 3 / 4);
  EXPECT_EQ((sent[{2, OpKind::Unshard}]), 6400 * 4 / 2);
  EXPECT_EQ((sent[{2, OpKind::Reduce}]), 6400 * 4 / 2);
  EXPECT_EQ((sent[{3, OpKind::Unshard}]), 0);
  EXPECT_EQ((sent[{3, OpKind::Reduce}]), 0);
}

// A unit whose parameters stay fp32 has fp32 parameters, gradients and reductions, which are not quantized, and its
// parameters are the masters; the others have what the recipe says.
TEST(StepFacts, DtypesAreThoseOfTheGroup) {
  RunTopology topology;
  topology.axes = {{.name = "dp", .size = 2, .quantizes = true}};
  topology.world = 2;
  auto settings = settings_of(3, config::Precision::Bf16);
  settings.zero.quantized_weights = settings.zero.quantized_gradients = true;
  const auto run = run_facts(settings, topology, /*accumulation=*/2);
  std::vector<Unit> units;
  for (const bool fp32 : {false, true})
    units.push_back({.name = fp32 ? "norms" : "block",
                     .fp32 = fp32,
                     .parameters = {units.size()},
                     .layout = sharding::ShardLayout::of_group({6400}, 2, width(run.precision_of(fp32).param), true),
                     .states = {"exp_avg", "exp_avg_sq"}});
  const auto groups = group_facts(run, settings, units, std::vector<Placement>(units.size()));
  EXPECT_EQ(groups[0].precision.param, Dtype::BF16);
  EXPECT_EQ(groups[0].precision.reduce, Dtype::BF16);
  EXPECT_EQ(groups[0].precision.grad, Dtype::F32) << "accumulated in fp32";
  EXPECT_EQ(groups[1].precision.param, Dtype::F32);
  EXPECT_EQ(groups[1].precision.reduce, Dtype::F32);
  EXPECT_EQ(groups[1].precision.grad, Dtype::F32);
  EXPECT_EQ(groups[0].unshard_bits, 8);
  EXPECT_EQ(groups[0].reduce_bits, 4);
  EXPECT_EQ(groups[1].unshard_bits, 0);
  EXPECT_EQ(groups[1].reduce_bits, 0);
  EXPECT_FALSE(groups[0].segments.at(0).aliases_master);
  EXPECT_TRUE(groups[1].segments.at(0).aliases_master);
  auto keeping = run;
  keeping.keeps_snapshots = true;
  auto frozen = groups;
  frozen[1].trainable = false;
  EXPECT_EQ(kept_bytes(keeping, {frozen[1]}), kept_bytes(keeping, {frozen[0]}) / 3) << "one value of three, all fp32";
}

// Rank 0 holds a and a part of b, rank 1 the rest of b; rank 0 owns b, rank 1 owns a.
TEST(StepFacts, WholeUpdatesMoveWhatTheOwnerDoesNotHold) {
  for (const int stage : {0, 1, 3})
    for (const int rank : {0, 1}) {
      RunTopology topology;
      topology.axes = {{.name = "dp", .size = 2, .rank = rank}};
      topology.world = 2;
      const auto settings = settings_of(stage);
      std::vector<Unit> units{{.name = "matrices",
                               .parameters = {0, 1},
                               .layout = sharding::ShardLayout({4, 12}, 2, 1),
                               .states = {"momentum_buffer"},
                               .by_rule = true}};
      set_owners(units, 0, 2, [](std::size_t i) { return std::optional(i == 0 ? 1.0 : 2.0); });
      ASSERT_EQ(units[0].owners, (std::vector<int>{1, 0}));
      const auto run = run_facts(settings, topology, 1);
      const auto moved = whole_update(run, group_facts(run, settings, units, {{}})[0]);
      EXPECT_EQ(moved.owned, rank == 0 ? 12 : 4);
      const std::int64_t own_elsewhere = rank == 0 ? 8 : 4, others_here = rank == 0 ? 4 : 8;
      if (stage == 0) {
        EXPECT_EQ(moved.sent_to_owners + moved.received_from_holders, 0);
        EXPECT_EQ(moved.sent_by_owner, 2 * moved.owned);
        EXPECT_EQ(moved.received_from_owners, 2 * (16 - moved.owned));
        EXPECT_EQ(moved.buffer(), moved.owned + 2 * 16);
        continue;
      }
      EXPECT_EQ(moved.sent_to_owners, 3 * others_here) << "gradient, master, state";
      EXPECT_EQ(moved.received_from_holders, 3 * own_elsewhere);
      EXPECT_EQ(moved.sent_by_owner, 2 * own_elsewhere) << "master, state";
      EXPECT_EQ(moved.received_from_owners, 2 * others_here);
      EXPECT_EQ(moved.buffer(), 3 * moved.owned + (rank == 0 ? 16 + 24 : 24 + 16));
    }
}

// Peers sum gradients in place at the stages that keep them whole only if they have one dtype, which is a fact of the
// group.
TEST(StepFacts, GradientsOfOneDtypeStayInPlace) {
  RunTopology topology;
  topology.axes = {{.name = "dp", .size = 2, .peer_reads = true}};
  topology.world = 2;
  const auto settings = settings_of(1, config::Precision::Bf16);
  const auto run = run_facts(settings, topology, /*accumulation=*/2);
  std::vector<Unit> units;
  for (const bool fp32 : {false, true})
    units.push_back({.name = "unit", .fp32 = fp32, .parameters = {0}, .layout = sharding::ShardLayout({6400}, 2, 32)});
  const auto groups = group_facts(run, settings, units, std::vector<Placement>(units.size()));
  EXPECT_EQ(groups[0].grads, GradStorageKind::Flat);
  EXPECT_EQ(groups[1].grads, GradStorageKind::Autograd);
}

// Blocks are released depending on the timing of peers: never above a plan's peak, never below the minimum.
TEST(StepProgram, ReductionsThatEndAtAnyTimeStayWithinThePlan) {
  std::mt19937 random(3);
  for (int stage = 0; stage <= 3; ++stage) {
    const auto peak = [&](const Completion& completion) {
      Training run(settings_of(stage), planning::topology_of(2, "shm", false), 2, completion);
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < 2; ++micro) run.micro_batch();
        run.dry.step();
      }
      return run.dry.report().peak(Tier::Device);
    };
    const auto most = peak({Completion::Late}), least = peak({Completion::Immediate});
    EXPECT_LE(least, most);
    for (int k = 0; k < 8; ++k) {
      Completion replay{Completion::Replay};
      for (int i = 0; i < 200; ++i) replay.answers.push_back(random() % 8 < static_cast<unsigned>(k));
      const auto one = peak(replay);
      EXPECT_LE(one, most) << stage;
      EXPECT_GE(one, least) << stage;
    }
  }
}

TEST(StepProgram, ActsAtBoundariesOnly) {
  Training run(settings_of(2), planning::topology_of(2, "thread", false), 3);
  for (int micro = 0; micro < 3; ++micro) {
    EXPECT_FALSE(run.dry.step().acted) << micro;
    run.micro_batch();
  }
  const auto outcome = run.dry.step();
  EXPECT_TRUE(outcome.acted);
  EXPECT_TRUE(outcome.updated);
  EXPECT_FALSE(run.dry.step().acted) << "nothing has been accumulated since";
}

TEST(StepProgram, AnOverflowUpdatesNothingAndEndsARunThatCannotMend) {
  Training run(settings_of(1), planning::topology_of(2, "thread", false));
  const auto updates = [&] {
    std::int64_t count = 0;
    for (const auto& event : run.events.events) count += event.op.kind == OpKind::Update;
    return count;
  };
  run.micro_batch();
  run.dry.step();
  const auto before = updates();
  EXPECT_GT(before, 0);
  StepOutcome outcome;
  for (int step = 0; step < 10 && !outcome.give_up; ++step) {
    run.micro_batch();
    outcome = run.dry.step(/*overflows=*/true);
    EXPECT_TRUE(outcome.overflow);
    EXPECT_FALSE(outcome.updated);
  }
  EXPECT_TRUE(outcome.give_up);
  EXPECT_EQ(updates(), before);
}

TEST(StepProgram, ASecondGradientAfterTheReductionIsRefused) {
  Training run(settings_of(2), planning::topology_of(2, "thread", false));
  run.dry.begin_backward();
  const auto last = run.units.size() - 1;
  for (const auto parameter : run.units[last].parameters)
    run.dry.gradient(parameter, run.dry.make(run.parameters[parameter].numel * 4));
  EXPECT_FALSE(run.dry.program().accepts_gradient(static_cast<int>(last), 0));
  EXPECT_TRUE(run.dry.program().accepts_gradient(0, 0)) << "it has had none";
  const auto again = run.units[last].parameters[0];
  EXPECT_THROW(run.dry.gradient(again, run.dry.make(run.parameters[again].numel * 4)), InternalError);
}

// A pass fails while gradients have arrived, are stored and are being reduced, for every kind of gradient storage.
TEST(StepProgram, AFailedPassLeavesNothing) {
  for (const char* transport : {"thread", "shm"}) {
    for (const int stage : {0, 1, 2, 3}) {
      Training plain(settings_of(stage), planning::topology_of(2, transport, false), 2);
      Training failing(settings_of(stage), planning::topology_of(2, transport, false), 2);
      for (int step = 0; step < 3; ++step) {
        failing.micro_batch();  // that is accumulated already
        failing.dry.begin_backward();
        for (auto u = failing.units.size(); u-- > 2;)
          for (const auto i : failing.units[u].parameters)
            failing.dry.gradient(i, failing.dry.make(failing.parameters[i].numel * 4));
        failing.dry.program().discard_micro_batch();
        EXPECT_FALSE(failing.dry.step().acted);
        for (auto* run : {&plain, &failing}) {
          for (int micro = 0; micro < 2; ++micro) run->micro_batch();
          EXPECT_TRUE(run->dry.step().updated);
          run->dry.trim();
        }
        for (const auto tier : kTiers)
          for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
            const auto purpose = static_cast<Purpose>(p);
            EXPECT_EQ(failing.dry.report().current(tier, purpose), plain.dry.report().current(tier, purpose))
                << transport << ", stage " << stage << ", " << MemoryReport::name(purpose);
          }
      }
    }
  }
}

TEST(StepProgram, MembersThatAreNotTrainedAreNotAwaited) {
  for (const int stage : {0, 2}) {
    Training run(settings_of(stage), planning::topology_of(2, "thread", false));
    const auto pass = [&](std::size_t without) {
      run.dry.begin_backward();
      for (auto u = run.units.size(); u-- > 0;)
        for (const auto i : run.units[u].parameters)
          if (i != without) run.dry.gradient(i, run.dry.make(run.parameters[i].numel * 4));
      const auto missing = run.dry.program().fill_missing();
      run.dry.end_backward();
      return missing;
    };
    const auto frozen = run.units[1].parameters[2];
    const std::pair<int, int> member{1, 2};
    EXPECT_EQ(pass(frozen), (std::vector{member})) << "awaited while it is trained";
    run.dry.step();
    run.dry.program().set_active(1, 2, false);
    run.events.events.clear();
    EXPECT_TRUE(pass(frozen).empty());
    std::vector<int> reduced;
    for (const auto& event : run.events.events)
      if (event.op.kind == OpKind::Reduce) reduced.push_back(event.op.group);
    EXPECT_EQ(reduced.size(), run.units.size()) << "its group is reduced all the same";
    run.dry.step();
    run.dry.program().set_active(1, 2, true);
    EXPECT_EQ(pass(frozen), (std::vector{member}));
  }
}

TEST(StepMemory, ARefusedBookingChangesNothingAndNothingStaysBooked) {
  step::MemoryLedger ledger;
  ledger.limit(Tier::Device, 1000, "memory.device", "rank 0/1");
  DryBackend backend;
  {
    Memory memory(backend, ledger, /*checksums=*/true);
    auto pooled = memory.take(Memory::kReduce, 100, Dtype::F32);
    EXPECT_THROW(memory.take(Memory::kReduce, 200, Dtype::F32), ConfigError);
    EXPECT_EQ(ledger.report().current(Tier::Device), 400u);
    memory.put(Memory::kReduce, pooled);
    pooled = memory.take(Memory::kReduce, 200, Dtype::F32);  // the idle one makes room
    EXPECT_EQ(ledger.report().current(Tier::Device), 800u);
    EXPECT_THROW(memory.take_block(201), ConfigError);
    const int block = memory.take_block(200);
    memory.give_block(block);
    EXPECT_EQ(memory.take_block(200), block);
    memory.rest({.place = Place::File, .tier = Tier::File, .purpose = Purpose::OptimizerStates}, 1, Dtype::F32);
    EXPECT_EQ(ledger.report().current(Tier::File), 4096u);
    EXPECT_EQ(ledger.report().current(Tier::Host), 8u) << "its checksum";
    ASSERT_EQ(memory.resting().size(), 1u);
    EXPECT_EQ(memory.resting()[0].bytes, 4096);
  }
  for (const auto tier : kTiers) EXPECT_EQ(ledger.report().current(tier), 0u);
}

}  // namespace
}  // namespace zero::step::step_program_test
