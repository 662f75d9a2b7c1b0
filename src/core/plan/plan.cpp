// Computes bytes, traffic and time of a configuration on a machine (zero/plan.h). Memory and traffic come from dry runs
// of the step program (dry_run.h), times from step_time.h. This file chooses the candidates, compares them and sorts
// them.
#include <zero/plan.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <optional>
#include <tuple>

#include <zero/errors.h>

#include "base/check.h"
#include "config/batch.h"
#include "config/document.h"
#include "plan/dry_run.h"
#include "plan/model.h"
#include "plan/model_pass.h"
#include "plan/step_time.h"
#include "plan/topology.h"
#include "step/placement.h"
#include "step/tiers.h"
#include "step/whole_update.h"

namespace zero {
namespace {

using namespace planning;
using config::OffloadDevice;

// One configuration to plan.
struct Candidate {
  PlanModel model;
  config::Settings settings;
  step::PlacementFreedom freedom;
  std::int64_t micro = 1, accumulation = 1, segments = 0;
  std::vector<std::string> notices = {};

  int tensor() const { return settings.mesh.tensor; }
};

// The order of use is learned in the first step; buffers have their final sizes after the second.
constexpr int kSteps = 3, kSearchSteps = 2;

struct Outcome {
  MemoryReport memory;
  step::Traffic traffic;  // in one step
  double once = 0;        // bytes that a rank sends to all-gather every unit
  // The highest ratio of a tier's need to its budget; at most 1 if an Engine would start and complete its steps.
  double most_of_budgets = 0;
  std::string refusal;  // the Engine's error text if the budgets cannot be met
};

// A model and its units, shared by candidates that differ only in their batch.
struct Cut {
  std::vector<Parameter> parameters;
  std::vector<Unit> units;
  Share share;  // of the model, on the planned rank
};

// Bytes per element of activations, and of parameters that do not stay fp32.
int element_of(const Candidate& c) { return step::width(step::dtype_of(c.settings.precision)); }

// The ranks that ZeRO shards over.
int ranks_of(const PlanMachine& machine, const config::Settings& settings) {
  return machine.world() / settings.mesh.tensor;
}

Cut cut(const Candidate& c, const PlanMachine& machine) {
  auto parameters = parts_of(c.model, c.settings);
  auto units = cut_into_units(parameters, c.settings, ranks_of(machine, c.settings), element_of(c), machine.gpu);
  const auto share = share_of(c.model, c.settings, parameters);
  return {std::move(parameters), std::move(units), share};
}

step::RunTopology topology_of(const PlanMachine& machine, const config::Settings& settings, int ep_size) {
  std::string transport = "local";
  const int ranks = ranks_of(machine, settings);
  if (ranks > 1)
    transport = machine.gpu                    ? "nccl"
                : settings.transport != "auto" ? settings.transport
                : machine.hosts > 1            ? "shm+gloo"
                : machine.shared_memory        ? "shm"
                                               : "thread";
  auto topology = planning::topology_of(ranks, transport, machine.gpu, /*deferred_init=*/true, ep_size);
  topology.tensor_rank = settings.mesh.tensor - 1;
  return topology;
}

// Compares the dry run's peaks, and the result of the placement, with the budgets. says_why: also sets the error text,
// which requires a search for the smallest budgets.
void judge(const step::PlacementTask& task, const step::PlacementPlan& placed, bool says_why, Outcome& outcome) {
  const auto budgets = step::Budgets::of(task.settings.memory);
  if (!placed.fits && says_why) outcome.refusal = step::refusal(task, placed, "");
  for (const auto tier : step::kTiers) {
    const auto& budget = budgets.of(tier);
    if (!budget) continue;
    const auto peak = static_cast<std::int64_t>(outcome.memory.peak(tier));
    const auto need = placed.fits ? peak : std::max(peak, step::needed(*placed.need, tier, budgets));
    outcome.most_of_budgets = std::max(
        outcome.most_of_budgets, static_cast<double>(need) / static_cast<double>(std::max<std::int64_t>(*budget, 1)));
    if (peak > *budget && outcome.refusal.empty())
      outcome.refusal =
          base::join("memory.", MemoryReport::name(tier), ": got ", *budget, " bytes, expected at least ", peak,
                     ", the peak of a step. Hint: ",
                     tier == Tier::Device ? "leave more room for activations with memory.activations, take a smaller "
                                            "micro-batch, or checkpoint activations."
                                          : "a larger budget.");
  }
}

// Adds what saves in the background, and kept snapshots, hold for their writers, at most. The Engine's updates wait
// rather than exceed a pool or a budget, so it decides no refusal.
void add_pools(const config::Settings& settings, const step::RunFacts& run, const std::vector<step::GroupFacts>& groups,
               MemoryReport& memory) {
  std::int64_t saved = 0, kept = 0;
  for (const auto& group : groups) {
    if (!group.trainable) continue;
    // A snapshot holds 8-bit states as fp32, as a checkpoint does.
    if (settings.checkpoint.decoupled) saved += group.saved_bytes(group.shard());
    if (run.keeps_snapshots) kept += group.saved_bytes(group.owned());
  }
  auto held = std::min(settings.checkpoint.memory, saved) + std::min(settings.checkpoint.memory, kept);
  if (held == 0) return;
  const auto peak = memory.peak(Tier::Host);
  const auto budgets = step::Budgets::of(settings.memory);
  if (const auto& budget = budgets.of(Tier::Host))
    held = std::clamp<std::int64_t>(*budget - static_cast<std::int64_t>(peak), 0, held);
  constexpr auto kOther = MemoryReport::Purpose::Other;
  const auto more = static_cast<std::uint64_t>(held);
  memory.set(Tier::Host, kOther, memory.current(Tier::Host, kOther), memory.peak(Tier::Host, kOther) + more);
  memory.set_peak(Tier::Host, peak + more);
}

// Of a rule that needs whole parameters, as the Engine's.
std::string whole_refusal(const Cut& cut, const step::RunFacts& run, const std::vector<step::GroupFacts>& groups) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto text = [&](const std::string& why, const std::string& hint) {
      return base::join(groups[g].name, " is updated whole: ", why, ". Hint: ", hint, ".");
    };
    if (const auto refusal = step::refuse_whole(run, groups[g])) return text(refusal->why, refusal->hint);
    const auto& members = cut.units[g].parameters;
    if (step::has_owners(groups[g]) &&
        std::any_of(members.begin(), members.end(), [&](std::size_t i) { return cut.parameters[i].parts > 1; }))
      return text("tensor parallelism cuts it", "tensor_parallel.autotp_size 1");
  }
  return "";
}

