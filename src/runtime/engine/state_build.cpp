// Taking a model over: groups, agreement between ranks, values, buffers, hooks.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/check.h"
#include "base/idle_memory.h"
#include "base/log.h"
#include "config/batch.h"
#include "config/document.h"
#include "engine/model_checks.h"
#include "engine/rank_agreement.h"
#include "engine/state.h"
#include "torch_hooks/deferred_init.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {
State::State(std::shared_ptr<torch::nn::Module> model, Options options, std::shared_ptr<Communicator> comm)
    : model_(std::move(model)),
      options_(std::move(options)),
      settings_(options_.settings()),
      communicator_(comm ? std::move(comm) : throw ConfigError("[Engine] got no communicator")),
      comm_(comm::group_of(*communicator_)),
      relay_(*comm_) {
  if (!model_) throw ConfigError("[Engine] got no model");
  if (c10::InferenceMode::is_enabled())
    throw ConfigError(
        "[Engine] made inside c10::InferenceMode, in which nothing can be trained. Hint: make it outside.");
  std::vector<ModelParameter> parameters;
  std::vector<Unit> units;
  // What is wrong with the model, the configuration or the budgets is said before anything but words is sent: all
  // ranks throw it, and go on with the communicator as they like.
  agree(*comm_, "Engine", [&]() -> std::string {
    config::require_built(options_);
    if (settings_.transport != "auto" && comm_->size() > 1 && comm_->transport() != settings_.transport)
      throw ConfigError(base::join("[Engine] libzero.transport: got ", settings_.transport,
                                   ", but the ranks are connected by ", comm_->transport(), " (rank ", comm_->rank(),
                                   "/", comm_->size(), "). Hint: set ZERO_TRANSPORT=", settings_.transport,
                                   " before Communicator::from_env, or leave the key out."));
    if (options_.document().is_set("libzero.timeout_s"))
      comm_->set_timeout(std::chrono::milliseconds(static_cast<std::int64_t>(settings_.timeout_s * 1000)));
    stage_ = settings_.zero.stage;
    const auto batch = config::resolve_batch(options_, comm_->size());
    accumulation_ = batch.accumulation;
    micro_batch_ = batch.micro;
    recipe_ = recipe_of(settings_, accumulation_);
    const double world = comm_->size(), ahead = settings_.prescale_gradients ? world : settings_.predivide_factor;
    const bool mean = settings_.reduce_op == config::ReduceOp::Mean;
    if (mean) predivide_ = static_cast<float>(1.0 / ahead);
    postmultiply_ = static_cast<float>(mean ? ahead / world : 1.0);

    optimizer_ =
        std::make_unique<optim::ShardedOptimizer>(settings_.optimizer, settings_.schedule, settings_.parameter_groups);
    scaler_ = std::make_unique<optim::LossScaler>(settings_);
    const auto allocate = [this](std::int64_t numel, at::ScalarType dtype) {
      torch_hooks::AllocationObserver::Pause pause;  // the pools book their own
      if (device_.is_cpu()) return comm_->allocate(numel, dtype);
      return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device_));
    };
    gather_pool_ = std::make_unique<engine::TensorPool>(allocate, *ledger_, step::Purpose::GatherBuffers);
    reduce_pool_ = std::make_unique<engine::TensorPool>(allocate, *ledger_, step::Purpose::ReduceBuffers);

    check_second_shards();
    parameters = find_parameters(*model_, settings_);
    units = find_units(parameters, {.min_numel = settings_.unit_min_numel,
                                    .max_numel = settings_.zero.reduce_bucket_size,
                                    .persistent_numel = stage_ == 3 ? settings_.zero.persistence_threshold : 0,
                                    .persistent_total = settings_.zero.model_persistence_threshold});
    take_device(parameters);
    return "";
  });
  check_agreement(parameters, units);

  GroupContext context{.stage = stage_, .recipe = recipe_, .device = device_};
  context.comm = comm_.get();
  context.ledger = ledger_.get();
  context.gather_pool = gather_pool_.get();
  context.reduce_pool = reduce_pool_.get();
  context.num_slots = optimizer_->num_slots();
  context.slot_initial_value = optimizer_->slot_initial_value();
  relay_.telling([&] { use_slow_links(context); });
  const bool one_dtype = recipe_.gradient == recipe_.parameter && recipe_.wire == recipe_.parameter;
  if (device_.is_cpu() && comm_->reads_in_place() && comm_->size() > 1 && (stage_ >= 2 || one_dtype)) {
    blocks_ = std::make_shared<engine::BlockPool>(
        [comm = comm_](std::int64_t bytes) { return comm->allocate(bytes, at::kByte); }, ledger_,
        stage_ >= 2 ? step::Purpose::ReduceBuffers : step::Purpose::Gradients);
    for (const auto& parameter : parameters)  // where the wire has another dtype, gradients are converted anyway
      if (parameter.tensor.requires_grad() && recipe_.wire == recipe_.parameter)
        blocks_->serve(parameter.tensor.numel() * static_cast<std::int64_t>(at::elementSize(recipe_.parameter)) +
                       static_cast<std::int64_t>(torch_hooks::BlockAllocator::kOverhead));
  }
  context.blocks = blocks_.get();
  context.direct_gradients = one_dtype && (comm_->size() == 1 ? predivide_ == 1 : blocks_ != nullptr && stage_ <= 1);
  context.sums = sums_.get();
  context.gather_stream = gather_stream_.get();
  context.reduce_stream = reduce_stream_.get();
  context.predivide = predivide_;
  if (settings_.wall_clock_breakdown) trace_.trace().count_always();
  context.trace = &trace_.trace();
  agree(*comm_, "Engine", [&]() -> std::string {
    arrange_tiers(parameters, units);
    return "";
  });
  relay_.telling([&] {
    for (const auto& unit : units) {
      std::vector<ModelParameter> members;
      std::vector<int> parameter_groups;
      for (const auto i : unit.parameters) {
        members.push_back(parameters[i]);
        parameter_groups.push_back(optimizer_->parameter_group_of(parameters[i].name, parameters[i].aliases));
      }
      tiers_->describe(context, groups_.size());
      groups_.push_back(std::make_unique<ParamGroup>(context, unit, std::move(members), parameter_groups));
    }
    parameters.clear();
    tiers_->make_files(groups_);
    tiers_->enforce(*ledger_);
    make_update();
    // Folders and files that are not there are told of while the model is still as it was.
    keep_activations();
    start_trace_of_environment();
    if (comm_->size() > 1) comm_->barrier();  // one rank's refusal is all ranks'
    try {
      adopt_values();
      adopt_buffers();
      attach();
    } catch (...) {
      detach();
      throw;
    }
    // The full-precision originals are freed by now; glibc would keep what lay on its heap.
    base::release_idle_memory();
  });
}

