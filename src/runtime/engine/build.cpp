// See build.h.
#include "engine/build.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <set>

#include "base/check.h"
#include "base/kept_memory.h"
#include "base/log.h"
#include "config/batch.h"
#include "config/document.h"
#include "config/optimizers.h"
#include "engine/checks.h"
#include "engine/dtypes.h"
#include "engine/model_buffers.h"
#include "engine/muon_rule.h"
#include "engine/rank_agreement.h"
#include "engine/rule_update.h"
#include "gpu/plugin.h"
#include "observe/status_page.h"
#include "parallel/mesh_degrees.h"
#include "step/whole_update.h"
#include "torch_hooks/deferred_init.h"

namespace zero::engine {
namespace {

// The device of the parameters (find_parameters checked that it is one), or where zero::build puts them: the CPU, or
// this rank's GPU.
at::Device device_of(const std::vector<ModelParameter>& parameters, const comm::Group& comm) {
  auto device = parameters.front().tensor.device();
  for (const auto& parameter : parameters)
    if (device.is_cpu()) device = torch_hooks::deferred_device(parameter.tensor);  // one of them may be computed
  if (device.is_cuda() && !device.has_index())  // the current one, as for model->to(at::kCUDA)
    device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  if (!device.is_cuda() || comm.size() == 1) return device;
  if (!comm.takes_gpu_memory())
    throw ConfigError(base::join("[Engine] got parameters on ", device.str(), " and transport ", comm.transport(),
                                 ", expected one that moves GPU memory. Hint: one GPU a rank and "
                                 "ZERO_TRANSPORT=nccl, or ZERO_SHARE_GPU=1, or leave the model on the CPU."));
  const int own = comm.gpu_index(cuda::num_gpus());
  if (device.index() != own)
    throw ConfigError(base::join("[Engine] got parameters on ", device.str(), ", expected cuda:", own,
                                 " of local rank ", comm.local_rank(),
                                 ". Hint: model->to(zero::default_device(*comm))."));
  return device;
}

// Deterministic: every rank gets the same result before any rank waits for another.
void check_secondary_shards(const Job& job) {
  const auto ranks = job.settings.zero.hpz_ranks;
  const auto& comm = *job.comm;
  const bool shards = step::ShardingPolicy::of(job.settings).params;
  if (ranks > 1 && job.settings.mesh.tensor * job.settings.mesh.sequence > 1)
    throw ConfigError(job.where("Engine") +
                      base::join("zero_optimization.zero_hpz_partition_size: got ", ranks,
                                 " with tensor or sequence parallelism, expected 1: neighbouring ranks are of "
                                 "different dimensions. Hint: leave it out."));
  if (!shards || ranks <= 1 || comm.size() == 1 || comm.reads_in_place()) return;
  if (!comm.has_neighbours(ranks) || comm.takes_gpu_memory())
    throw ConfigError(job.where("Engine") +
                      base::join("zero_optimization.zero_hpz_partition_size: got ", ranks,
                                 ", expected a divisor of the ", comm.local_size(),
                                 " ranks of a host, and of every other's; ranks are processes on CPUs, numbered host "
                                 "by host. Hint: 1 turns it off."));
}

// Rules of the program, and of whole parameters, work on fp32.
void set_up_narrow_states(const Job& job, optim::ShardedOptimizer& optimizer) {
  const auto& settings = job.settings;
  if (!settings.low_precision_masters() && settings.state_bits() == 32) return;
  if (job.rule || settings.optimizer.type == config::OptimizerType::Muon)
    throw ConfigError(job.where("Engine") +
                      base::join("got ", optimizer.name(), job.rule ? ", an optimizer of the program," : "",
                                 " with masters or optimizer states in 16 bits, expected fp32. Hint: leave "
                                 "bf16_master_weights_and_grads, fp16_master_weights_and_grads and state_bits out, or "
                                 "use another optimizer.type"));
  if (settings.stochastic_rounding) optimizer.round_stochastically(settings.seed);
}

// Blocks of integers with one scale would mix cut elements with those that tensor-parallel ranks have in common, which
// would drift apart.
void check_quantization(const Job& job) {
  const auto& zero = job.settings.zero;
  if (job.settings.mesh.tensor == 1) return;
  std::string keys;
  for (const auto& [on, key] : {std::pair{zero.quantized_weights, "zero_quantized_weights"},
                                {zero.quantized_nontrainable_weights, "zero_quantized_nontrainable_weights"},
                                {zero.quantized_gradients, "zero_quantized_gradients"}})
    if (on) keys += (keys.empty() ? "" : ", ") + std::string(key);
  if (!keys.empty())
    throw ConfigError(job.where("Engine") + "zero_optimization." + keys +
                      ": got true with tensor parallelism, expected false. Hint: leave it out.");
}

// A mesh that the program made must be that of the configuration.
void check_mesh(const Job& job) {
  const auto wanted = config::mesh_shape(job.options, job.comm->size());
  if (!job.mesh || (job.mesh->size("tp") == wanted.tensor && job.mesh->size("sp") == wanted.sequence)) return;
  throw ConfigError(job.where("Engine") +
                    base::join("got a mesh of ", job.mesh->text(), ", but the configuration asks for ", wanted.data,
                               " dp x ", wanted.sequence, " sp x ", wanted.tensor,
                               " tp. Hint: Mesh::of(options, comm) with the options of the Engine."));
}

// Experts that are divided over ranks have an axis for each degree, after "dp_sp".
void place_experts(const Job& job, Found& found) {
  const auto& mesh = job.settings.mesh;
  const int ranks = job.comm->size() / mesh.tensor;
  found.expert_degrees = expert_degrees(*job.model, found.parameters, ranks);
  if (found.expert_degrees.empty()) return;
  if (mesh.tensor > 1)
    throw ConfigError(base::join("[Engine] got experts with ep_size ", found.expert_degrees.back(),
                                 " and tensor_parallel.autotp_size ", mesh.tensor,
                                 ", which are not built together. Hint: ep_size 1 or autotp_size 1."));
  for (auto& parameter : found.parameters) {
    if (!parameter.expert) continue;
    const auto& degrees = found.expert_degrees;
    const auto& expert = *parameter.expert;
    parameter.axis = 1 + static_cast<int>(std::find(degrees.begin(), degrees.end(), expert.ep_size) - degrees.begin());
    const auto own =
        parallel::ExpertGrid::of(job.comm->rank() / mesh.tensor, ranks, expert.ep_size, mesh.data_before_experts);
    parameter.here = own.place == expert.place();
  }
}

// The optimizer, and each parameter's states.
void set_up_optimizer(const Job& job, Found& found) {
  const auto& settings = job.settings;
  std::optional<optim::ProgramRule> rule;
  if (job.rule) rule = describe(*job.rule, found.parameters);
  std::set<std::string> matrices;
  for (auto& parameter : found.parameters) {
    const auto& most = found.parameters.front().states;
    if (job.rule) {
      if (parameter.states == most) continue;
      for (const auto& state : parameter.states) parameter.kind += (parameter.kind.empty() ? "" : "+") + state;
      if (parameter.kind.empty()) parameter.kind = "no states";
      continue;
    }
    parameter.is_matrix =
        config::is_muon_matrix(settings.optimizer, parameter.name, parameter.sizes.size(), parameter.table);
    parameter.states = config::states_of(settings.optimizer, parameter.is_matrix);
    if (!parameter.is_matrix) continue;
    parameter.kind = config::name_of(settings.optimizer.type);
    matrices.insert(parameter.name);
  }
  found.optimizer = std::make_unique<optim::ShardedOptimizer>(settings.optimizer, settings.schedule,
                                                              settings.parameter_groups, std::move(rule));
  found.rule = job.rule;
  if (!matrices.empty()) found.rule = std::make_shared<MuonRule>(std::move(matrices), *found.optimizer);
  set_up_narrow_states(job, *found.optimizer);
}

// Reports faults of the model or the configuration before any tensor is sent.
Found look_at(const Job& job) {
  const auto& settings = job.settings;
  auto& comm = *job.comm;
  config::require_built(job.options);
  observe::status_page().set_world_rule(config::world_rule(job.options));
  if (settings.transport != "auto" && comm.size() > 1 && comm.transport() != settings.transport &&
      comm.transport() != "staged " + settings.transport)
    throw ConfigError(base::join("[Engine] libzero.transport: got ", settings.transport,
                                 ", but the ranks are connected by ", comm.transport(), " (rank ", comm.rank(), "/",
                                 comm.size(), "). Hint: set ZERO_TRANSPORT=", settings.transport,
                                 " before Communicator::from_env, or leave the key out."));
  if (job.options.document().is_set("libzero.timeout_s"))
    comm.set_timeout(std::chrono::milliseconds(static_cast<std::int64_t>(settings.timeout_s * 1000)));
  check_mesh(job);
  Found found;
  found.batch = config::resolve_batch(job.options, comm.size());
  found.scaler = std::make_unique<optim::LossScaler>(settings);
  check_secondary_shards(job);
  check_quantization(job);
  found.parameters = find_parameters(*job.model, settings);
  check_buffers(*job.model, comm.size());
  cut_parameters(found.parameters, settings, comm.rank() % settings.mesh.tensor);
  place_experts(job, found);
  set_up_optimizer(job, found);
  const bool persists = step::ShardingPolicy::of(settings).params;
  found.units = find_units(found.parameters, {.min_numel = settings.unit_min_numel,
                                              .max_numel = settings.zero.reduce_bucket_size,
                                              .persistent_numel = persists ? settings.zero.persistence_threshold : 0,
                                              .persistent_total = settings.zero.model_persistence_threshold});
  found.device = device_of(found.parameters, comm);
  if (settings.state_bits() == 8 && !found.device.is_cpu())
    throw ConfigError(job.where("Engine") +
                      "optimizer.params.state_bits: got 8 on a GPU, whose kernels do not have it, expected 16 or 32");
  return found;
}

// States are sharded over one axis, "dp_sp", which a run without sequence parallelism calls "dp", and those of experts
// over their own.
RankGroups make_ranks(const Job& job, const std::vector<int>& expert_degrees) {
  RankGroups ranks;
  ranks.mesh = job.mesh ? job.mesh : parallel::MeshMaker::make(job.options, job.communicator);
  ranks.shard = comm::group_of(*ranks.mesh->group("dp_sp"));
  ranks.tensor = comm::group_of(*ranks.mesh->group("tp"));
  ranks.axes.push_back(ranks.shard);
  for (const int ep_size : expert_degrees) ranks.axes.push_back(comm::group_of(*ranks.mesh->experts(ep_size).data));
  return ranks;
}

step::RunFacts make_facts(const Job& job, const Found& found, const RankGroups& ranks) {
  step::RunTopology topology{
      .axes = {}, .world = ranks.shard->size(), .tensor_rank = ranks.mesh->rank("tp"), .gpu = !found.device.is_cpu()};
  const char* const dense = ranks.mesh->size("sp") == 1 ? "dp" : "dp_sp";
  for (const auto& group : ranks.axes)
    topology.axes.push_back({.name = topology.axes.empty() ? dense : "edp",
                             .size = group->size(),
                             .rank = group->rank(),
                             .peer_reads = found.device.is_cpu() && group->reads_in_place(),
                             .quantizes = found.device.is_cpu() && group->quantizes()});
  std::size_t most_states = 0;
  for (const auto& parameter : found.parameters) most_states = std::max(most_states, parameter.states.size());
  auto run = step::run_facts(job.settings, topology, found.batch.accumulation, static_cast<int>(most_states));
  run.keeps_snapshots &= base::kept_memory().fd >= 0;
  return run;
}

// Empty for a parameter that tensor parallelism leaves alone.
std::string text_of(const sharding::ParameterCut& cut) {
  if (cut.kind == sharding::CutKind::Whole) return cut.sum_gradient ? ", its gradient summed" : "";
  auto text =
      base::join(cut.cut.dim == 0 ? ", cut by columns" : ", cut by rows", " at multiples of ", cut.cut.multiple);
  for (const auto length : cut.cut.pieces) text += base::join(", a piece of ", length);
  if (cut.gather_output) text += ", gathered";
  if (cut.scatter_input) text += ", input scattered";
  if (cut.sequence) text += ", sequence region";
  return text;
}

// "RMSprop, with the states square_avg"
std::string states_text(const optim::ShardedOptimizer& optimizer) {
  auto text = optimizer.name();
  for (std::size_t i = 0; i < optimizer.states().size(); ++i)
    text += (i == 0 ? ", with the states " : ", ") + optimizer.states()[i];
  return text;
}

void check_agreement(const Job& job, const Found& found) {
  if (job.comm->size() == 1) return;
  std::string configuration, layout;
  for (const auto& [key, value] : job.options.effective()) configuration += key + " = " + value + "\n";
  for (const char* name : {"ZERO_TRACE", "ZERO_TRACE_STEPS"})
    if (const char* value = std::getenv(name)) configuration += base::join("environment ", name, " = ", value, "\n");
  if (job.rule) configuration += "optimizer of the program = " + states_text(*found.optimizer) + "\n";
  for (const auto& unit : found.units) {
    layout += "unit " + unit.name + "\n";
    for (const auto i : unit.parameters) {
      const auto& p = found.parameters[i];
      layout += base::join("parameter ", p.expert ? p.expert->at(0, p.name) : p.name, " ", p.tensor.sizes(), " ",
                           c10::toString(p.tensor.scalar_type()), found.device.is_cpu() ? "" : " on a GPU",
                           unit.trainable ? "" : " frozen", text_of(p.cut), "\n");
    }
  }
  const auto unsaved = unsaved_buffers(*job.model);
  for (const auto& buffer : job.model->named_buffers()) {
    if (!buffer.value().defined()) continue;
    layout += base::join("buffer ", buffer.key(), " ", buffer.value().sizes(), " ",
                         c10::toString(buffer.value().scalar_type()));
    if (buffer.value().layout() != at::kStrided) layout += base::join(" ", buffer.value().layout());
    layout += unsaved.contains(buffer.key()) ? " not persistent\n" : "\n";
  }
  auto text = disagreement(*job.comm, "[Engine] the configurations", configuration);
  if (text.empty()) text = disagreement(*job.comm, "[Engine] the models", layout);
  if (!text.empty())
    throw ConfigError(text + ". Hint: every rank has to run the same program with the same configuration.");
}

// ZeRO++ saves bytes only over networks and for sharded parameters.
void tell_what_has_no_effect(const Job& job, const step::RunFacts& run) {
  const auto& zero = job.settings.zero;
  if (!run.sharding.params || job.comm->size() == 1 || job.comm->rank() != 0) return;
  const auto without_effect = [&](const char* key, const char* why) {
    base::log(LogLevel::Info, base::join("zero_optimization.", key, " has no effect here: ", why));
  };
  const char* const nothing_to_save = "nothing is sent over a network between CPUs";
  if (zero.hpz_ranks > 1 && job.comm->reads_in_place())
    without_effect("zero_hpz_partition_size", "all ranks share a host, where parameters are read in place");
  if (run.topology.axes[0].quantizes) return;
  if (zero.quantized_weights) without_effect("zero_quantized_weights", nothing_to_save);
  if (zero.quantized_nontrainable_weights) without_effect("zero_quantized_nontrainable_weights", nothing_to_save);
  if (zero.quantized_gradients) without_effect("zero_quantized_gradients", nothing_to_save);
}

// A program that gives a model fp32 parameters among 16-bit ones may need them.
void tell_what_is_narrowed(const Job& job, const Found& found, const step::RunFacts& run) {
  constexpr std::size_t kMostShown = 3;
  if (job.settings.precision == config::Precision::Fp32 || job.comm->rank() != 0) return;
  std::vector<std::string> names;
  for (const auto& parameter : found.parameters)
    if (parameter.tensor.scalar_type() == at::kFloat && !parameter.fp32) names.push_back(parameter.name);
  if (names.empty() || std::all_of(found.parameters.begin(), found.parameters.end(), [](const ModelParameter& p) {
        return p.fp32 || p.tensor.scalar_type() == at::kFloat;
      }))
    return;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMostShown); ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kMostShown) text += base::join(" and ", names.size() - kMostShown, " more");
  base::log(LogLevel::Warning, base::join("the recipe casts these fp32 parameters of a model with 16-bit ones to ",
                                          c10::toString(scalar_type(run.precision.param)), ": ", text,
                                          ". Hint: libzero.keep_fp32 names parameters that stay fp32."));
}

