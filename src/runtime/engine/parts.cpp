// See parts.h.
#include "engine/parts.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/log.h"
#include "engine/build.h"

namespace zero::engine {
namespace {

std::shared_ptr<parallel::SplitProducts> make_products(const Job& job, const RankGroups& ranks, at::Device device) {
  if (ranks.tensor->size() == 1) return nullptr;
  return std::make_shared<parallel::SplitProducts>(ranks.mesh->group("tp"), device,
                                                   /*shared_generator=*/job.comm->transport() == "thread");
}

std::shared_ptr<EngineMemory> make_memory(const Job& job, const RunPlan& plan, const RankGroups& ranks,
                                          std::shared_ptr<comm::Group> node) {
  return std::make_shared<EngineMemory>(
      TorchBuffers::Setup{.axes = ranks.axes,
                          .node = std::move(node),
                          .tensor_rank = plan.run.topology.tensor_rank,
                          .device = plan.device,
                          .pin_states = plan.run.topology.gpu && job.settings.zero.offload_optimizer.pin_memory,
                          .params_file = plan.tiers->params_file(),
                          .states_file = plan.tiers->states_file()},
      plan.run.checksums);
}

std::unique_ptr<TorchBackend> make_backend(Parts& parts, const Found& found, std::vector<TorchComm::Ranks> by_axis) {
  if (parts.plan.run.updates_together)
    parts.optimizer->set_ranges_update(
        ranges_update_on(parts.plan.device, [&parts] { return parts.backend->tensors.norm(); }));
  std::vector<std::vector<ModelParameter>> members;
  std::vector<std::vector<int>> parameter_groups;
  for (const auto& unit : found.units) {
    auto& of_unit = members.emplace_back();
    auto& groups = parameter_groups.emplace_back();
    for (const auto i : unit.parameters) {
      const auto& parameter = of_unit.emplace_back(found.parameters[i]);
      groups.push_back(parts.optimizer->parameter_group_of(parameter.name, parameter.aliases));
    }
  }
  return std::make_unique<TorchBackend>(parts.memory, parts.plan.run, parts.groups, std::move(by_axis),
                                        std::move(members), *parts.optimizer, found.rule, std::move(parameter_groups),
                                        parts.trace.trace());
}

std::unique_ptr<step::StepProgram> make_program(const Parts& parts) {
  parts.plan.tiers->enforce(*parts.memory->ledger);
  return std::make_unique<step::StepProgram>(
      parts.plan.run, parts.groups, parts.backend->ops(), parts.memory->memory, *parts.scaler, parts.backend->observer,
      [tell = parts.job.settings.zero.log_trace_cache_warnings](const std::string& group) {
        if (tell) base::log(LogLevel::Warning, "the order of groups differs from the one expected, at group " + group);
      });
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

std::shared_ptr<activations::ActivationStore> make_activations(const Parts& parts) {
  const auto& job = parts.job;
  activations::ActivationStore::Setup setup;
  setup.settings = job.settings.activations;
  setup.io = io_settings(job.settings.aio);
  setup.device = parts.plan.device;
  setup.ledger = parts.memory->ledger;
  setup.who = base::join("rank ", job.comm->rank(), "/", job.comm->size());
  if (job.comm->rank() == 0) setup.profile = [](const std::string& line) { base::log(LogLevel::Info, line); };
  if (job.settings.activations.partition && parts.products)
    setup.partition = activations::InputPartition{
        .rank = parts.ranks.tensor->rank(),
        .ranks = parts.ranks.tensor->size(),
        .all_gather = [group = parts.ranks.tensor](
                          at::Tensor out, const at::Tensor& in) { return group->all_gather(std::move(out), in); },
        .compare = [group = parts.ranks.tensor](const at::Tensor& bytes) { compare_inputs(*group, bytes); },
        .inside_split_region = [products = parts.products] { return products->in_region(); }};
  return activations::ActivationStore::create(std::move(setup));
}

}  // namespace

Parts::Parts(const Job& job, ErrorRelay& relay, RunPlan plan, RankGroups ranks, std::vector<TorchComm::Ranks> by_axis,
             Found found)
    : job(job),
      relay(relay),
      plan(std::move(plan)),
      ranks(std::move(ranks)),
      optimizer(std::move(found.optimizer)),
      scaler(std::move(found.scaler)),
      products(make_products(job, this->ranks, found.device)),
      experts(found.expert_degrees.empty()
                  ? nullptr
                  : std::make_unique<Experts>(*this->ranks.mesh, *job.model, job.settings.mesh.data_before_experts)),
      groups(this->plan.tiers->facts()),
      memory(make_memory(job, this->plan, this->ranks, by_axis.front().node)),
      backend(make_backend(*this, found, std::move(by_axis))),
      program(make_program(*this)) {
  if (job.settings.wall_clock_breakdown) trace.trace().count_always();
  // Report missing folders and files while the model is still unchanged.
  memory->buffers.make_files();
  this->plan.tiers->describe_files();
  activations = make_activations(*this);
}

Parts::~Parts() {
  backend->update.settle();  // its job uses the members below
  program.reset();
  backend.reset();
  memory->close();
}

}  // namespace zero::engine