State::~State() {
  relay_.tell_if_unwinding();
  try {
    background_.wait();
  } catch (const std::exception&) {
    // Nobody is left who would compute with what it made.
  }
  detach();
}

// Nothing of the model points here any more. Of a constructor that throws, too, whose members alone are destroyed.
void State::detach() noexcept {
  end_trace();
  end_activations();
  if (activations_) activations_->end();
  for (const auto& member : members_) {
    const auto& group = *groups_[static_cast<std::size_t>(member.group)];
    const auto& tensor = group.members()[member.index].tensor;
    if (torch_hooks::gradient_hook_of(tensor) == torch_hooks::HookPlace::Ours)
      torch_hooks::set_gradient_hook(tensor, nullptr);
    torch_hooks::stop_intercepting(tensor, group.storage(member.index));
  }
  for (const auto& group : groups_) group->abandon();
}

// The parameters are on one device (find_parameters): the CPU, or a GPU, which has to be this rank's.
void State::take_device(const std::vector<ModelParameter>& parameters) {
  device_ = parameters.front().tensor.device();
  if (device_.is_cuda() && comm_->size() > 1 && comm_->transport() != "nccl")
    throw ConfigError(base::join("[Engine] got parameters on ", device_.str(), " and transport ", comm_->transport(),
                                 ", expected nccl: the others move host memory. Hint: one GPU a rank and "
                                 "ZERO_TRANSPORT=nccl, or leave the model on the CPU."));
  if (device_.is_cuda() && comm_->size() > 1 && device_.index() != comm_->local_rank())
    throw ConfigError(base::join("[Engine] got parameters on ", device_.str(), ", expected cuda:", comm_->local_rank(),
                                 " of local rank ", comm_->local_rank(),
                                 ". Hint: model->to(zero::default_device(*comm))."));
  if (kernels_for(device_) != nullptr) sums_ = std::make_unique<DeviceSums>(device_);
  gather_stream_ = std::make_unique<gpu::SideStream>(device_, /*high_priority=*/true);
  reduce_stream_ = std::make_unique<gpu::SideStream>(device_, /*high_priority=*/true);
}

