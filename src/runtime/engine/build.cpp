// See build.h.
#include "engine/build.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "base/check.h"
#include "base/kept_memory.h"
#include "base/log.h"
#include "config/batch.h"
#include "config/document.h"
#include "engine/checks.h"
#include "engine/dtypes.h"
#include "engine/initial_values.h"
#include "engine/model_buffers.h"
#include "engine/rank_agreement.h"
#include "gpu/plugin.h"
#include "observe/status_page.h"
#include "parallel/mesh_degrees.h"
#include "torch_hooks/deferred_init.h"

namespace zero::engine {
namespace {

// The model's contents, before any data is moved.
struct Found {
  std::vector<ModelParameter> parameters;
  std::vector<int> expert_degrees;
  std::vector<Unit> units;  // of the parameters that this rank has
};

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
void check_secondary_shards(const Parts& parts) {
  const auto ranks = parts.settings.zero.hpz_ranks;
  const auto& comm = *parts.comm;
  const bool shards = step::ShardingPolicy::of(parts.settings).params;
  if (ranks > 1 && parts.settings.mesh.tensor * parts.settings.mesh.sequence > 1)
    throw ConfigError(parts.where("Engine") +
                      base::join("zero_optimization.zero_hpz_partition_size: got ", ranks,
                                 " with tensor or sequence parallelism, expected 1: neighbouring ranks are of "
                                 "different dimensions. Hint: leave it out."));
  if (!shards || ranks <= 1 || comm.size() == 1 || comm.reads_in_place()) return;
  if (!comm.has_neighbours(ranks) || comm.takes_gpu_memory())
    throw ConfigError(parts.where("Engine") +
                      base::join("zero_optimization.zero_hpz_partition_size: got ", ranks,
                                 ", expected a divisor of the ", comm.local_size(),
                                 " ranks of a host, and of every other's; ranks are processes on CPUs, numbered host "
                                 "by host. Hint: 1 turns it off."));
}

// Blocks of integers with one scale would mix cut elements with those that tensor-parallel ranks have in common, which
// would drift apart.
void check_quantization(const Parts& parts) {
  const auto& zero = parts.settings.zero;
  if (parts.settings.mesh.tensor == 1) return;
  std::string keys;
  for (const auto& [on, key] : {std::pair{zero.quantized_weights, "zero_quantized_weights"},
                                {zero.quantized_nontrainable_weights, "zero_quantized_nontrainable_weights"},
                                {zero.quantized_gradients, "zero_quantized_gradients"}})
    if (on) keys += (keys.empty() ? "" : ", ") + std::string(key);
  if (!keys.empty())
    throw ConfigError(parts.where("Engine") + "zero_optimization." + keys +
                      ": got true with tensor parallelism, expected false. Hint: leave it out.");
}

// A mesh that the program made must be that of the configuration.
void check_mesh(const Parts& parts) {
  const auto wanted = config::mesh_shape(parts.options, parts.comm->size());
  if (!parts.mesh || (parts.mesh->size("tp") == wanted.tensor && parts.mesh->size("sp") == wanted.sequence)) return;
  throw ConfigError(parts.where("Engine") +
                    base::join("got a mesh of ", parts.mesh->text(), ", but the configuration asks for ", wanted.data,
                               " dp x ", wanted.sequence, " sp x ", wanted.tensor,
                               " tp. Hint: Mesh::of(options, comm) with the options of the Engine."));
}

// Experts that are divided over ranks have an axis for each degree, after "dp_sp".
void place_experts(const Parts& parts, Found& found) {
  const auto& mesh = parts.settings.mesh;
  const int ranks = parts.comm->size() / mesh.tensor;
  found.expert_degrees = expert_degrees(*parts.model, found.parameters, ranks);
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
        parallel::ExpertGrid::of(parts.comm->rank() / mesh.tensor, ranks, expert.ep_size, mesh.data_before_experts);
    parameter.here = own.place == expert.place();
  }
}

// Reports faults of the model or the configuration before any tensor is sent.
Found look_at(Parts& parts) {
  const auto& settings = parts.settings;
  auto& comm = *parts.comm;
  config::require_built(parts.options);
  observe::status_page().set_world_rule(config::world_rule(parts.options));
  if (settings.transport != "auto" && comm.size() > 1 && comm.transport() != settings.transport &&
      comm.transport() != "staged " + settings.transport)
    throw ConfigError(base::join("[Engine] libzero.transport: got ", settings.transport,
                                 ", but the ranks are connected by ", comm.transport(), " (rank ", comm.rank(), "/",
                                 comm.size(), "). Hint: set ZERO_TRANSPORT=", settings.transport,
                                 " before Communicator::from_env, or leave the key out."));
  if (parts.options.document().is_set("libzero.timeout_s"))
    comm.set_timeout(std::chrono::milliseconds(static_cast<std::int64_t>(settings.timeout_s * 1000)));
  check_mesh(parts);
  const auto batch = config::resolve_batch(parts.options, comm.size());
  parts.accumulation = batch.accumulation;
  parts.micro_batch = batch.micro;
  parts.optimizer =
      std::make_unique<optim::ShardedOptimizer>(settings.optimizer, settings.schedule, settings.parameter_groups);
  parts.scaler = std::make_unique<optim::LossScaler>(settings);
  check_secondary_shards(parts);
  check_quantization(parts);
  Found found;
  found.parameters = find_parameters(*parts.model, settings);
  check_buffers(*parts.model, comm.size());
  cut_parameters(found.parameters, settings, comm.rank() % settings.mesh.tensor);
  place_experts(parts, found);
  const bool persists = step::ShardingPolicy::of(settings).params;
  found.units = find_units(found.parameters, {.min_numel = settings.unit_min_numel,
                                              .max_numel = settings.zero.reduce_bucket_size,
                                              .persistent_numel = persists ? settings.zero.persistence_threshold : 0,
                                              .persistent_total = settings.zero.model_persistence_threshold});
  parts.device = device_of(found.parameters, comm);
  return found;
}

// States are sharded over one axis, "dp_sp", which a run without a mesh calls "dp", and those of experts over their
// own.
void make_axes(Parts& parts, const Found& found) {
  if (!parts.mesh) parts.mesh = parallel::MeshMaker::make(parts.options, parts.communicator);
  const auto& mesh = *parts.mesh;
  parts.shard_group = comm::group_of(*mesh.group("dp_sp"));
  parts.tensor_group = comm::group_of(*mesh.group("tp"));
  std::vector<step::Axis> axes;
  const auto add = [&](const char* name, const std::shared_ptr<comm::Group>& group) {
    axes.push_back({.name = name,
                    .size = group->size(),
                    .rank = group->rank(),
                    .peer_reads = parts.device.is_cpu() && group->reads_in_place(),
                    .quantizes = parts.device.is_cpu() && group->quantizes()});
    parts.axis_groups.push_back(group);
  };
  add(mesh.size("sp") == 1 ? "dp" : "dp_sp", parts.shard_group);
  if (!found.expert_degrees.empty())
    parts.experts =
        std::make_unique<Experts>(mesh, *parts.model, found.expert_degrees, parts.settings.mesh.data_before_experts);
  for (const int ep_size : found.expert_degrees) add("edp", parts.experts->data_group(ep_size));
  parts.run = step::run_facts(parts.settings,
                              {.axes = std::move(axes),
                               .world = parts.shard_group->size(),
                               .tensor_rank = mesh.rank("tp"),
                               .gpu = !parts.device.is_cpu()},
                              parts.accumulation);
  parts.run.keeps_snapshots &= base::kept_memory().fd >= 0;
  if (mesh.size("tp") > 1)
    parts.products = std::make_shared<parallel::SplitProducts>(
        mesh.group("tp"), parts.device, /*shared_generator=*/parts.comm->transport() == "thread");
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

void check_agreement(const Parts& parts, const Found& found) {
  if (parts.comm->size() == 1) return;
  std::string configuration, layout;
  for (const auto& [key, value] : parts.options.effective()) configuration += key + " = " + value + "\n";
  for (const char* name : {"ZERO_TRACE", "ZERO_TRACE_STEPS"})
    if (const char* value = std::getenv(name)) configuration += base::join("environment ", name, " = ", value, "\n");
  for (const auto& unit : found.units) {
    layout += "unit " + unit.name + "\n";
    for (const auto i : unit.parameters) {
      const auto& p = found.parameters[i];
      layout += base::join("parameter ", p.expert ? p.expert->at(0, p.name) : p.name, " ", p.tensor.sizes(), " ",
                           c10::toString(p.tensor.scalar_type()), parts.device.is_cpu() ? "" : " on a GPU",
                           unit.trainable ? "" : " frozen", text_of(p.cut), "\n");
    }
  }
  const auto unsaved = unsaved_buffers(*parts.model);
  for (const auto& buffer : parts.model->named_buffers()) {
    if (!buffer.value().defined()) continue;
    layout += base::join("buffer ", buffer.key(), " ", buffer.value().sizes(), " ",
                         c10::toString(buffer.value().scalar_type()));
    if (buffer.value().layout() != at::kStrided) layout += base::join(" ", buffer.value().layout());
    layout += unsaved.contains(buffer.key()) ? " not persistent\n" : "\n";
  }
  auto text = disagreement(*parts.comm, "[Engine] the configurations", configuration);
  if (text.empty()) text = disagreement(*parts.comm, "[Engine] the models", layout);
  if (!text.empty())
    throw ConfigError(text + ". Hint: every rank has to run the same program with the same configuration.");
}

// ZeRO++ saves bytes only over networks and for sharded parameters.
void tell_what_has_no_effect(const Parts& parts) {
  const auto& zero = parts.settings.zero;
  if (!parts.run.sharding.params || parts.comm->size() == 1 || parts.comm->rank() != 0) return;
  const auto without_effect = [&](const char* key, const char* why) {
    base::log(LogLevel::Info, base::join("zero_optimization.", key, " has no effect here: ", why));
  };
  const char* const nothing_to_save = "nothing is sent over a network between CPUs";
  if (zero.hpz_ranks > 1 && parts.comm->reads_in_place())
    without_effect("zero_hpz_partition_size", "all ranks share a host, where parameters are read in place");
  if (parts.run.topology.axes[0].quantizes) return;
  if (zero.quantized_weights) without_effect("zero_quantized_weights", nothing_to_save);
  if (zero.quantized_nontrainable_weights) without_effect("zero_quantized_nontrainable_weights", nothing_to_save);
  if (zero.quantized_gradients) without_effect("zero_quantized_gradients", nothing_to_save);
}

// A program that gives a model fp32 parameters among 16-bit ones may need them.
void tell_what_is_narrowed(const Parts& parts, const Found& found) {
  constexpr std::size_t kMostShown = 3;
  if (parts.settings.precision == config::Precision::Fp32 || parts.comm->rank() != 0) return;
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
                                          c10::toString(scalar_type(parts.run.precision.param)), ": ", text,
                                          ". Hint: libzero.keep_fp32 names parameters that stay fp32."));
}

