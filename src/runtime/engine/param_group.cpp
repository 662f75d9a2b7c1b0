// Resting states, gathering and publishing of a group; gradients are in param_group_gradients.cpp.
#include "engine/param_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <xxhash.h>

#include <algorithm>

#include "base/check.h"
#include "step/stage_rules.h"
#include "step/tiers.h"
#include "torch_hooks/allocation_observer.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {
namespace {

std::vector<std::int64_t> numels_of(const std::vector<ModelParameter>& members) {
  std::vector<std::int64_t> result;
  for (const auto& member : members) result.push_back(member.tensor.numel());
  return result;
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

}  // namespace

ParamGroup::ParamGroup(const GroupContext& context, const Unit& unit, std::vector<ModelParameter> members,
                       const std::vector<int>& parameter_groups)
    : context_(context),
      name_(unit.name),
      root_(unit.root),
      trainable_(unit.trainable),
      sharded_(step::shards_parameters(context.stage, unit.persistent, context.comm->size(),
                                       context.parameter_tier != step::Tier::Device)),
      members_(std::move(members)),
      layout_(sharding::ShardLayout::of_group(numels_of(members_), context.comm->size(),
                                              static_cast<std::int64_t>(at::elementSize(context.recipe.parameter)),
                                              context.device.is_cpu())),
      shard_begin_(context.comm->rank() * layout_.shard_numel()),
      autograd_(members_, context_, name_, trainable_),
      taken_(members_.size()),
      runs_(parameter_groups) {
  owned_ = step::shards_optimizer(context_.stage) ? Owned{shard_begin_, layout_.shard_numel()}
                                                  : Owned{0, layout_.padded_numel()};
  torch_hooks::AllocationObserver::Pause pause;
  if (context_.sums != nullptr)  // of a frozen group, too, which may be unfrozen
    first_sum_ = context_.sums->reserve(context_.direct_gradients ? static_cast<int>(members_.size()) : 1);
  make_parameters();
  if (trainable_) make_states();
  cut_runs();
}

void ParamGroup::set_missed_steps(std::vector<std::int64_t> missed) {
  runs_.set_missed_steps(std::move(missed));
  cut_runs();
}

void ParamGroup::make_parameters() {
  const auto resting = sharded_ ? layout_.shard_numel() : layout_.padded_numel();
  const auto dtype = context_.recipe.parameter;
  const auto tier = sharded_ ? context_.parameter_tier : step::Tier::Device;
  if (tier == step::Tier::File) {
    parameters_ = {context_.parameter_file, resting, dtype};
  } else {
    if (sharded_ && context_.device.is_cpu() && context_.comm->size() > 1)
      shared_ = context_.comm->share(resting, dtype);
    at::Tensor vector;
    if (shared_)
      vector = shared_->shard();
    else if (tier == step::Tier::Host && !context_.device.is_cpu())
      vector = at::empty({resting}, at::TensorOptions().dtype(dtype).pinned_memory(true));
    else
      vector = allocate(resting, dtype);
    parameters_ = {tier, vector.zero_()};
  }
  book_bytes(parameters_.bytes(), tier, step::Purpose::Parameters);
  if (!sharded_ || shared_) return;
  from_shards_.emplace(ShardGather::Ways{.of = name_,
                                         .comm = context_.comm,
                                         .neighbours = context_.neighbours,
                                         .bits = gather_bits(),
                                         .pool = context_.gather_pool},
                       layout_.padded_numel(), dtype);
  book_bytes(from_shards_->second_bytes(), step::Tier::Device, step::Purpose::Parameters);
}

void ParamGroup::make_states() {
  at::Tensor alias;
  if (!context_.recipe.separate_master() && parameters_.tier() == step::Tier::Device && !context_.delayed)
    alias = parameters_.vector().narrow(0, parameters_begin(), owned_.numel);
  states_ = {context_.places, context_.device, owned_.numel, context_.num_slots, alias};
  for (const auto tier : {step::Tier::Device, step::Tier::Host, step::Tier::File})
    for (const auto purpose : {step::Purpose::MasterParameters, step::Purpose::OptimizerStates})
      book_bytes(states_.bytes(tier, purpose), tier, purpose);
  const bool offloaded = context_.places.offloads();
  if (!context_.direct_gradients) {
    // A reduced shard goes straight to where the update reads it, if that is in reach of the reduction.
    const bool on_host = offloaded && context_.stage >= 2 && context_.device.is_cpu();
    const auto kept = step::shards_gradients(context_.stage) ? layout_.shard_numel() : layout_.padded_numel();
    gradients_tier_ = on_host ? step::Tier::Host : step::Tier::Device;
    gradients_ = book(allocate(kept, context_.recipe.gradient), gradients_tier_, step::Purpose::Gradients);
    gradients_.zero_();
    if (on_host) {
      if (context_.delayed) {
        pending_gradients_ = book(allocate(kept, context_.recipe.gradient), step::Tier::Host, step::Purpose::Gradients);
        pending_gradients_.zero_();  // sums in place leave the padding alone
      }
      return make_next();
    }
  }
  if (!offloaded) return;
  const auto on_host = at::TensorOptions().dtype(context_.recipe.gradient).pinned_memory(!context_.device.is_cpu());
  for (auto* gradients : {&offloaded_gradients_, &pending_gradients_})
    if (gradients == &offloaded_gradients_ || context_.delayed)
      *gradients = book(at::zeros({layout_.shard_numel()}, on_host), step::Tier::Host, step::Purpose::Gradients);
  make_next();
}

void ParamGroup::make_next() {
  if (!context_.delayed) return;
  const auto on_host = at::TensorOptions().dtype(parameters_.dtype()).pinned_memory(!context_.device.is_cpu());
  next_parameters_ = book(at::zeros({owned_.numel}, on_host), step::Tier::Host, step::Purpose::Parameters);
}

void ParamGroup::hand_over_gradients() {
  runs_.count(autograd_);
  if (pending_gradients_.defined())
    std::swap(pending_gradients_, offloaded_gradients_.defined() ? offloaded_gradients_ : gradients_);
}

void* ParamGroup::next_parameters(std::int64_t begin) const {
  return static_cast<char*>(next_parameters_.data_ptr()) +
         begin * static_cast<std::int64_t>(next_parameters_.element_size());
}

void ParamGroup::adopt_next() {
  if (!next_parameters_.defined()) return;
  at::NoGradGuard no_grad;
  observe::TraceSpan copy(*context_.trace, parameters_.in_file() ? observe::TraceKind::Store : observe::TraceKind::Copy,
                          name_, bytes_of(next_parameters_));
  parameters_.write(parameters_begin(), next_parameters_);
  tell_changed();
}

ParamGroup::~ParamGroup() {
  try {
    cancel_fetch();
  } catch (const std::exception&) {
    // Its file failed: whoever needed the shard was told.
  }
  cancel_bookings({});
}

void ParamGroup::become_trainable(const std::function<void()>& then) {
  const at::NoGradGuard no_grad;
  const torch_hooks::AllocationObserver::Pause pause;
  if (context_.places.in_file()) {
    const auto unfrozen = std::find_if(members_.begin(), members_.end(),
                                       [](const ModelParameter& member) { return member.tensor.requires_grad(); });
    throw ConfigError("[Engine] requires_grad of parameter " + unfrozen->name +
                      " became true, but the Engine took it frozen, and the file of optimizer states was made without "
                      "it. Hint: let it require grad when the Engine is made, and freeze it afterwards: "
                      "requires_grad_(false) between steps.");
  }
  const auto before = booked_;
  const auto set = [this](bool trainable) {
    trainable_ = trainable;
    autograd_.set_trainable(trainable);
    if (from_shards_) from_shards_->set_bits(gather_bits());
  };
  try {
    make_states();
    const auto values = parameters_.read(parameters_begin(), owned_.numel);
    states_.write(GroupStates::kMaster, 0, values.to(at::kFloat));
    states_.fill_slots(context_.slot_initial_value);
    // An update on its way knows nothing of this group.
    if (next_parameters_.defined()) next_parameters_.copy_(values);
    set(true);
    then();
  } catch (...) {
    set(false);
    states_ = {};
    gradients_ = offloaded_gradients_ = pending_gradients_ = next_parameters_ = at::Tensor();
    cancel_bookings(before);
    throw;
  }
}

at::Tensor ParamGroup::allocate(std::int64_t numel, at::ScalarType dtype) const {
  if (context_.device.is_cpu()) return context_.comm->allocate(numel, dtype);
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(context_.device));
}

