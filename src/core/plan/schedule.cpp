// Names of the step program's operations, and the states that persist between steps. See schedule.h.
#include "plan/schedule.h"

#include <tuple>

#include <zero/errors.h>

#include "plan/dry_run.h"

namespace zero::planning {
namespace {

using step::OpKind;
using step::OpReason;
using step::Role;

const char* purpose_of(const step::Op& op) {
  switch (op.reason) {
    case OpReason::BeforeUse:
      return "before use";
    case OpReason::NewValues:
      return "new values";
    case OpReason::InitialValues:
      return "initial values";
    case OpReason::Sum:
      return op.kind == OpKind::AllGatherGrads ? "sum to all ranks" : "sum over ranks";
    case OpReason::Arrives:
      return "arrives";
    case OpReason::Leaves:
      return "leaves";
    case OpReason::Update:
      break;
  }
  return "update";
}

std::pair<What, How> kind_of(const step::Op& op) {
  switch (op.kind) {
    case OpKind::Unshard:
    case OpKind::AllGatherParams:
      return {What::Parameters, How::AllGather};
    case OpKind::UnshardSymmetric:
      return {What::Parameters, How::InPlace};
    case OpKind::Broadcast:
      return {What::Parameters, How::Broadcast};
    case OpKind::Reduce:
      return {What::Gradients, op.to_all ? How::AllReduce : How::ReduceScatter};
    case OpKind::AllGatherGrads:
      return {What::Gradients, How::AllGather};
    case OpKind::SendToOwners:
      return {What::Gradients, How::ToOwners};
    case OpKind::SendFromOwners:
      return {What::Parameters, How::FromOwners};
    case OpKind::Fetch:
      return {What::Parameters, How::Read};
    case OpKind::FetchStates:
      return {What::OptimizerStates, How::Read};
    case OpKind::Store:
      return {What::Parameters, How::Write};
    case OpKind::StoreStates:
      return {What::OptimizerStates, How::Write};
    case OpKind::Copy:
      return {op.reason == OpReason::Leaves ? What::Gradients : What::Parameters, How::Copy};
    case OpKind::Update:
      break;
  }
  return {What::OptimizerStates, How::Update};
}

Event event_of(const step::Event& event, const std::vector<step::GroupFacts>& groups) {
  const auto& op = event.op;
  const auto [what, how] = kind_of(op);
  return {.step = event.step,
          .micro = event.micro,
          .phase = event.phase,
          .what = what,
          .how = how,
          .purpose = purpose_of(op),
          .unit = groups[static_cast<std::size_t>(op.group)].name,
          .from = op.from,
          .to = op.to,
          .bytes = op.bytes,
          .sent = op.sent,
          .neighbours = op.node,
          .quantized = op.quantized};
}

const char* state_of(Role role) {
  constexpr const char* kNames[] = {"parameters",
                                    "second shards",
                                    "parameters to come",
                                    "gradients",
                                    "gradients handed over",
                                    "a copy of gradients",
                                    "master parameters",
                                    "optimizer states",
                                    "tiles of states",
                                    "tiles of parameters",
                                    "transfers"};
  return kNames[static_cast<int>(role)];
}

// The persistent buffers by role, and autograd's gradients, which are transient.
std::vector<Holding> holdings_of(const step::RunFacts& run, const std::vector<step::GroupFacts>& groups,
                                 const step::Memory& memory) {
  std::map<std::tuple<Role, int, int, bool, bool, Tier>, Holding> all;
  const auto add = [&](const step::GroupFacts& group, const step::Memory::Resting& r, bool sharded, bool passing) {
    auto& holding = all[{r.role, group.axis, step::width(r.dtype), sharded, passing, r.tier}];
    holding.state = state_of(r.role);
    holding.purpose = r.purpose;
    holding.width = step::width(r.dtype);
    holding.ranks = run.axis_of(group).size;
    holding.experts = group.axis > 0;
    holding.sharded = sharded;
    holding.passing = passing;
    holding.tier = r.tier;
    if (holding.units.empty() || holding.units.back() != group.name) holding.units.push_back(group.name);
    holding.bytes += r.bytes;
  };
  for (const auto& resting : memory.resting()) {
    if (resting.role >= Role::StatesTile) continue;  // transient
    const auto& group = groups[static_cast<std::size_t>(resting.group)];
    const bool states = resting.role == Role::Master || resting.role == Role::OptimizerState;
    const bool part = states ? group.sharding.optimizer : resting.numel < group.padded();
    add(group, resting, part && run.axis_of(group).size > 1, /*passing=*/false);
  }
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    const auto& group = groups[static_cast<std::size_t>(g)];
    if (!group.trainable || group.grads != step::GradStorageKind::Autograd) continue;
    const auto numel = group.layout.numel(), bytes = numel * step::width(group.precision.grad);
    if (bytes > 0)
      add(group, {Tier::Device, step::Purpose::Gradients, Role::Grads, g, numel, group.precision.grad, bytes},
          /*sharded=*/false, /*passing=*/true);
  }
  std::vector<Holding> result;
  for (auto& [key, holding] : all) result.push_back(std::move(holding));
  return result;
}

}  // namespace