Outcome run(const Candidate& c, const Cut& cut, const PlanMachine& machine, int steps) {
  if (c.settings.memory.device && !c.settings.memory.activations) {
    // As `zero train` does: the states leave room for what the model saves for backward.
    auto other = c;
    other.settings.memory = {};
    const auto kept = run(other, cut, machine, 1).memory.peak(Tier::Device, MemoryReport::Purpose::Activations);
    other.settings.memory = c.settings.memory;
    other.settings.memory.activations = static_cast<std::int64_t>(kept);
    return run(other, cut, machine, steps);
  }
  // All micro-batches but the last behave the same, so two are enough.
  const auto micro_steps = std::min<std::int64_t>(c.accumulation, 2);
  auto facts = step::run_facts(c.settings, topology_of(machine, c.settings, c.model.experts.ep_size), micro_steps);
  facts.whole_segments = true;
  const step::PlacementTask task{facts, c.settings, cut.units, c.freedom};
  const auto placed = step::place(task);
  const auto groups = step::group_facts(facts, c.settings, cut.units, placed.placements);
  step::ByteCounter counter(facts);
  DryRun dry(facts, cut.units, groups, counter);
  const MicroBatch batch{.samples = c.micro,
                         .segments = c.segments,
                         .inputs = checkpoint_tier(c.settings.activations),
                         .element = element_of(c),
                         .share = cut.share,
                         .input_parts = c.settings.activations.partition ? c.tensor() : 1,
                         .fp32 = fp32_parameters(cut.units, cut.parameters.size())};
  const auto moved = [&] {
    auto traffic = counter.take();
    traffic.add(dry.take_activation_traffic());
    return traffic;
  };
  Outcome result;
  for (const auto& group : groups) {
    const double ranks = group.layout.world();
    result.once += static_cast<double>(group.padded() * step::width(group.precision.param)) * (ranks - 1) / ranks;
  }
  for (int step = 0; step < steps; ++step) {
    result.traffic = {};
    for (std::int64_t k = 0; k < micro_steps; ++k) {
      run_micro_batch(c.model, cut.parameters, batch, dry);
      result.traffic.add(moved(), k + 1 < micro_steps ? c.accumulation - 1 : 1);
    }
    dry.step();
    result.traffic.add(moved());
  }
  result.memory = dry.report();
  judge(task, placed, /*says_why=*/steps == kSteps, result);
  if (result.refusal.empty()) result.refusal = whole_refusal(cut, facts, groups);
  add_pools(c.settings, facts, groups, result.memory);
  return result;
}