void ParamGroup::book_bytes(std::int64_t bytes, step::Tier tier, step::Purpose purpose) {
  context_.ledger->book(tier, purpose, bytes);
  booked_[MemoryReport::index(tier)][MemoryReport::index(purpose)] += bytes;
  if (tier == step::Tier::File && context_.checks_files)
    book_bytes(step::checksum_bytes(bytes), step::Tier::Host, step::Purpose::Other);
}

void ParamGroup::cancel_bookings(const Bytes& left) {
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t)
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (booked_[t][p] != left[t][p])
        context_.ledger->book(static_cast<step::Tier>(t), static_cast<step::Purpose>(p), left[t][p] - booked_[t][p]);
  booked_ = left;
}

at::Tensor ParamGroup::book(at::Tensor tensor, step::Tier tier, step::Purpose purpose) {
  book_bytes(bytes_of(tensor), tier, purpose);
  return tensor;
}

// The resting parameters have new values. A graph that saved the old ones is refused by autograd from now on.
void ParamGroup::tell_changed() {
  for (const auto& member : members_)
    if (!member.tensor.is_inference()) member.tensor.unsafeGetTensorImpl()->bump_version();
  if (shared_) shared_->publish();
  if (from_shards_) from_shards_->forget();
}

at::Tensor ParamGroup::own_part(const at::Tensor& whole) const {
  return whole.narrow(0, shard_begin_, layout_.shard_numel());
}