// By axis.
std::vector<TorchComm::Ranks> ranks_of(Parts& parts) {
  std::vector<TorchComm::Ranks> axes;
  for (std::size_t axis = 0; axis < parts.axis_groups.size(); ++axis) {
    const auto& group = parts.axis_groups[axis];
    const int node = parts.run.topology.axes[axis].secondary_ranks;
    axes.push_back({group, node > 0 ? group->neighbours(node) : nullptr});
  }
  return axes;
}

std::vector<step::Unit> sized(const Parts& parts, const Found& found) {
  std::vector<step::Unit> units;
  for (const auto& unit : found.units) {
    std::vector<std::int64_t> numels;
    std::size_t replicated = 0;
    for (const auto i : unit.parameters) {
      numels.push_back(found.parameters[i].numel());
      replicated += found.parameters[i].is_cut() ? 0 : 1;
    }
    units.push_back({.name = unit.name,
                     .root = unit.root,
                     .trainable = unit.trainable,
                     .persistent = unit.persistent,
                     .fp32 = unit.fp32,
                     .parameters = unit.parameters,
                     .layout = sharding::ShardLayout::of_group(
                         std::move(numels), parts.run.topology.axes[static_cast<std::size_t>(unit.axis)].size,
                         width(parts.run.precision_of(unit.fp32).param), parts.device.is_cpu()),
                     .axis = unit.axis,
                     .replicated = replicated});
  }
  return units;
}