std::uint64_t least_limit(std::uint64_t a, std::uint64_t b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

// The limit of one rank; 0: none.
std::uint64_t limit_of(const PlanMachine& machine, Tier tier) {
  const auto ranks = static_cast<std::uint64_t>(machine.ranks_per_host);
  switch (tier) {
    case Tier::Device:
      if (machine.device_bytes == 0) return machine.gpu ? 0 : machine.host_bytes / ranks;
      return machine.gpu
                 ? std::max<std::uint64_t>(machine.device_bytes, machine.reserved_bytes + 1) - machine.reserved_bytes
                 : least_limit(machine.device_bytes, machine.host_bytes / ranks);
    case Tier::Host:
      return machine.gpu ? machine.host_bytes / ranks : 0;
    case Tier::File:
      break;
  }
  return machine.file_bytes / ranks;
}

// The highest number of bytes that the tier needs. On CPUs device and host memory are the same.
std::uint64_t need_of(const MemoryReport& memory, const PlanMachine& machine, Tier tier) {
  if (tier == Tier::Device && !machine.gpu) return memory.peak(Tier::Device) + memory.peak(Tier::Host);
  return memory.peak(tier);
}

std::string misses(const MemoryReport& memory, const PlanMachine& machine) {
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File}) {
    const auto limit = limit_of(machine, tier);
    if (limit > 0 && need_of(memory, machine, tier) > limit) return MemoryReport::name(tier);
  }
  return "";
}

// The needs that decide whether a candidate fits.
struct Needs {
  std::array<double, MemoryReport::kTiers> bytes{};
  double most_of_budgets = 0;
};

Needs needs_of(const Outcome& outcome, const PlanMachine& machine) {
  Needs needs{.bytes = {}, .most_of_budgets = outcome.most_of_budgets};
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File})
    needs.bytes[MemoryReport::index(tier)] = static_cast<double>(need_of(outcome.memory, machine, tier));
  return needs;
}

bool has_budgets(const config::Settings& settings) {
  return settings.memory.device || settings.memory.host || settings.memory.file;
}

std::int64_t layer_numel_of(const PlanModel& model) {
  std::int64_t sum = 0;
  for (const auto& parameter : parameters_of(model))
    if (parameter.unit == "blocks.0") sum += parameter.numel;
  return sum;
}