void ParamGroup::point_members_into(const at::Tensor& flat) {
  const auto size = static_cast<std::int64_t>(flat.element_size());
  for (std::size_t i = 0; i < members_.size(); ++i)
    torch_hooks::gather_storage(storages_[i], flat, layout_.parameter_offset(i) * size);
}

std::uint64_t ParamGroup::adopt(bool broadcast) {
  at::NoGradGuard no_grad;
  torch_hooks::AllocationObserver::Pause pause;
  auto values = at::zeros({layout_.padded_numel()}, at::kFloat);
  for (std::size_t i = 0; i < members_.size(); ++i)
    values.narrow(0, layout_.parameter_offset(i), members_[i].tensor.numel())
        .copy_(members_[i].tensor.detach().reshape({-1}));
  if (broadcast && context_.comm->size() > 1 && values.numel() > 0) context_.comm->broadcast(values, 0)->wait();
  const auto hash = XXH3_64bits(values.const_data_ptr(), static_cast<std::size_t>(bytes_of(values)));
  parameters_.write(0, sharded_ ? own_part(values) : values);
  if (trainable_) {
    states_.write(GroupStates::kMaster, 0, values.narrow(0, owned_.begin, owned_.numel));
    states_.fill_slots(context_.slot_initial_value);
  }
  tell_changed();
  values = at::Tensor();
  const auto size = static_cast<std::int64_t>(at::elementSize(parameters_.dtype()));
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto& tensor = members_[i].tensor;
    const auto sizes = tensor.sizes().vec();
    // The parameter's TensorImpl stays. So does its storage where the dtype does, for views that the program holds;
    // else both change once, here.
    const auto bytes = static_cast<std::size_t>(tensor.numel() * size);
    if (bytes > 0 && tensor.scalar_type() == context_.recipe.parameter && tensor.is_contiguous() &&
        tensor.storage_offset() == 0 && tensor.storage().nbytes() == bytes) {
      if (!sharded_)
        torch_hooks::gather_storage(tensor.storage(), parameters_.vector(), layout_.parameter_offset(i) * size);
      continue;
    }
    tensor.set_data(sharded_ ? torch_hooks::without_data(sizes, context_.recipe.parameter, context_.device)
                             : torch_hooks::alias(parameters_.vector(), layout_.parameter_offset(i) * size, sizes,
                                                  context_.recipe.parameter));
  }
  for (const auto& member : members_) storages_.push_back(member.tensor.storage());
  if (sharded_) {
    residency_ = Residency::Gathered;  // so that release() sets the guard
    release();
  }
  return hash;
}