void make_backend(Parts& parts, Found& found, std::vector<TorchComm::Ranks> axes) {
  std::vector<std::vector<ModelParameter>> members;
  std::vector<std::vector<int>> parameter_groups;
  for (const auto& unit : found.units) {
    auto& of_unit = members.emplace_back();
    auto& groups = parameter_groups.emplace_back();
    for (const auto i : unit.parameters) {
      const auto& parameter = found.parameters[i];
      of_unit.push_back(parameter);
      groups.push_back(parts.optimizer->parameter_group_of(parameter.name, parameter.aliases));
    }
  }
  for (auto& parameter : found.parameters)
    if (!parameter.here) parts.remote.push_back(std::move(parameter));
  found.parameters.clear();
  parts.memory = std::make_shared<EngineMemory>(
      TorchBuffers::Setup{.axes = parts.axis_groups,
                          .node = axes.front().node,
                          .tensor_rank = parts.run.topology.tensor_rank,
                          .device = parts.device,
                          .pin_states = parts.run.topology.gpu && parts.settings.zero.offload_optimizer.pin_memory,
                          .params_file = parts.tiers->params_file(),
                          .states_file = parts.tiers->states_file()},
      parts.run.checksums);
  parts.backend =
      std::make_unique<TorchBackend>(parts.memory, parts.run, parts.groups, std::move(axes), std::move(members),
                                     *parts.optimizer, std::move(parameter_groups), parts.trace.trace());
}