// The same model with fewer layers.
Candidate shortened(const Candidate& c, std::int64_t layers) {
  auto other = c;
  if (c.model.kind == PlanModel::Kind::Count) other.model.count -= (c.model.layers - layers) * layer_numel_of(c.model);
  other.model.layers = layers;
  other.segments = c.segments == 0 ? 0 : layers;
  return other;
}

// Layers are equal, so the bytes of a deep model are extrapolated from two shallow ones. This does not apply if states
// are split over tiers, if segments have several layers, or if some layers keep other parameters in fp32.
Needs needs_in_search(const Candidate& c, const PlanMachine& machine) {
  constexpr std::int64_t kShort = 8, kLong = 16;
  const auto needs = [&](const Candidate& other) {
    return needs_of(run(other, cut(other, machine), machine, kSearchSteps), machine);
  };
  const auto& param = c.settings.zero.offload_param;
  const bool equal_layers = !has_budgets(c.settings) &&
                            (param.device != OffloadDevice::Nvme || c.settings.zero.stage < 3 ||
                             c.model.num_parameters() / machine.world() < param.max_in_cpu || param.max_in_cpu == 0);
  const bool layers_keep_the_same = c.settings.keep_fp32.empty() || keeps_the_same(parameters_of(c.model), c.settings);
  if (c.model.layers <= 2 * kLong || !equal_layers || !layers_keep_the_same ||
      (c.segments != 0 && c.segments != c.model.layers))
    return needs(c);
  const auto few = needs(shortened(c, kShort)), more = needs(shortened(c, kLong));
  Needs all;
  for (std::size_t t = 0; t < all.bytes.size(); ++t)
    all.bytes[t] =
        more.bytes[t] + (more.bytes[t] - few.bytes[t]) / (kLong - kShort) * static_cast<double>(c.model.layers - kLong);
  return all;
}

// The highest ratio of a tier's need to its limit; above 1 the candidate does not fit.
double pressure(const Needs& needs, const PlanMachine& machine) {
  double most = needs.most_of_budgets;
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File})
    if (const auto limit = limit_of(machine, tier); limit > 0)
      most = std::max(most, needs.bytes[MemoryReport::index(tier)] / static_cast<double>(limit));
  return most;
}

// The largest integer from 1 to `most` whose pressure is at most 1, or a smaller one by at most the fraction `slack`;
// 0: none. Pressure is assumed to grow almost linearly.
std::int64_t largest(std::int64_t most, double slack, const std::function<double(std::int64_t)>& pressure_of) {
  std::int64_t good = 1, bad = 0;  // bad 0: not known
  double low = pressure_of(1), high = 0;
  if (low > 1) return 0;
  bool halve = false;
  while (good < most && (bad == 0 || bad - good > std::max<std::int64_t>(1, static_cast<std::int64_t>(
                                                                                slack * static_cast<double>(good))))) {
    const double span = static_cast<double>(bad - good);
    std::int64_t next = 0;
    if (bad == 0)
      next = good + std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(good) *
                                                                        std::min(1.02 / std::max(low, 1e-9), 64.0)) -
                                                  good);
    else if (halve)
      next = good + (bad - good) / 2;
    else
      next = good + static_cast<std::int64_t>(std::ceil(span * (1 - low) / (high - low)));
    next = std::clamp<std::int64_t>(next, good + 1, bad == 0 ? most : bad - 1);
    const double p = pressure_of(next);
    const auto before = bad - good;
    if (p <= 1)
      good = next, low = p;
    else
      bad = next, high = p;
    halve = !halve && before > 0 && bad - good > before / 2;
  }
  return good;
}