void ParamGroup::abandon() {
  if (sharded_ && !storages_.empty()) {  // else nothing was adopted
    try {
      release();
    } catch (const std::exception&) {
      // A gather in flight failed with its communicator: the data are gone either way.
    }
    for (std::size_t i = 0; i < storages_.size(); ++i)
      torch_hooks::release_storage(storages_[i], "parameter " + members_[i].name +
                                                     " was sharded, and its Engine has ended, which had its values. "
                                                     "Hint: save a checkpoint or full_state_dict() "
                                                     "before a stage 3 Engine ends, and load it into a new model");
  }
}

std::int64_t ParamGroup::gathered_bytes() const {
  return layout_.padded_numel() * static_cast<std::int64_t>(at::elementSize(parameters_.dtype()));
}

void ParamGroup::begin_fetch() {
  if (!parameters_.in_file() || residency_ != Residency::Sharded || fetch_work_ || parameters_.numel() == 0) return;
  drop_fetched();  // of a gather that failed
  fetch_trace_.begin(*context_.trace, observe::TraceKind::Fetch);
  fetched_ = context_.parameter_file->file().buffer(parameters_.transfer_bytes(parameters_.numel()));
  context_.ledger->book(step::Tier::Host, step::Purpose::GatherBuffers, fetched_.bytes());
  fetch_work_ = parameters_.begin_read(0, parameters_.numel(), fetched_.data());
}

void ParamGroup::cancel_fetch() {
  if (!fetch_work_) return;
  fetch_work_->wait();
  fetch_work_.reset();
  fetch_trace_.end(name_, parameters_.bytes());
  drop_fetched();
}

void ParamGroup::drop_fetched() {
  if (fetched_.data() == nullptr) return;
  context_.ledger->book(step::Tier::Host, step::Purpose::GatherBuffers, -fetched_.bytes());
  fetched_ = storage::IoBuffer();
}

// Where the device's collectives can read it.
at::Tensor ParamGroup::shard_to_gather() {
  const auto to_device = [&](const at::Tensor& shard, bool non_blocking) {
    if (shard.device() == context_.device) return shard;
    observe::TraceSpan copy(*context_.trace, observe::TraceKind::Copy, name_, bytes_of(shard));
    return shard.to(context_.device, non_blocking);
  };
  if (!parameters_.in_file()) return to_device(parameters_.vector(), /*non_blocking=*/true);
  begin_fetch();
  const auto options = at::TensorOptions().dtype(parameters_.dtype());
  if (!fetch_work_) return at::empty({0}, options);
  {
    observe::TraceSpan wait(*context_.trace, observe::TraceKind::FetchWait, name_);
    fetch_work_->wait();
  }
  fetch_work_.reset();
  fetch_trace_.end(name_, parameters_.bytes());
  return to_device(at::from_blob(fetched_.data(), {parameters_.numel()}, options), /*non_blocking=*/false);
}

void ParamGroup::wait_for_gather() {
  {
    observe::TraceSpan wait(*context_.trace, observe::TraceKind::GatherWait, name_);
    gather_work_->wait();
  }
  gathered_mark_.hold();
  gather_work_.reset();
  drop_fetched();
  gather_trace_.end(name_, gathered_bytes());
}

void ParamGroup::read_in_place() {
  gather_trace_.begin(*context_.trace, observe::TraceKind::GatherInPlace);
  {
    observe::TraceSpan wait(*context_.trace, observe::TraceKind::GatherWait, name_);
    context_.comm->gather(*shared_);
  }
  gather_trace_.end(name_, gathered_bytes());
}

void ParamGroup::begin_gather(bool exact) {
  ZERO_CHECK(residency_ == Residency::Sharded, "group ", name_, " gathered twice");
  const auto shard = shard_to_gather();
  gather_trace_.begin(*context_.trace, observe::TraceKind::Gather);
  gathered_ = context_.gather_pool->take(layout_.padded_numel(), context_.recipe.parameter);
  {
    // After what the current stream holds: the buffer's last use is among it.
    const gpu::SideStream::Scope side(*context_.gather_stream);
    gather_work_ = from_shards_->begin(gathered_, shard, exact);
    gathered_mark_.set(context_.device);
  }
  residency_ = Residency::Gathering;
}