void State::arrange_tiers(const std::vector<ModelParameter>& parameters, const std::vector<Unit>& units) {
  const auto width = static_cast<std::int64_t>(at::elementSize(recipe_.parameter));
  std::vector<step::Unit> sized;
  for (const auto& unit : units) {
    std::vector<std::int64_t> numels;
    for (const auto i : unit.parameters) numels.push_back(parameters[i].tensor.numel());
    sized.push_back(
        {.name = unit.name,
         .root = unit.root,
         .trainable = unit.trainable,
         .persistent = unit.persistent,
         .parameters = unit.parameters,
         .layout = sharding::ShardLayout::of_group(std::move(numels), comm_->size(), width, device_.is_cpu()),
         .axis = 0});
  }
  const step::Axis axis{.name = "dp",
                        .size = comm_->size(),
                        .rank = comm_->rank(),
                        .peer_reads = device_.is_cpu() && comm_->reads_in_place(),
                        .quantizes = device_.is_cpu() && comm_->quantizes()};
  tiers_ = std::make_unique<TierPlan>(options_, device_, *comm_);
  tiers_->arrange({.axes = {axis}, .world = comm_->size(), .gpu = !device_.is_cpu()}, accumulation_, sized);
  if (!tiers_->offloads()) optimizer_->set_range_update(range_update_on(device_));
}

// Every rank finds it alike, before any of them waits for another.
void State::check_second_shards() const {
  const auto ranks = settings_.zero.hpz_ranks;
  if (stage_ != 3 || ranks <= 1 || comm_->size() == 1 || comm_->reads_in_place()) return;
  if (!comm_->has_neighbours(ranks) || comm_->transport() == "nccl")
    throw ConfigError(where("Engine") +
                      base::join("zero_optimization.zero_hpz_partition_size: got ", ranks,
                                 ", expected a divisor of the ", comm_->local_size(),
                                 " ranks of a host, and of every other's; ranks are processes on CPUs, numbered host "
                                 "by host. Hint: 1 turns it off."));
}

// ZeRO++: fewer bytes over networks, at stage 3.
void State::use_slow_links(GroupContext& context) {
  const auto& zero = settings_.zero;
  if (stage_ != 3 || comm_->size() == 1) return;
  const auto without_effect = [&](const char* key, const char* why) {
    if (comm_->rank() == 0)
      base::log(LogLevel::Info, base::join("zero_optimization.", key, " has no effect here: ", why));
  };
  const bool over_network = device_.is_cpu() && comm_->quantizes();
  const char* const nothing_to_save = "nothing is sent over a network between CPUs";
  if (zero.hpz_ranks > 1) {
    if (comm_->reads_in_place()) {
      without_effect("zero_hpz_partition_size", "all ranks share a host, where parameters are read in place");
    } else {
      neighbours_ = comm_->neighbours(zero.hpz_ranks);
      context.neighbours = neighbours_.get();
    }
  }
  context.quantize_trainable = over_network && zero.quantized_weights;
  context.quantize_frozen = over_network && (zero.quantized_weights || zero.quantized_nontrainable_weights);
  context.gradient_bits = over_network && zero.quantized_gradients ? 4 : 0;
  if (over_network) return;
  if (zero.quantized_weights) without_effect("zero_quantized_weights", nothing_to_save);
  if (zero.quantized_nontrainable_weights) without_effect("zero_quantized_nontrainable_weights", nothing_to_save);
  if (zero.quantized_gradients) without_effect("zero_quantized_gradients", nothing_to_save);
}