// The part of a rank's sent bytes that leaves its host. On CPUs (docs/memory.md): a shard is sent to every other host
// once. Each rank sends its part of a sum to the owner; integers are sent after the ranks of a host have summed. GPUs
// use rings, and the ranks of a host share the link to the next host.
// Ranks that share a model are neighbours, so their hosts are fewer than those of the whole run.
std::uint64_t across_hosts(const Candidate& c, const PlanMachine& machine, const PlanTraffic& traffic) {
  if (machine.hosts == 1) return 0;
  const int tensor = c.tensor(), model_ranks = tensor * c.settings.mesh.sequence;
  std::uint64_t activations = 0;
  if (machine.ranks_per_host % tensor != 0) activations += traffic.tensor_parallel;
  if (machine.ranks_per_host % model_ranks != 0) activations += traffic.sequence_parallel;
  // Experts of a layer are on neighbours, or on ranks as far apart as possible.
  if (c.settings.mesh.data_before_experts || machine.ranks_per_host % c.model.experts.ep_size != 0)
    activations += traffic.expert_parallel;
  const auto of_states = traffic.gathered + traffic.reduced;
  const int per_host = std::max(machine.ranks_per_host / tensor, 1);
  if (machine.gpu) return activations + of_states / static_cast<std::uint64_t>(per_host);
  const double world = ranks_of(machine, c.settings), hosts = std::min<double>(machine.hosts, world);
  if (world == 1) return activations;
  const double sent_of_whole = (world - 1) / world, once = (hosts - 1) / world, by_each = (hosts - 1) / hosts;
  const double gathered = static_cast<double>(traffic.gathered) / sent_of_whole,
               reduced = static_cast<double>(traffic.reduced) / sent_of_whole;
  double part = by_each;
  if (c.settings.zero.stage == 0) part = (by_each + once) / 2;  // reduce-scatter and all-gather
  if (c.settings.zero.stage == 3 && c.settings.zero.quantized_gradients) part = once;
  return activations + static_cast<std::uint64_t>(gathered * once + reduced * part);
}

Plan evaluate(const Candidate& c, const Cut& units, const PlanMachine& machine) {
  Plan plan;
  const auto& zero = c.settings.zero;
  plan.stage = zero.stage;
  plan.tensor = c.tensor(), plan.sequence = c.settings.mesh.sequence;
  plan.data = ranks_of(machine, c.settings) / plan.sequence;
  plan.expert = c.model.experts.ep_size;
  const auto offload = zero.stage == 0 ? OffloadDevice::None
                       : zero.offload_optimizer.device != OffloadDevice::None || zero.stage < 3
                           ? zero.offload_optimizer.device
                           : zero.offload_param.device;
  plan.offload = offload == OffloadDevice::None ? "none" : offload == OffloadDevice::Cpu ? "cpu" : "nvme";
  plan.checkpointing = c.segments > 0;
  plan.micro_batch = c.micro;
  plan.accumulation = c.accumulation;
  const auto ran = run(c, units, machine, kSteps);
  plan.memory = ran.memory;
  plan.misses = misses(plan.memory, machine);
  plan.refusal = ran.refusal;
  plan.fits = plan.misses.empty() && plan.refusal.empty();
  const auto bytes = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  auto& traffic = plan.traffic;
  traffic.gathered = bytes(ran.traffic.gathered);
  traffic.reduced = bytes(ran.traffic.reduced);
  traffic.to_host = bytes(ran.traffic.to_host);
  traffic.from_host = bytes(ran.traffic.from_host);
  traffic.read = bytes(ran.traffic.read);
  traffic.written = bytes(ran.traffic.written);
  for (const auto& unit : units.units) plan.parameters += unit.numel();
  if (ran.once > 0) traffic.volume = static_cast<double>(traffic.sent()) / ran.once;
  plan.work.collectives = ran.traffic.collectives;
  for (const auto& exchange : exchanges_of({.model = c.model,
                              .settings = c.settings,
                              .share = units.share,
                              .samples = c.micro,
                              .segments = c.segments,
                              .element = element_of(c)})) {
    auto& sent = exchange.operation.starts_with("tp.")   ? traffic.tensor_parallel
                 : exchange.operation.starts_with("ep.") ? traffic.expert_parallel
                                                         : traffic.sequence_parallel;
    sent += bytes(c.accumulation * exchange.bytes);
    plan.work.collectives += c.accumulation * exchange.calls;
  }
  traffic.across_hosts = across_hosts(c, machine, traffic);
  plan.work.updated = ran.traffic.updated - ran.traffic.updated_offloaded;
  plan.work.updated_on_host = ran.traffic.updated_offloaded;
  count_passes({.model = c.model,
                .settings = c.settings,
                .micro = c.micro,
                .accumulation = c.accumulation,
                .segments = c.segments,
                .share = units.share},
               plan.work);
  plan.time = time_of(c.settings, machine, traffic, plan.work);
  return plan;
}

