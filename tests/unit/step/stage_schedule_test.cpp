// The schedule of a step from a configuration: its bytes follow the papers' formulas, its events are those derived by
// hand for a small model, and a run that differs is detected. Comparison with an Engine: tests/tools/explain_test.cpp.
#include <gtest/gtest.h>
#include <zero/errors.h>
#include <zero/plan.h>

#include <algorithm>

#include "plan/formulas.h"
#include "plan/model.h"
#include "plan/schedule.h"
#include "plan/topology.h"
#include "tools/explain/live_record.h"
#include "tools/support/gpt_plan.h"

namespace zero::planning::stage_schedule_test {
namespace {

PlanModel tiny(std::int64_t layers = 1, std::int64_t hidden = 16) {
  return {.kind = PlanModel::Kind::Gpt,
          .name = "",
          .layers = layers,
          .hidden = hidden,
          .heads = 2,
          .sequence = 8,
          .vocabulary = 32};
}

struct Wish {
  int world = 2;
  std::string transport = "gloo", more = {};  // keys of zero_optimization
  std::string keys = {};                      // others
  std::string recipe = "fp32";
  std::int64_t accumulation = 1;
  PlanModel model = tiny();
  bool gpu = false, deferred = true;
  std::int64_t first_step = 0, segments = 0;
  std::vector<bool> overflowed = {};
};

Schedule schedule_of(int stage, const Wish& wish = {}) {
  std::string json =
      "{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.001}}, \"gradient_accumulation_steps\": " +
      std::to_string(wish.accumulation) + ", \"zero_optimization\": {\"stage\": " + std::to_string(stage) + wish.more +
      "}" + wish.keys;
  if (wish.recipe != "fp32") json += ", \"" + wish.recipe + "\": {\"enabled\": true}";
  const auto options = Options::from_json(json + "}");
  ScheduleInput input;
  input.parameters = parameters_of(wish.model);
  input.pass = pass_of(cli::with_gpt_pass(wish.model), input.parameters, wish.segments);
  input.topology = topology_of(wish.world, wish.world == 1 ? "local" : wish.transport, wish.gpu, wish.deferred);
  return schedule(input, options.settings(), wish.accumulation, wish.first_step, 3, wish.overflowed);
}

// "gather root 2688", in order, of one phase of the third step.
std::vector<std::string> events_of(const Schedule& s, Phase phase, int micro = 0, int step = 2) {
  std::vector<std::string> lines;
  for (const auto& e : s.events)
    if (e.phase == phase && e.micro == micro && (phase == Phase::Build || e.step == step))
      lines.push_back(std::string(name(e.how)) + " " + e.unit + " " + std::to_string(e.bytes));
  return lines;
}

std::int64_t sent_in(const Schedule& s, int step) {
  std::int64_t sum = 0;
  for (const auto& e : s.events)
    if (e.phase != Phase::Build && e.step == step) sum += e.sent;
  return sum;
}

std::int64_t held(const Schedule& s, const std::string& state, Tier tier) {
  std::int64_t sum = 0;
  for (const auto& h : s.holdings)
    if (h.state == state && h.tier == tier) sum += h.bytes;
  return sum;
}

using Lines = std::vector<std::string>;

// By hand: hidden 16, 1 layer, 32 tokens, 8 places. Root: 512 + 128 + 16 + 16 elements = 672, no padding for 2 ranks of
// 16-element steps. Block: 12 * 256 + 13 * 16 = 3280, padded to 3296.
TEST(StageSchedule, AStepOfATinyModelByHand) {
  const auto zero = schedule_of(0);
  EXPECT_EQ(zero.padded_numel, 672 + 3296);
  EXPECT_EQ(events_of(zero, Phase::Forward), Lines{});
  EXPECT_EQ(events_of(zero, Phase::Backward), (Lines{"reduce-scatter blocks.0 13184", "all-gather blocks.0 13184",
                                                     "reduce-scatter root 2688", "all-gather root 2688"}));
  EXPECT_EQ(events_of(zero, Phase::Step), (Lines{"update root 8064", "update blocks.0 39552"}));
  const auto one = schedule_of(1);
  EXPECT_EQ(events_of(one, Phase::Backward), (Lines{"reduce-scatter blocks.0 13184", "reduce-scatter root 2688"}));
  EXPECT_EQ(events_of(one, Phase::Step),
            (Lines{"update root 4032", "all-gather root 2688", "update blocks.0 19776", "all-gather blocks.0 13184"}));
  const auto three = schedule_of(3);
  EXPECT_EQ(events_of(three, Phase::Forward), (Lines{"all-gather root 2688", "all-gather blocks.0 13184"}));
  EXPECT_EQ(events_of(three, Phase::Backward), (Lines{"all-gather root 2688", "all-gather blocks.0 13184",
                                                      "reduce-scatter blocks.0 13184", "reduce-scatter root 2688"}));
  EXPECT_EQ(events_of(three, Phase::Step), (Lines{"update root 4032", "update blocks.0 19776"}));
  EXPECT_EQ(events_of(three, Phase::Build), Lines{});
  EXPECT_EQ(sent_in(three, 2), 3 * (2688 + 13184) / 2);
  // Between processes of one host shards of at least 4 KiB are mapped, and gradients summed where they lie.
  const auto mapped = schedule_of(3, {.transport = "shm"});
  EXPECT_EQ(events_of(mapped, Phase::Forward), (Lines{"all-gather root 2688", "mapped in place blocks.0 13184"}));
  EXPECT_EQ(events_of(schedule_of(0, {.transport = "shm"}), Phase::Backward),
            (Lines{"all-reduce blocks.0 13184", "all-reduce root 2688"}));
}

TEST(StageSchedule, InitialValuesAreSentUnlessEveryRankMakesThem) {
  const auto s = schedule_of(2, {.deferred = false});
  EXPECT_EQ(events_of(s, Phase::Build), (Lines{"broadcast root 2688", "broadcast blocks.0 13184"}));
  EXPECT_EQ(events_of(schedule_of(2, {.recipe = "bf16", .deferred = false}), Phase::Build),
            (Lines{"broadcast root 2816", "broadcast blocks.0 13568"}))
      << "fp32 values of units that are padded for bf16: 16 elements to 32, units to 64";
}

// sent = formula(padded), to the byte, whatever carries it.
TEST(StageSchedule, TheVolumeOfEveryStageIsThePapers) {
  constexpr Scheme kSchemes[] = {Scheme::Stage0, Scheme::Stage1, Scheme::Stage2, Scheme::Stage3};
  int checked = 0;
  for (const int stage : {0, 1, 2, 3})
    for (const int world : {1, 2, 3, 4, 8, 64})
      for (const std::int64_t k : {1, 2, 5})
        for (const std::string transport : {"thread", "shm", "gloo"})
          for (const std::string recipe : {"fp32", "bf16"})
            for (const std::string wire : {"", "fp32"}) {
              Wish wish{
                  .world = world, .transport = transport, .recipe = recipe, .accumulation = k, .model = tiny(3, 48)};
              if (!wire.empty()) wish.keys = ", \"communication_data_type\": \"" + wire + "\"";
              const auto s = schedule_of(stage, wish);
              const double formula = sent_bytes(
                  kSchemes[stage],
                  {.parameter_bytes = static_cast<double>(s.padded_numel * s.parameter_width),
                   .gradient_bytes = static_cast<double>(s.padded_numel * step::width(s.precision[0].reduce)),
                   .ranks = static_cast<double>(world),
                   .micro_steps = static_cast<double>(k)});
              for (const int step : {0, 1, 2})
                EXPECT_NEAR(static_cast<double>(sent_in(s, step)), formula, 1e-6 * formula)
                    << "stage " << stage << ", world " << world << ", k " << k << ", " << transport << ", " << recipe
                    << ", step " << step;
              // Padding is less than a step of every unit's every parameter.
              EXPECT_GE(s.padded_numel, wish.model.num_parameters());
              EXPECT_LE(s.padded_numel, wish.model.num_parameters() +
                                            static_cast<std::int64_t>(s.units.size()) * (32 * world + 32 * 12));
              ++checked;
            }
  EXPECT_EQ(checked, 4 * 6 * 3 * 3 * 2 * 2);
}

TEST(StageSchedule, WholeGradientsAreSentAtTheBoundaryOnly) {
  for (const int stage : {0, 1}) {
    const auto s = schedule_of(stage, {.accumulation = 3});
    EXPECT_EQ(events_of(s, Phase::Backward, 0), Lines{}) << stage;
    EXPECT_EQ(events_of(s, Phase::Backward, 1), Lines{}) << stage;
    EXPECT_FALSE(events_of(s, Phase::Backward, 2).empty()) << stage;
  }
  const auto two = schedule_of(2, {.accumulation = 3});
  for (const int micro : {0, 1, 2})
    EXPECT_EQ(events_of(two, Phase::Backward, micro),
              (Lines{"reduce-scatter blocks.0 13184", "reduce-scatter root 2688"}))
        << micro;
}

// Where the program declares the boundary, whole gradients are reduced by step() itself.
TEST(StageSchedule, ABoundaryDeclaredByStep) {
  const std::string keys = ", \"managed_gradient_accumulation\": false";
  const auto one = schedule_of(1, {.keys = keys});
  EXPECT_EQ(events_of(one, Phase::Backward), Lines{});
  EXPECT_EQ(events_of(one, Phase::Step),
            (Lines{"reduce-scatter blocks.0 13184", "reduce-scatter root 2688", "update root 4032",
                   "all-gather root 2688", "update blocks.0 19776", "all-gather blocks.0 13184"}));
  EXPECT_EQ(events_of(schedule_of(2, {.keys = keys}), Phase::Backward).size(), 2u);
}

TEST(StageSchedule, OffloadedOptimizerStates) {
  // Whole gradients are reduced on the device; the own part goes to host memory.
  const auto one = schedule_of(1, {.more = R"(, "offload_optimizer": {"device": "cpu"})"});
  EXPECT_EQ(events_of(one, Phase::Backward), (Lines{"reduce-scatter blocks.0 13184", "copy blocks.0 6592",
                                                    "reduce-scatter root 2688", "copy root 1344"}));
  EXPECT_EQ(held(one, "optimizer states", Tier::Host), 2 * 4 * (672 + 3296) / 2);
  EXPECT_EQ(held(one, "optimizer states", Tier::Device), 0);
  EXPECT_EQ(held(one, "gradients", Tier::Host), 4 * (672 + 3296) / 2);
  EXPECT_EQ(held(one, "gradients", Tier::Device), 4 * (672 + 3296));
  // A CPU's own part is reduced to where it is read.
  const auto two = schedule_of(2, {.more = R"(, "offload_optimizer": {"device": "cpu"})"});
  EXPECT_EQ(events_of(two, Phase::Backward), (Lines{"reduce-scatter blocks.0 13184", "reduce-scatter root 2688"}));
  EXPECT_EQ(held(two, "gradients", Tier::Host), 4 * (672 + 3296) / 2);
  // A GPU's is copied, and new parameters come back.
  const auto gpu = schedule_of(
      2, {.transport = "nccl", .more = R"(, "offload_optimizer": {"device": "cpu"})", .recipe = "bf16", .gpu = true});
  const auto back = events_of(gpu, Phase::Backward), step = events_of(gpu, Phase::Step);
  EXPECT_EQ(std::count_if(back.begin(), back.end(), [](const auto& e) { return e.starts_with("copy "); }), 2);
  EXPECT_EQ(std::count_if(step.begin(), step.end(), [](const auto& e) { return e.starts_with("copy "); }), 2);
  EXPECT_EQ(std::count_if(step.begin(), step.end(), [](const auto& e) { return e.starts_with("all-gather "); }), 2);
}

// hidden 192: the block's shard is 222,720 elements, tiles of 8,192 (sub_group_size 0) are 28, the last of 1,536.
TEST(StageSchedule, StatesInFilesGoByTiles) {
  const auto s =
      schedule_of(3, {.more = R"(, "sub_group_size": 0, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
      "offload_param": {"device": "nvme", "nvme_path": "/x", "max_in_cpu": 0})",
                      .recipe = "bf16",
                      .model = tiny(1, 192)});
  const auto& block = s.units[1];
  const auto tiles = (block.shard_numel() + 8191) / 8192;
  std::int64_t early = 0, reads = 0, writes = 0, updates = 0, stored = 0;
  for (const auto& e : s.events) {
    if (e.unit != "blocks.0" || e.step != 2) continue;
    if (e.what == What::OptimizerStates && e.how == How::Read) (e.phase == Phase::Backward ? early : reads) += e.bytes;
    if (e.what == What::OptimizerStates && e.how == How::Write) writes += e.bytes;
    if (e.what == What::Parameters && e.how == How::Write) stored += e.bytes;
    updates += e.how == How::Update;
  }
  EXPECT_EQ(updates, tiles);
  EXPECT_GT(tiles, 20);
  EXPECT_EQ(early + reads, 12 * block.shard_numel());
  EXPECT_GT(early, 0) << "while backward runs, as many as there is room for";
  EXPECT_GT(reads, early);
  EXPECT_EQ(writes, 12 * block.shard_numel());
  EXPECT_EQ(stored, 2 * block.shard_numel());
  // Every use of a parameter reads its shard: twice a micro-batch, by whole blocks of the file.
  std::int64_t fetched = 0;
  for (const auto& e : s.events)
    if (e.unit == "blocks.0" && e.step == 2 && e.what == What::Parameters && e.how == How::Read) fetched += e.bytes;
  EXPECT_EQ(fetched, 2 * ((2 * block.shard_numel() + 4095) / 4096 * 4096));
  EXPECT_EQ(held(s, "parameters", Tier::Device) + held(s, "optimizer states", Tier::Device) +
                held(s, "master parameters", Tier::Device),
            0);
}

TEST(StageSchedule, ALateUpdateRunsDuringTheNextStep) {
  const auto s = schedule_of(
      2, {.more = R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true, "start_step": 1})"});
  EXPECT_EQ(events_of(s, Phase::Background, 0, 0), Lines{});
  EXPECT_EQ(events_of(s, Phase::Step, 0, 0),
            (Lines{"update root 4032", "all-gather root 2688", "update blocks.0 19776", "all-gather blocks.0 13184"}));
  EXPECT_EQ(events_of(s, Phase::Step, 0, 1), Lines{}) << "nothing to apply yet, and its own gradients wait";
  EXPECT_EQ(events_of(s, Phase::Background, 0, 1), (Lines{"update root 4032", "update blocks.0 19776"}));
  EXPECT_EQ(events_of(s, Phase::Step, 0, 2),
            (Lines{"copy root 1344", "all-gather root 2688", "copy blocks.0 6592", "all-gather blocks.0 13184"}));
  EXPECT_EQ(held(s, "parameters to come", Tier::Host), 4 * (672 + 3296) / 2);
}

TEST(StageSchedule, ASkippedStepUpdatesNothing) {
  const auto s = schedule_of(1, {.overflowed = {false, true, false}});
  EXPECT_EQ(events_of(s, Phase::Step, 0, 1), Lines{});
  EXPECT_EQ(events_of(s, Phase::Step, 0, 2).size(), 4u);
}

TEST(StageSchedule, PoliciesOfStage3) {
  const Wish plain{.model = tiny(3, 48)};
  const auto all = schedule_of(3, plain);
  // Kept from forward to backward: once, when the order is known.
  Wish kept = plain;
  kept.more = R"(, "stage3_max_reuse_distance": 1000000000)";
  const auto once = schedule_of(3, kept);
  EXPECT_EQ(sent_in(once, 0), sent_in(all, 0)) << "nothing is known in the first step";
  EXPECT_EQ(sent_in(once, 2), sent_in(all, 2) * 2 / 3);
  EXPECT_EQ(events_of(once, Phase::Forward).size(), 4u);
  // Small parameters as at stage 2.
  Wish small = plain;
  small.more = R"(, "stage3_param_persistence_threshold": 200)";
  const auto persistent = schedule_of(3, small);
  EXPECT_GT(persistent.persistent_numel, 0);
  EXPECT_EQ(sent_in(persistent, 2), (3 * persistent.padded_numel - persistent.persistent_numel) * 4 / 2);
  // A reduction of at most so many elements.
  Wish cut = plain;
  cut.more = R"(, "reduce_bucket_size": 5000)";
  EXPECT_GT(schedule_of(3, cut).units.size(), all.units.size());
  const auto pieces = schedule_of(3, cut);
  const auto parameters = parameters_of(cut.model);
  std::int64_t unread = 0;  // by backward: units of nothing but biases of linear layers
  for (const auto& unit : pieces.units)
    if (std::all_of(unit.parameters.begin(), unit.parameters.end(), [&](auto i) {
          return parameters[i].name.ends_with("bias") && parameters[i].name.find("norm") == std::string::npos;
        }))
      unread += unit.padded_numel();
  EXPECT_GT(unread, 0);
  EXPECT_EQ(sent_in(pieces, 2), (3 * pieces.padded_numel - unread) * 4 / 2);
  // Fetched ahead or on demand, the same bytes in the same order.
  Wish demand = plain;
  demand.more = R"(, "stage3_prefetch_bucket_size": 0)";
  EXPECT_EQ(events_of(schedule_of(3, demand), Phase::Forward), events_of(all, Phase::Forward));
  // Recomputation is within the backward's gather.
  Wish checkpointed = plain;
  checkpointed.segments = 3;
  EXPECT_EQ(sent_in(schedule_of(3, checkpointed), 2), sent_in(all, 2));
  // Three blocks are run again, then passed backward: the last is still there, and the one before it, which comes next.
  checkpointed.segments = 1;
  EXPECT_EQ(sent_in(schedule_of(3, checkpointed), 2), sent_in(all, 2) + all.units[1].padded_numel() * 4 / 2);
}

TEST(StageSchedule, FewerBytesOverNetworks) {
  const Wish plain{.recipe = "bf16", .model = tiny(2, 64)};
  const auto all = schedule_of(3, plain);
  Wish integers = plain;
  integers.more = R"(, "zero_quantized_weights": true, "zero_quantized_gradients": true)";
  const auto quantized = schedule_of(3, integers);
  EXPECT_LT(sent_in(quantized, 2), sent_in(all, 2) / 2);
  EXPECT_EQ(sent_by_operation(quantized.events).count("reduce_scatter"), 0u);
  integers.transport = "shm";  // where nothing is sent over a network they have no effect
  Wish shared = plain;
  shared.transport = "shm";
  EXPECT_EQ(sent_in(schedule_of(3, integers), 2), sent_in(schedule_of(3, shared), 2));
  // Secondary shards: the second all-gather after an update is among the ranks of a node.
  Wish second{.world = 4, .more = R"(, "zero_hpz_partition_size": 2)", .recipe = "bf16", .model = tiny(2, 64)};
  const auto near = schedule_of(3, second);
  std::int64_t apart = 0, together = 0;
  for (const auto& e : near.events)
    if (e.step == 2 && e.how == How::AllGather) (e.neighbours ? together : apart) += e.bytes;
  EXPECT_EQ(apart, near.padded_numel * 2);
  EXPECT_EQ(together, near.padded_numel * 2);
}

TEST(StageSchedule, OneRankSendsNothing) {
  for (const int stage : {0, 1, 2, 3}) EXPECT_EQ(sent_in(schedule_of(stage, {.world = 1}), 2), 0) << stage;
}

TEST(StageSchedule, ADifferentRunIsNoticed) {
  const auto s = schedule_of(3, {.accumulation = 2});
  const auto faithful = [&] {
    cli::LiveRun run;
    run.transport = "gloo";
    run.overflowed = {false, false, false};
    run.ranks.resize(2);
    std::map<cli::LiveRecord::Moment, std::vector<Event>> by_moment;
    for (const auto& e : s.events) by_moment[{e.step, e.micro, e.phase}].push_back(e);
    for (auto& rank : run.ranks) {
      for (const auto& e : s.events)
        if (e.phase != Phase::Build) rank.events.push_back(e);
      for (const auto& [moment, events] : by_moment) rank.sent[moment] = sent_by_operation(events);
      for (const auto& h : s.holdings)
        if (!h.passing) rank.resting[{h.tier, h.purpose}] += h.bytes;
    }
    return run;
  };
  EXPECT_EQ(cli::first_difference(s, faithful()), "");
  EXPECT_EQ(cli::first_difference(s, cli::LiveRun::from(faithful().json())), "");
  auto run = faithful();
  auto& events = run.ranks[1].events;
  std::swap(events[0], events[1]);
  EXPECT_NE(cli::first_difference(s, run), "");
  run = faithful();
  run.ranks[1].events[5].bytes += 1;
  const auto text = cli::first_difference(s, run);
  EXPECT_NE(text.find("rank 1/2"), std::string::npos) << text;
  run = faithful();
  run.ranks[0].events.pop_back();
  EXPECT_NE(cli::first_difference(s, run).find("the rank did nothing"), std::string::npos);
  run = faithful();
  run.ranks[0].sent.begin()->second["all_gather"].bytes += 4;
  EXPECT_NE(cli::first_difference(s, run).find("all_gather"), std::string::npos);
  run = faithful();
  run.ranks[0].sent.begin()->second["broadcast"].calls = 1;
  EXPECT_NE(cli::first_difference(s, run).find("broadcast"), std::string::npos);
  run = faithful();
  run.ranks[1].resting.begin()->second -= 1;
  EXPECT_NE(cli::first_difference(s, run).find("between steps"), std::string::npos);
  run = faithful();
  run.ranks.pop_back();
  EXPECT_NE(cli::first_difference(s, run), "");
}

// Ranks 2 dp x 1 sp x 2 tp: each tensor-parallel rank has its own schedule. The last one also tells what was sent of
// activations; others may have smaller parts.
TEST(StageSchedule, ADifferentRankOfAMeshIsNoticed) {
  cli::LiveExpectation expected{.of_tensor_rank = {schedule_of(1, {}), schedule_of(3, {})},
                                .sequence = 1,
                                .activations = {{Phase::Forward, {{"tp", {4, 1000}}}}}};
  cli::LiveRun run;
  run.overflowed = {false, false, false};
  run.ranks.resize(4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto& s = expected.of_tensor_rank[rank % 2];
    auto& record = run.ranks[rank];
    std::map<cli::LiveRecord::Moment, std::vector<Event>> by_moment;
    for (const auto& e : s.events) by_moment[{e.step, e.micro, e.phase}].push_back(e);
    for (const auto& e : s.events)
      if (e.phase != Phase::Build) record.events.push_back(e);
    for (const auto& [moment, events] : by_moment) record.sent[moment] = sent_by_operation(events);
    for (int step = 0; step < 3; ++step)
      record.sent[{step, 0, Phase::Forward}]["tp"] = {4, rank % 2 == 0 ? 900u : 1000u};
    for (const auto& h : s.holdings)
      if (!h.passing) record.resting[{h.tier, h.purpose}] += h.bytes;
  }
  EXPECT_EQ(cli::first_difference(expected, run), "");
  auto other = run;
  other.ranks[3].sent[{1, 0, Phase::Forward}]["tp"].bytes += 4;
  const auto text = cli::first_difference(expected, other);
  EXPECT_NE(text.find("rank 3/4, step 2, micro-batch 1, forward, tp: the schedule has 4 calls that send 1000"),
            std::string::npos)
      << text;
  other = run;
  std::swap(other.ranks[0], other.ranks[1]);
  EXPECT_NE(cli::first_difference(expected, other).find("rank 0/4"), std::string::npos);
  other = run;
  other.ranks[1].sent[{0, 0, Phase::Step}]["sp"].calls = 1;
  EXPECT_NE(cli::first_difference(expected, other).find("sp: the schedule has 0 calls"), std::string::npos);
}

}  // namespace
}  // namespace zero::planning::stage_schedule_test