// By axis. Collective.
std::vector<TorchComm::Ranks> with_nodes(const RankGroups& ranks, const step::RunFacts& run) {
  std::vector<TorchComm::Ranks> axes;
  for (std::size_t axis = 0; axis < ranks.axes.size(); ++axis) {
    const int node = run.topology.axes[axis].secondary_ranks;
    axes.push_back({ranks.axes[axis], node > 0 ? ranks.axes[axis]->neighbours(node) : nullptr});
  }
  return axes;
}

std::vector<step::Unit> sized(const Job& job, const Found& found, const step::RunFacts& run) {
  std::vector<step::Unit> units;
  for (const auto& unit : found.units) {
    std::vector<std::int64_t> numels;
    std::size_t replicated = 0;
    for (const auto i : unit.parameters) {
      numels.push_back(found.parameters[i].numel());
      replicated += found.parameters[i].is_cut() ? 0 : 1;
    }
    units.push_back(
        {.name = unit.name,
         .root = unit.root,
         .trainable = unit.trainable,
         .module = unit.module,
         .persistent = unit.persistent,
         .fp32 = unit.fp32,
         .parameters = unit.parameters,
         .layout = sharding::ShardLayout::of_group(
             std::move(numels), run.topology.axes[static_cast<std::size_t>(unit.axis)].size,
             width(run.precision_of(unit.fp32).param), found.device.is_cpu(), step::slot_block(run.precision.slots)),
         .axis = unit.axis,
         .replicated = replicated,
         .states = found.parameters[unit.parameters.front()].states,
         .by_rule = job.rule || found.parameters[unit.parameters.front()].is_matrix});
  }
  if (!found.rule) return units;
  for (std::size_t axis = 0; axis < run.topology.axes.size(); ++axis)
    step::set_owners(units, static_cast<int>(axis), run.topology.axes[axis].size, [&](std::size_t i) {
      const auto& parameter = found.parameters[i];
      const bool whole = found.rule->scope(parameter.name, parameter.part_sizes) == UpdateRule::Scope::Whole;
      return whole ? std::optional(found.rule->cost(parameter.name, parameter.part_sizes)) : std::nullopt;
    });
  return units;
}

}  // namespace

