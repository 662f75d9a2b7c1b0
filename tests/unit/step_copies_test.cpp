// The step program beside the copies of the step in the planner: for 8,960 configurations every purpose on every tier,
// now and at the peak, what moves, and every event are equal.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <tuple>

#include "plan/dry_run.h"
#include "plan/model.h"
#include "plan/model_pass.h"
#include "plan/pass.h"
#include "plan/rank_memory.h"
#include "plan/schedule_run.h"
#include "plan/topology.h"
#include "step/event_list.h"
#include "step/placement.h"

namespace zero::planning {
namespace {

using config::OffloadDevice;
using config::Precision;
using step::Completion;
using step::OpKind;

struct Case {
  std::string name;
  config::Settings settings;
  Surroundings around;
  std::int64_t accumulation = 1, segments = 0, samples = 1;
  PlanModel model;
  Tier inputs = Tier::Device;
};

std::vector<Case> cases() {
  constexpr OffloadDevice kDevices[] = {OffloadDevice::None, OffloadDevice::Cpu, OffloadDevice::Nvme};
  std::vector<Case> result;
  int k = 0;
  const auto add = [&](int stage, Precision precision, int world, const std::string& transport,
                       std::int64_t accumulation, OffloadDevice optimizer, OffloadDevice params, int variant) {
    if ((stage == 0 && optimizer != OffloadDevice::None) || (stage < 3 && params != OffloadDevice::None)) return;
    if (world == 1 && transport != "thread" && transport != "nccl") return;
    Case c;
    auto& s = c.settings;
    auto& zero = s.zero;
    zero.stage = stage;
    s.precision = precision;
    s.optimizer.type = config::OptimizerType::AdamW;
    zero.offload_optimizer.device = optimizer;
    zero.offload_param.device = params;
    zero.offload_param.max_in_cpu = variant % 2 ? 0 : 30000;
    s.accumulation_steps = accumulation;
    if (variant == 1) zero.sub_group_size = 20000, zero.overlap_comm = true;
    if (variant == 2) zero.max_reuse_distance = 1000000000;
    if (variant == 3) zero.prefetch_bucket_size = 0, zero.overlap_comm = false;
    if (variant == 4) zero.delayed_update = true, zero.delayed_start_step = 1;
    if (variant == 5) zero.quantized_weights = zero.quantized_gradients = true;
    if (variant == 6) zero.hpz_ranks = world > 2 && world % 2 == 0 ? 2 : 1, s.communication_dtype = Precision::Bf16;
    if (variant == 7)
      zero.persistence_threshold = 1000, zero.model_persistence_threshold = 1000000, zero.reduce_bucket_size = 50000;
    if (variant == 8) s.optimizer.type = config::OptimizerType::Sgd, s.communication_dtype = Precision::Fp32;
    if (variant == 9) zero.offload_optimizer.ratio = 0.3, s.grad_accum_dtype = Precision::Bf16;
    c.model = {.kind = PlanModel::Kind::Gpt, .name = "", .layers = 2 + k % 3, .hidden = 96 + 32 * (k % 2), .heads = 4};
    c.model.sequence = 64;
    c.model.vocabulary = 512;
    c.model.tied = k % 5 != 0;
    c.segments = k % 3 == 1 ? 2 : 0;
    c.samples = 1 + k % 2 * 3;
    c.inputs = k % 7 == 1 ? Tier::Host : k % 7 == 4 ? Tier::File : Tier::Device;
    c.accumulation = accumulation;
    c.around = {.world = world, .transport = world == 1 ? "local" : transport, .gpu = transport == "nccl"};
    c.name = "stage " + std::to_string(stage) + (precision == Precision::Bf16 ? " bf16" : " fp32") + " world " +
             std::to_string(world) + " " + transport + " k " + std::to_string(accumulation) + " optimizer " +
             std::to_string(static_cast<int>(optimizer)) + " params " + std::to_string(static_cast<int>(params)) +
             " variant " + std::to_string(variant);
    result.push_back(std::move(c));
    ++k;
  };
  for (int stage = 0; stage <= 3; ++stage)
    for (const auto precision : {Precision::Fp32, Precision::Bf16})
      for (const int world : {1, 2, 3, 4})
        for (const char* transport : {"thread", "shm", "gloo", "nccl"})
          for (const std::int64_t accumulation : {1, 2})
            for (const auto optimizer : kDevices)
              for (const auto params : kDevices)
                for (int variant = 0; variant < 10; ++variant)
                  add(stage, precision, world, transport, accumulation, optimizer, params, variant);
  EXPECT_EQ(k, 8960);
  return result;
}

// What both walks need.
struct Facts {
  explicit Facts(const Case& c)
      : rules(rank_rules(c.settings, c.around, c.accumulation)),
        parameters(parameters_of(c.model)),
        units(cut_into_units(parameters, c.settings, c.around.world, rules.parameter_width, c.around.gpu)),
        run(step::run_facts(c.settings, topology_of(c.around.world, c.around.transport, c.around.gpu), c.accumulation)),
        groups(step::group_facts(run, c.settings, units, step::place({run, c.settings, units, {}}).placements)) {}
  const RankRules rules;
  const std::vector<Parameter> parameters;
  const std::vector<Unit> units;
  step::RunFacts run;
  const std::vector<step::GroupFacts> groups;
};

TEST(StepCopies, BytesAreEqual) {
  for (const auto& c : cases()) {
    Facts setup(c);
    const MicroBatch batch{
        .samples = c.samples, .segments = c.segments, .inputs = c.inputs, .element = setup.rules.parameter_width};
    RankMemory old(setup.rules, setup.units);
    Moved moved;
    for (int k = 0; k < 3; ++k) {
      old.take_moved();
      for (int m = 0; m < c.accumulation; ++m) run_micro_batch(c.model, setup.parameters, batch, old);
      old.step();
      moved = old.take_moved();
    }
    const auto want = old.report();
    for (const bool whole : {true, false}) {
      setup.run.whole_segments = whole;
      step::ByteCounter counter(setup.run);
      DryRun run(setup.run, setup.units, setup.groups, counter);
      step::Traffic traffic;
      for (int k = 0; k < 3; ++k) {
        counter.take(), run.take_activation_traffic();
        for (int m = 0; m < c.accumulation; ++m) run_micro_batch(c.model, setup.parameters, batch, run);
        run.step();
        traffic = counter.take();
        traffic.add(run.take_activation_traffic());
      }
      const auto have = run.report();
      for (const auto tier : step::kTiers) {
        const std::string where = c.name + (whole ? ", " : " in tiles, ") + MemoryReport::name(tier) + " ";
        EXPECT_EQ(have.peak(tier), want.peak(tier)) << where;
        for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
          const auto purpose = static_cast<MemoryReport::Purpose>(p);
          EXPECT_EQ(have.current(tier, purpose), want.current(tier, purpose)) << where << MemoryReport::name(purpose);
          EXPECT_EQ(have.peak(tier, purpose), want.peak(tier, purpose))
              << where << MemoryReport::name(purpose) << " at the peak";
        }
      }
      const auto values = [](const auto& t, std::int64_t offloaded) {
        return std::array{t.gathered, t.reduced, t.to_host, t.from_host, t.read, t.written, t.updated, offloaded};
      };
      EXPECT_EQ(values(traffic, traffic.updated_offloaded), values(moved, moved.updated_on_host)) << c.name;
      if (c.around.world > 1) {
        EXPECT_EQ(traffic.collectives, moved.collectives) << c.name;
      }
    }
  }
}

// Events of one kind keep their order; which of two kinds comes first is not the schedule's.
using Moment = std::tuple<int, int, int, int>;  // step, micro-batch, phase, kind
using Line = std::tuple<std::string, std::int64_t, std::int64_t, bool, bool>;
using Lines = std::map<Moment, std::vector<Line>>;

int kind_of(const Event& event) {
  const bool states = event.what == What::OptimizerStates;
  switch (event.how) {
    case How::Read:
      return states ? 4 : 3;
    case How::Write:
      return states ? 6 : 5;
    case How::Copy:
      return 7;
    case How::Update:
      return 2;
    default:
      return event.what == What::Gradients ? 1 : 0;
  }
}

int kind_of(const step::Op& op) {
  switch (op.kind) {
    case OpKind::Unshard:
    case OpKind::UnshardSymmetric:
    case OpKind::AllGatherParams:
    case OpKind::Broadcast:
      return 0;
    case OpKind::Reduce:
    case OpKind::AllGatherGrads:
      return 1;
    case OpKind::Update:
      return 2;
    case OpKind::Fetch:
      return 3;
    case OpKind::FetchStates:
      return 4;
    case OpKind::Store:
      return 5;
    case OpKind::StoreStates:
      return 6;
    case OpKind::Copy:
      return 7;
  }
  return -1;
}

TEST(StepCopies, EventsAreEqual) {
  const std::vector<bool> overflows{false, false, false, true, false};
  for (auto c : cases()) {
    for (const bool by_count : {true, false}) {
      c.settings.managed_gradient_accumulation = by_count;
      Facts setup(c);
      const auto pass = gpt_pass(setup.parameters, c.segments);
      planning::Run old(setup.rules, setup.units, pass);
      step::EventList events;
      DryRun run(setup.run, setup.units, setup.groups, events);
      run.backend().beside = [&](bool begins) { events.phase = begins ? step::Phase::Beside : step::Phase::Step; };
      old.build();
      run.initialise();
      for (int k = 0; k < 5; ++k) {
        old.step(k, overflows[static_cast<std::size_t>(k)]);
        events.step = k;
        for (std::int64_t m = 0; m < c.accumulation; ++m) {
          events.micro = static_cast<int>(m);
          events.phase = step::Phase::Forward;
          run_forward(pass, run);
          events.phase = step::Phase::Backward;
          run_backward(pass, setup.units, setup.rules.parameter_width, run);
        }
        events.micro = 0;
        events.phase = step::Phase::Step;
        run.step(overflows[static_cast<std::size_t>(k)]);
      }
      Lines want, have;
      for (const auto& e : old.take_events())
        want[{e.step, e.micro, static_cast<int>(e.phase), kind_of(e)}].emplace_back(e.unit, e.bytes, e.sent,
                                                                                    e.neighbours, e.quantized);
      for (const auto& e : events.events)
        have[{e.step, e.micro, static_cast<int>(e.phase), kind_of(e.op)}].emplace_back(
            setup.groups[static_cast<std::size_t>(e.op.group)].name, e.op.bytes, e.op.sent, e.op.node, e.op.quantized);
      EXPECT_TRUE(want == have) << c.name << (by_count ? "" : ", boundary by step()");
    }
  }
}

}  // namespace
}  // namespace zero::planning