void ParamGroup::finish_gather() {
  if (residency_ == Residency::Gathered) return;
  if (shared_) {
    read_in_place();
    point_members_into(shared_->whole());
    become_whole();
    return;
  }
  if (residency_ == Residency::Sharded) begin_gather();
  wait_for_gather();
  point_members_into(gathered_);
  become_whole();
}

void ParamGroup::become_whole() {
  if (residency_ == Residency::Gathered) return;
  residency_ = Residency::Gathered;
  whole_trace_.begin(*context_.trace, observe::TraceKind::Whole);
}

void ParamGroup::gather_copy() {
  if (from_shards_ &&
      from_shards_->lossy()) {  // what is read or written here are the values, not what others compute with
    release();
    begin_gather(/*exact=*/true);
  }
  if (!shared_ || gathered_.defined()) return finish_gather();
  read_in_place();
  gathered_ = context_.gather_pool->take(layout_.padded_numel(), context_.recipe.parameter);
  gathered_.copy_(shared_->whole());
  point_members_into(gathered_);
  become_whole();
}

void ParamGroup::release() {
  if (!sharded_ || residency_ == Residency::Sharded) return;
  if (residency_ == Residency::Gathering) wait_for_gather();
  for (std::size_t i = 0; i < members_.size(); ++i)
    torch_hooks::release_storage(storages_[i], "parameter " + members_[i].name + " (group " + name_ +
                                                   ") was read past the dispatcher while it is sharded. Hint: open "
                                                   "engine.gathered_parameters() around code that takes raw pointers.");
  if (gathered_.defined()) context_.gather_pool->put(std::move(gathered_));
  gathered_ = at::Tensor();
  residency_ = Residency::Sharded;
  whole_trace_.end(name_, gathered_bytes());
}

at::Tensor ParamGroup::whole() const {
  ZERO_CHECK(residency_ == Residency::Gathered, "group ", name_, " is not gathered");
  return gathered_.defined() ? gathered_ : shared_ ? shared_->whole() : parameters_.vector();
}

void ParamGroup::write_back() {
  at::NoGradGuard no_grad;
  auto flat = whole();
  if (flat.numel() == 0) return;
  if (context_.comm->size() > 1) context_.comm->broadcast(flat, 0)->wait();
  if (sharded_) parameters_.write(0, own_part(flat));
  tell_changed();
  if (!trainable_) return;
  // Untouched elements keep the bits of their master that the compute dtype does not show.
  for (const auto& segment : states_.segments()) {
    if (segment.aliases_master) continue;
    const auto master = states_.read(GroupStates::kMaster, segment.begin, segment.numel);
    const auto mine = flat.narrow(0, owned_.begin + segment.begin, segment.numel).to(master.device());
    const auto changed = mine.ne(master.to(mine.scalar_type()));
    states_.write(GroupStates::kMaster, segment.begin, at::where(changed, mine.to(at::kFloat), master));
  }
}

void ParamGroup::begin_publish() {
  if (!trainable_ || !step::publishes_parameters(context_.stage, sharded_, context_.comm->size()) ||
      parameters_.numel() == 0)
    return;
  publish_trace_.begin(*context_.trace, observe::TraceKind::Publish);
  publish_work_ = context_.comm->all_gather(parameters_.vector(), own_part(parameters_.vector()));
}

void ParamGroup::finish_publish() {
  if (!publish_work_) return;
  {
    observe::TraceSpan wait(*context_.trace, observe::TraceKind::PublishWait, name_);
    publish_work_->wait();
  }
  publish_work_.reset();
  publish_trace_.end(name_, gathered_bytes());
}

void ParamGroup::refresh_parameters() {
  at::NoGradGuard no_grad;
  if (trainable_)
    for (const auto& segment : states_.segments())
      if (!segment.aliases_master)
        parameters_.write(parameters_begin() + segment.begin,
                          states_.read(GroupStates::kMaster, segment.begin, segment.numel));
  tell_changed();
}