bool limited(const Candidate& c, const PlanMachine& machine) {
  return has_budgets(c.settings) || limit_of(machine, Tier::Device) > 0 || limit_of(machine, Tier::Host) > 0 ||
         limit_of(machine, Tier::File) > 0;
}

void find_largest(const Candidate& c, const PlanMachine& machine, Plan& plan) {
  plan.largest_model = plan.largest_micro_batch = -1;
  if (!limited(c, machine)) return;
  const auto pressure_of = [&](const Candidate& other) { return pressure(needs_in_search(other, machine), machine); };
  plan.largest_micro_batch = largest(std::int64_t{1} << 20, 0, [&](std::int64_t micro) {
    auto other = c;
    other.micro = micro;
    return pressure_of(other);
  });
  // The full simulation takes precedence over the extrapolation.
  plan.largest_micro_batch =
      plan.fits ? std::max(plan.largest_micro_batch, c.micro) : std::min(plan.largest_micro_batch, c.micro - 1);
  constexpr std::int64_t kMillion = 1000000;
  plan.largest_model = kMillion * largest(std::int64_t{100} << 20, 0.01, [&](std::int64_t millions) {
                         auto other = c;
                         other.model = PlanModel::of_count(static_cast<double>(millions * kMillion));
                         other.model.sequence = c.model.sequence;
                         if (c.segments > 0) other.segments = other.model.layers;
                         return pressure_of(other);
                       });
}

// The largest model is searched among those of a number of parameters.
void note_patterns_of_search(const PlanModel& model, const config::Settings& settings,
                             std::vector<std::string>& notices) {
  if (settings.keep_fp32.empty() || model.kind == PlanModel::Kind::Count) return;
  const auto tried = parameters_of(PlanModel::of_count(std::max(1e6, static_cast<double>(model.num_parameters()))));
  auto one = settings;
  for (const auto& pattern : settings.keep_fp32) {
    one.keep_fp32 = {pattern};
    if (!unmatched_patterns(parameters_of(model), one).empty() || unmatched_patterns(tried, one).empty()) continue;
    notices.push_back("[plan] the search for the largest model counts what libzero.keep_fp32 \"" + pattern +
                      "\" names in 16 bits: its models have no such names.");
  }
}

Candidate candidate_of(const PlanModel& model, const Options& options, const PlanMachine& machine) {
  if (machine.hosts < 1 || machine.ranks_per_host < 1)
    throw ConfigError(base::join("[plan] got ", machine.hosts, " hosts of ", machine.ranks_per_host,
                                 " ranks, expected at least one of each"));
  model.validate();
  const auto shape = config::mesh_shape(options, machine.world());
  if (model.sequence < shape.sequence)
    throw ConfigError(base::join("[plan] got sequence_parallel_size ", shape.sequence, " and ", model.sequence,
                                 " tokens, expected at least one token for each rank"));
  const int ranks = machine.world() / shape.tensor;
  if (ranks % model.experts.ep_size != 0)
    throw ConfigError(base::join("[plan] got ep_size ", model.experts.ep_size, ", expected a divisor of ", ranks,
                                 ranks == 1 ? " rank" : " ranks", " and of ", model.experts.count,
                                 " experts. Hint: choose another --ep-world-size or --world."));
  const auto batch = config::resolve_batch(options, machine.world());
  const auto& settings = options.settings();
  Candidate candidate{
      .model = model,
      .settings = settings,
      .freedom = step::placement_freedom(step::ShardingPolicy::of_stage(settings.zero.stage), machine.gpu,
                                         [&](const char* key) { return options.document().is_set(key); }),
      .micro = batch.micro,
      .accumulation = batch.accumulation,
      .segments = segments_of(options, model.layers),
      .notices = check_patterns(model, settings)};
  if (limited(candidate, machine)) note_patterns_of_search(model, settings, candidate.notices);
  return candidate;
}

}  // namespace