Parts build(const Job& job, ErrorRelay& relay) {
  if (!job.model) throw ConfigError("[Engine] got no model");
  if (c10::InferenceMode::is_enabled())
    throw ConfigError(
        "[Engine] made inside c10::InferenceMode, in which nothing can be trained. Hint: make it outside.");
  Found found;
  // Ranks with other degrees of parallelism find other faults.
  const Common degrees{parallel::degrees_of(job.options), [](const std::vector<std::string>& by_rank) {
                         parallel::require_equal_degrees("[Engine] ", by_rank);
                       }};
  // If one rank finds a fault, all ranks throw; the communicator stays usable.
  agree(
      *job.comm, "Engine",
      [&]() -> std::string {
        found = look_at(job);
        return "";
      },
      &degrees);
  check_agreement(job, found);
  auto ranks = relay.reporting([&] { return make_ranks(job, found.expert_degrees); });
  auto run = relay.reporting([&] { return make_facts(job, found, ranks); });
  auto axes = relay.reporting([&] {
    tell_what_has_no_effect(job, run);
    tell_what_is_narrowed(job, found, run);
    return with_nodes(ranks, run);
  });
  std::unique_ptr<const TierPlan> tiers;
  agree(*job.comm, "Engine", [&]() -> std::string {
    tiers = std::make_unique<const TierPlan>(job, run, sized(job, found, run));
    return "";
  });
  run.updates_together = !found.rule && !tiers->offloads() && kernels_for(found.device) != nullptr;
  RunPlan plan{found.batch, found.device, std::move(run), std::move(tiers), {}};
  std::copy_if(found.parameters.begin(), found.parameters.end(), std::back_inserter(plan.remote),
               [](const ModelParameter& parameter) { return !parameter.here; });
  return relay.reporting([&] {
    plan.tiers->check_buffers(plan.tiers->facts());
    return Parts(job, relay, std::move(plan), std::move(ranks), std::move(axes), std::move(found));
  });
}

}  // namespace zero::engine