// Only inputs that all ranks of a tensor-parallel group have in common can be divided over them.
void compare_inputs(comm::Group& tensor_group, const at::Tensor& bytes) {
  const auto host = bytes.cpu();
  const auto hash = XXH3_64bits(host.const_data_ptr(), host.nbytes());
  const auto all = tensor_group.all_gather_bytes(base::join(host.nbytes(), " ", hash));
  for (std::size_t j = 1; j < all.size(); ++j)
    if (all[j] != all[0])
      throw ConfigError(base::join(
          "[activation_checkpoint] got an input of ", host.nbytes(), " bytes that differs between tp 0 and tp ", j,
          ", which activation_checkpointing.partition_activations cannot divide. Hint: all ranks of a tensor-parallel "
          "group read the same samples and draw the same random numbers outside of split layers; or set it to false."));
}

void keep_activations(Parts& parts) {
  activations::ActivationStore::Setup setup;
  setup.settings = parts.settings.activations;
  setup.io = io_settings(parts.settings.aio);
  setup.device = parts.device;
  setup.ledger = parts.memory->ledger;
  setup.who = base::join("rank ", parts.comm->rank(), "/", parts.comm->size());
  if (parts.comm->rank() == 0) setup.profile = [](const std::string& line) { base::log(LogLevel::Info, line); };
  if (parts.settings.activations.partition && parts.products)
    setup.partition = activations::InputPartition{
        .rank = parts.tensor_group->rank(),
        .ranks = parts.tensor_group->size(),
        .all_gather = [group = parts.tensor_group](
                          at::Tensor out, const at::Tensor& in) { return group->all_gather(std::move(out), in); },
        .compare = [group = parts.tensor_group](const at::Tensor& bytes) { compare_inputs(*group, bytes); },
        .inside_split_region = [products = parts.products] { return products->in_region(); }};
  parts.activations = activations::ActivationStore::create(std::move(setup));
}

}  // namespace

void build(Parts& parts) {
  if (!parts.model) throw ConfigError("[Engine] got no model");
  if (c10::InferenceMode::is_enabled())
    throw ConfigError(
        "[Engine] made inside c10::InferenceMode, in which nothing can be trained. Hint: make it outside.");
  Found found;
  // Ranks with other degrees of parallelism find other faults.
  const Common degrees{parallel::degrees_of(parts.options), [](const std::vector<std::string>& by_rank) {
                         parallel::require_equal_degrees("[Engine] ", by_rank);
                       }};
  // If one rank finds a fault, all ranks throw; the communicator stays usable.
  agree(
      *parts.comm, "Engine",
      [&]() -> std::string {
        found = look_at(parts);
        return "";
      },
      &degrees);
  check_agreement(parts, found);
  std::vector<TorchComm::Ranks> axes;
  parts.relay.reporting([&] {
    make_axes(parts, found);
    tell_what_has_no_effect(parts);
    tell_what_is_narrowed(parts, found);
    axes = ranks_of(parts);
  });
  if (parts.settings.wall_clock_breakdown) parts.trace.trace().count_always();
  agree(*parts.comm, "Engine", [&]() -> std::string {
    parts.tiers = std::make_unique<TierPlan>(parts.options, parts.run, sized(parts, found), *parts.comm);
    return "";
  });
  parts.groups = parts.tiers->facts();
  if (!parts.tiers->offloads() && kernels_for(parts.device) != nullptr) {
    parts.optimizer->set_ranges_update(
        ranges_update_on(parts.device, [&parts] { return parts.backend->tensors.norm(); }));
    parts.run.updates_together = true;
  }
  parts.relay.reporting([&] {
    parts.tiers->check_buffers(parts.groups);
    make_backend(parts, found, std::move(axes));
    parts.tiers->enforce(*parts.memory->ledger);
    const bool tell = parts.settings.zero.log_trace_cache_warnings;
    parts.program = std::make_unique<step::StepProgram>(
        parts.run, parts.groups, parts.backend->ops(), parts.memory->memory, *parts.scaler, parts.backend->observer,
        [tell](const std::string& group) {
          if (tell)
            base::log(LogLevel::Warning, "the order of groups differs from the one expected, at group " + group);
        });
    // Report missing folders and files while the model is still unchanged.
    parts.memory->buffers.make_files();
    parts.tiers->describe_files();
    keep_activations(parts);
  });
}

// --- first values -----------------------------------------------------------------------------

void adopt_model(Parts& parts) {
  // After zero::build with a device the model is still on the CPU.
  const bool moves = parts.binding().group(0).members.front().tensor.device() != parts.device;
  adopt_parameters(parts);
  adopt_buffers(parts, moves);
}

void abandon_model(Parts& parts) noexcept {
  if (!parts.program) return;
  for (const auto& group : parts.program->groups()) {
    if (!group->facts.sharding.params) continue;
    try {
      group->params->reshard();
    } catch (const std::exception&) {
      // A pending all-gather failed with its communicator; the data is lost either way.
    }
    parts.binding().abandon(group->index);
  }
}

}  // namespace zero::engine