void State::check_agreement(const std::vector<ModelParameter>& parameters, const std::vector<Unit>& units) {
  if (comm_->size() == 1) return;
  std::string configuration, layout;
  for (const auto& [key, value] : options_.effective()) configuration += key + " = " + value + "\n";
  for (const char* name : {"ZERO_TRACE", "ZERO_TRACE_STEPS"})
    if (const char* value = std::getenv(name)) configuration += base::join("environment ", name, " = ", value, "\n");
  for (const auto& unit : units) {
    layout += "unit " + unit.name + "\n";
    for (const auto i : unit.parameters) {
      const auto& p = parameters[i];
      layout += base::join("parameter ", p.name, " ", p.tensor.sizes(), " ", c10::toString(p.tensor.scalar_type()),
                           device_.is_cpu() ? "" : " on a GPU", unit.trainable ? "" : " frozen", "\n");
    }
  }
  for (const auto& buffer : model_->named_buffers())
    layout += base::join("buffer ", buffer.key(), " ", buffer.value().sizes(), " ",
                         c10::toString(buffer.value().scalar_type()), "\n");
  auto text = disagreement(*comm_, "[Engine] the configurations", configuration);
  if (text.empty()) text = disagreement(*comm_, "[Engine] the models", layout);
  if (!text.empty())
    throw ConfigError(text + ". Hint: every rank has to run the same program with the same configuration.");
}

// Deferred parameters are materialised in the order of their initialisers, and a group is taken
// over as soon as its last member has data: never more than the shards and the units at work.
void State::adopt_values() {
  std::vector<at::Tensor> deferred;
  std::vector<std::size_t> group_of;
  std::vector<std::size_t> missing(groups_.size(), 0);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const auto& member : groups_[g]->members()) {
      if (!torch_hooks::is_deferred(member.tensor)) continue;
      deferred.push_back(member.tensor);
      group_of.push_back(g);
      ++missing[g];
    }
  }
  const auto awaited = missing;
  for (const auto& buffer : model_->buffers()) {
    if (!torch_hooks::is_deferred(buffer)) continue;
    deferred.push_back(buffer);
    group_of.push_back(groups_.size());
  }
  std::string hashes;
  torch_hooks::AllocationObserver::Pause pause;
  if (!deferred.empty() && comm_->size() > 1) {
    // libtorch seeds each process at random: rank 0's generator stands for all.
    const auto states =
        comm_->all_gather_bytes(comm_->rank() == 0 ? torch_hooks::deferred_generators(deferred) : std::string());
    torch_hooks::set_deferred_generators(deferred, states[0]);
  }
  torch_hooks::replay_deferred(deferred, [&](std::size_t i) {
    const auto g = group_of[i];
    if (g == groups_.size() || --missing[g] != 0) return;
    hashes += std::to_string(g) + " " + std::to_string(groups_[g]->adopt(/*broadcast=*/false)) + "\n";
  });
  if (!deferred.empty() && comm_->size() > 1) {
    const auto text = disagreement(*comm_, "[Engine] the initial values of deferred parameters", hashes);
    if (!text.empty())
      throw ConfigError(text +
                        ". Hint: the model reads or draws while it is built; call torch::manual_seed with the same "
                        "seed on every rank before zero::build.");
  }
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (awaited[g] == 0) groups_[g]->adopt(/*broadcast=*/true);
}