const char* name(Phase phase) {
  constexpr const char* kNames[] = {"build", "forward", "backward", "step", "background"};
  return kNames[static_cast<int>(phase)];
}

const char* name(What what) {
  constexpr const char* kNames[] = {"parameters", "gradients", "optimizer states"};
  return kNames[static_cast<int>(what)];
}

const char* name(How how) {
  constexpr const char* kNames[] = {"all-gather",      "reduce-scatter", "all-reduce", "broadcast",
                                    "mapped in place", "file read",      "file write", "copy",
                                    "to owners",       "from owners",    "update"};
  return kNames[static_cast<int>(how)];
}

Schedule schedule(const ScheduleInput& input, const config::Settings& settings, std::int64_t accumulation,
                  std::int64_t first_step, int num_steps, const std::vector<bool>& overflowed) {
  const auto run = step::run_facts(settings, input.topology, accumulation);
  Schedule result;
  result.stage = settings.zero.stage;
  result.world = input.topology.world;
  result.accumulation = accumulation;
  result.parameter_width = step::width(run.precision.param);
  result.units = cut_into_units(input.parameters, settings, result.world, result.parameter_width, input.topology.gpu);
  for (const auto& unit : result.units) {
    result.padded_numel += unit.padded_numel();
    if (unit.trainable) result.padded_trainable_numel += unit.padded_numel();
    if (unit.persistent) result.persistent_numel += unit.padded_numel();
  }
  const step::PlacementTask task{run, settings, result.units, input.freedom};
  const auto placed = step::place(task);
  if (!placed.fits) throw ConfigError("[plan] " + step::refusal(task, placed, ""), ExitCode::kOutOfMemory);
  const auto groups = step::group_facts(run, settings, result.units, placed.placements);
  for (const auto& group : groups) result.precision.push_back(group.precision);

  step::EventList events;
  DryRun dry(run, result.units, groups, events);
  dry.backend().in_background = [&](bool begins) { events.phase = begins ? Phase::Background : Phase::Step; };
  dry.program().set_steps(first_step);
  dry.initialise();
  for (int k = 0; k < num_steps; ++k) {
    events.step = k;
    for (std::int64_t micro = 0; micro < accumulation; ++micro) {
      events.micro = static_cast<int>(micro);
      events.phase = Phase::Forward;
      run_forward(input.pass, dry);
      events.phase = Phase::Backward;
      run_backward(input.pass, result.units, result.parameter_width, dry);
    }
    events.micro = 0;
    events.phase = Phase::Step;
    const auto i = static_cast<std::size_t>(k);
    dry.step(i < overflowed.size() && overflowed[i]);
  }
  for (const auto& event : events.events) result.events.push_back(event_of(event, groups));
  result.holdings = holdings_of(run, groups, dry.memory());
  return result;
}

std::map<std::string, Sent> sent_by_operation(const std::vector<Event>& events) {
  std::map<std::string, Sent> all;
  const auto count = [&](const char* operation, std::int64_t bytes) {
    auto& row = all[operation];
    ++row.calls;
    row.bytes += static_cast<std::uint64_t>(bytes);
  };
  for (const auto& event : events) {
    if (event.neighbours) continue;
    switch (event.how) {
      case How::AllGather:
      case How::InPlace:
        count("all_gather", event.sent);
        break;
      case How::ReduceScatter:
        count(event.quantized ? "reduce_scatter_quantized" : "reduce_scatter", event.sent);
        break;
      case How::AllReduce:  // counted as a reduce-scatter and an all-gather
        count("reduce_scatter", event.sent / 2);
        count("all_gather", event.sent / 2);
        break;
      case How::Broadcast:
        count("broadcast", event.sent);
        break;
      case How::ToOwners:
      case How::FromOwners:
        count("all_to_all", event.sent);
        break;
      case How::Read:
      case How::Write:
      case How::Copy:
      case How::Update:
        break;
    }
  }
  return all;
}

}  // namespace zero::planning