Plan plan(const PlanModel& model, const Options& options, const PlanMachine& machine) {
  const auto candidate = candidate_of(model, options, machine);
  auto result = evaluate(candidate, cut(candidate, machine), machine);
  result.notices = candidate.notices;
  find_largest(candidate, machine, result);
  return result;
}

std::vector<Plan> plan_all(const PlanModel& model, const Options& options, const PlanMachine& machine,
                           const PlanChoices& choices) {
  const auto base = candidate_of(model, options, machine);
  const auto stages = choices.stages.empty() ? std::vector<int>{0, 1, 2, 3} : choices.stages;
  const auto offloads = choices.offloads.empty() ? std::vector<std::string>{"none", "cpu", "nvme"} : choices.offloads;
  const auto checkpointing = choices.checkpointing.empty() ? std::vector<bool>{false, true} : choices.checkpointing;
  std::optional<Cut> cuts[2];  // below stage 3, which has no persistent parameters; at stage 3
  std::vector<Plan> all;
  for (const int stage : stages) {
    for (const auto& offload : offloads) {
      if (stage == 0 && offload != "none") continue;
      for (const bool again : checkpointing) {
        auto c = base;
        c.settings.zero.stage = stage;
        const auto device = offload == "cpu"    ? OffloadDevice::Cpu
                            : offload == "nvme" ? OffloadDevice::Nvme
                                                : OffloadDevice::None;
        c.settings.zero.offload_optimizer.device = device;
        c.settings.zero.offload_param.device = stage == 3 ? device : OffloadDevice::None;
        // As plan_config() writes it: without offload no key names a device, so budgets may move states.
        c.freedom = step::placement_freedom(step::ShardingPolicy::of_stage(stage), machine.gpu,
                                            [&](const char*) { return device != OffloadDevice::None; });
        c.segments = !again ? 0 : base.segments > 0 ? base.segments : model.layers;
        auto& units = cuts[stage == 3];
        if (!units) units = cut(c, machine);
        all.push_back(evaluate(c, *units, machine));
        all.back().notices = base.notices;
        find_largest(c, machine, all.back());
      }
    }
  }
  return all;
}

int cheapest(const std::vector<Plan>& plans) {
  const auto rank = [](const std::string& offload) { return offload == "none" ? 0 : offload == "cpu" ? 1 : 2; };
  int best = -1;
  for (int i = 0; i < static_cast<int>(plans.size()); ++i) {
    const auto& mine = plans[static_cast<std::size_t>(i)];
    if (!mine.fits) continue;
    if (best < 0) {
      best = i;
      continue;
    }
    const auto& other = plans[static_cast<std::size_t>(best)];
    const bool timed = mine.time.step > 0 && other.time.step > 0;
    // Predictions are less accurate than one percent.
    if (timed && std::abs(mine.time.step / other.time.step - 1) > 0.01) {
      if (mine.time.step < other.time.step) best = i;
      continue;
    }
    const auto order = [&](const Plan& p) {
      return std::make_tuple(rank(p.offload), p.checkpointing, p.traffic.sent(), p.stage);
    };
    if (order(mine) < order(other)) best = i;
  }
  return best;
}

}  // namespace zero