void State::adopt_buffers() {
  at::NoGradGuard no_grad;
  for (auto& item : model_->named_buffers()) {
    auto& buffer = item.value();
    if (!buffer.defined() || buffer.numel() == 0) continue;
    if (settings_.buffer_dtype && buffer.is_floating_point())
      buffer.set_data(buffer.to(scalar_type(*settings_.buffer_dtype)));
    if (!buffer.is_contiguous()) buffer.set_data(buffer.contiguous());  // broadcast and saved as they lie
    if (comm_->size() > 1) {
      auto flat = buffer.detach().contiguous().view({-1}).view(at::kByte).clone();
      comm_->broadcast(flat, 0)->wait();
      buffer.detach().copy_(flat.view(buffer.scalar_type()).view(buffer.sizes()));
    }
    ledger_->book(step::Tier::Device, step::Purpose::Other, static_cast<std::int64_t>(buffer.nbytes()));
    if (comm_->rank() == 0 && !can_be_saved(buffer.scalar_type()))
      base::log(LogLevel::Warning,
                base::join("[Engine] buffer ", item.key(), " has the type ", c10::toString(buffer.scalar_type()),
                           ", which checkpoints cannot hold: save_checkpoint will refuse. Hint: use a float, integer "
                           "or bool tensor."));
  }
  if (!activations_) return;
  std::vector<const void*> resident;
  for (const auto& buffer : model_->buffers())
    if (buffer.defined() && buffer.has_storage()) resident.push_back(buffer.storage().unsafeGetStorageImpl());
  activations_->set_resident(resident);
}

void State::make_update() {
  std::vector<ParamGroup*> all;
  for (const auto& group : groups_) all.push_back(group.get());
  update_.reset();  // its buffers make room
  update_ = std::make_unique<StagedUpdate>(std::move(all), tiers_->update_policy(optimizer_->num_slots()), *ledger_,
                                           trace_.trace());
}

// Backward reaches the last unit first; the root (embeddings, the head) comes last.
void State::order_reductions() {
  reduce_order_.clear();
  for (auto it = groups_.rbegin(); it != groups_.rend(); ++it)
    if ((*it)->trainable() && !(*it)->root()) reduce_order_.push_back(it->get());
  for (const auto& group : groups_)
    if (group->trainable() && group->root()) reduce_order_.push_back(group.get());
}

void State::attach() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    auto& group = *groups_[g];
    for (std::size_t i = 0; i < group.members().size(); ++i) {
      const auto& tensor = group.members()[i].tensor;
      members_.push_back({static_cast<int>(g), i});
      torch_hooks::intercept(tensor, this, static_cast<int>(members_.size()) - 1);
      tensor.mutable_grad() = at::Tensor();  // of a backward before the Engine was made
      torch_hooks::set_gradient_hook(tensor, [this, g, i] { on_gradient(static_cast<int>(g), i); });
    }
  }
  order_reductions();
  std::vector<step::GatherUnit*> all;
  for (const auto& group : groups_) all.push_back(group.get());
  const bool tell = settings_.zero.log_trace_cache_warnings;
  prefetcher_ = std::make_unique<step::Prefetcher>(
      std::move(all),
      step::Prefetcher::Policy{.ahead = settings_.zero.prefetch_bucket_size,
                               .max_live = settings_.zero.max_live_parameters,
                               .max_reuse = settings_.zero.max_reuse_distance,
                               .fetch_ahead = tiers_->fetch_ahead()},
      [tell](const std::string& group) {
        if (tell) base::log(LogLevel::Warning, "the order of groups differs from the one expected, at group " + group);
      });
  torch_hooks::BlockAllocator source;
  if (blocks_ != nullptr)
    source = {[blocks = blocks_](std::size_t bytes) { return blocks->take(static_cast<std::int64_t>(bytes)); },
              [blocks = blocks_](void* block) { blocks->give(block); }};
  observer_ = std::make_unique<torch_hooks::AllocationObserver>(
      [ledger = ledger_](std::int64_t bytes) { ledger->book(step::Tier::Device, step::Purpose::Activations, bytes); },
      std::move(source));
}

void State::keep_activations() {
  activations::ActivationStore::Setup setup;
  setup.settings = settings_.activations;
  const auto& aio = settings_.aio;
  setup.io = {.block_size = aio.block_size,
              .queue_depth = aio.queue_depth,
              .threads = aio.threads,
              .single_submit = aio.single_submit,
              .overlap_events = aio.overlap_events};
  setup.device = device_;
  setup.ledger = ledger_;
  setup.who = base::join("rank ", comm_->rank(), "/", comm_->size());
  if (comm_->rank() == 0) setup.profile = [](const std::string& line) { base::log(LogLevel::Info, line); };
  activations_ = activations::ActivationStore::create(std::move(setup));
}

}  // namespace zero::engine