void ParamGroup::update(optim::ShardedOptimizer& optimizer, float factor, const GroupStates::Segment& segment,
                        bool to_next) {
  observe::TraceSpan update(*context_.trace, observe::TraceKind::Update, name_,
                            segment.numel * states_.num_states() * static_cast<std::int64_t>(sizeof(float)));
  UpdatePlace place{};
  place.travels = to_next;
  place.master = segment.stores[GroupStates::kMaster].vector().data_ptr<float>();
  for (int k = 0; k < context_.num_slots; ++k) place.slots[k] = segment.stores[1 + k].vector().data_ptr<float>();
  if (to_next)
    place.parameter = next_parameters(segment.begin);
  else if (!segment.aliases_master)
    place.parameter =
        static_cast<char*>(parameters_.vector().data_ptr()) +
        (parameters_begin() + segment.begin) * static_cast<std::int64_t>(at::elementSize(parameters_.dtype()));
  this->update(optimizer, factor, segment.begin, segment.numel, place);
}

void ParamGroup::update(optim::ShardedOptimizer& optimizer, float factor, std::int64_t begin, std::int64_t numel,
                        const UpdatePlace& place) {
  const auto end = begin + numel;
  const auto width = static_cast<std::int64_t>(at::elementSize(parameters_.dtype()));
  const auto update = [&](std::int64_t at, std::int64_t count, int parameter_group, std::int64_t missed_steps,
                          const void* gradient) {
    optim::Span span{};
    span.master = place.master + (at - begin);
    for (int k = 0; k < context_.num_slots; ++k) span.slots[k] = place.slots[k] + (at - begin);
    if (place.parameter != nullptr) span.parameter = static_cast<char*>(place.parameter) + (at - begin) * width;
    span.parameter_dtype = compute_dtype();
    if (parameter_group == UpdateRuns::kFrozen) {
      if (place.travels) kernels::convert(span.parameter, compute_dtype(), span.master, kernels::Dtype::F32, count);
      return;
    }
    span.numel = count;
    span.parameter_group = parameter_group;
    span.missed_steps = missed_steps;
    span.gradient = gradient;
    span.gradient_dtype = dtype_of(context_.recipe.gradient);
    optimizer.update(span, factor);
  };
  if (context_.direct_gradients && !offloaded_gradients_.defined()) {
    const auto grads = at::TensorOptions().dtype(context_.recipe.gradient).device(context_.device);
    for (const auto& piece : layout_.pieces(owned_.begin + begin, numel)) {
      const auto& grad = autograd_.kept(piece.parameter);
      // No gradient counts as zero: moments decay and weight decay applies, at every stage alike.
      at::Tensor zeros;
      if (!grad.defined()) zeros = at::zeros({piece.numel}, grads);
      update(begin + piece.range_begin, piece.numel, runs_.group_of(piece.parameter, autograd_),
             missed_steps()[piece.parameter],
             grad.defined() ? static_cast<const char*>(grad.const_data_ptr()) +
                                  piece.parameter_begin * static_cast<std::int64_t>(grad.element_size())
                            : zeros.const_data_ptr());
    }
    return;
  }
  // At stage 0 the whole gradient is owned; stage 1 keeps whole gradients of which only the own part is reduced.
  const auto& kept = pending_gradients_.defined()     ? pending_gradients_
                     : offloaded_gradients_.defined() ? offloaded_gradients_
                                                      : gradients_;
  const auto shift = kept.numel() == owned_.numel ? 0 : owned_.begin;
  for (const auto& run : runs_.runs()) {
    const auto first = std::max(run.begin, begin), last = std::min(run.begin + run.numel, end);
    if (first < last)
      update(first, last - first, run.parameter_group, run.missed_steps,
             static_cast<const char*>(kept.const_data_ptr()) +
                 (shift + first) * static_cast<std::int64_t>(kept.element_size()));
  }
}

at::Tensor ParamGroup::state_shard(int state) const {
  return states_.read(state, owned_.numel == layout_.shard_numel() ? 0 : shard_begin_, layout_.shard_numel());
}

}  // namespace zero::engine
