// Resting states, gathering and publishing of a group; gradients are in param_group_gradients.cpp.
#include "engine/param_group.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <xxhash.h>

#include "base/check.h"
#include "torchglue/allocation_observer.h"
#include "torchglue/storage_access.h"

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
      sharded_(context.stage == 3 && context.comm->size() > 1 && !unit.persistent),
      members_(std::move(members)),
      // 64 bytes: what the widest vector instructions and every kernel of libtorch like; 256 on a GPU.
      layout_(
          numels_of(members_), context.comm->size(),
          (context.device.is_cpu() ? 64 : 256) / static_cast<std::int64_t>(at::elementSize(context.recipe.parameter))),
      shard_begin_(context.comm->rank() * layout_.shard_numel()),
      taken_(members_.size()),
      direct_bytes_(members_.size()),
      direct_squares_(members_.size(), -1.0),
      direct_data_(members_.size()),
      parameter_groups_(parameter_groups) {
  const bool own_all = context_.stage == 0;
  owned_ = own_all ? Owned{0, layout_.padded_numel()} : Owned{shard_begin_, layout_.shard_numel()};
  torchglue::AllocationObserver::Pause pause;
  const auto resting = sharded_ ? layout_.shard_numel() : layout_.padded_numel();
  if (sharded_ && context_.device.is_cpu()) shared_ = context_.comm->share(resting, context_.recipe.parameter);
  parameters_ =
      book(shared_ ? shared_->shard() : allocate(resting, context_.recipe.parameter), memory::Purpose::Parameters);
  parameters_.zero_();
  if (sharded_ && !shared_) {
    from_shards_.emplace(ShardGather::Ways{.comm = context_.comm,
                                           .neighbours = context_.neighbours,
                                           .bits = trainable_ ? (context_.quantize_trainable ? 8 : 0)
                                                              : (context_.quantize_frozen ? 8 : 0),
                                           .pool = context_.gather_pool},
                         layout_.padded_numel(), context_.recipe.parameter);
    book_bytes(from_shards_->second_bytes(), memory::Purpose::Parameters);
  }
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(context_.device);
  if (trainable_) {
    if (context_.sums != nullptr)
      first_sum_ = context_.sums->reserve(context_.direct_gradients ? static_cast<int>(members_.size()) : 1);
    if (context_.recipe.separate_master())
      master_ = book(at::zeros({owned_.numel}, floats), memory::Purpose::MasterParameters);
    else
      master_ = sharded_ ? parameters_ : parameters_.narrow(0, owned_.begin, owned_.numel);
    for (int i = 0; i < context_.num_slots; ++i)
      slots_[i] = book(at::full({owned_.numel}, context_.slot_initial_value, floats), memory::Purpose::OptimizerStates);
    if (!context_.direct_gradients) {
      const auto kept = context_.stage >= 2 ? layout_.shard_numel() : layout_.padded_numel();
      gradients_ = book(allocate(kept, context_.recipe.gradient), memory::Purpose::Gradients);
      gradients_.zero_();
    }
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    for (const auto& piece : layout_.pieces(owned_.begin, owned_.numel)) {
      if (piece.parameter != i) continue;
      const auto end = piece.range_begin + piece.numel;
      if (!runs_.empty() && runs_.back().parameter_group == parameter_groups_[i])
        runs_.back().numel = end - runs_.back().begin;  // the padding between is zero and stays zero
      else
        runs_.push_back({piece.range_begin, piece.numel, parameter_groups_[i]});
    }
  }
}

ParamGroup::~ParamGroup() {
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
    if (booked_[p] != 0) context_.ledger->book(memory::Tier::Device, static_cast<memory::Purpose>(p), -booked_[p]);
}

at::Tensor ParamGroup::allocate(std::int64_t numel, at::ScalarType dtype) const {
  if (context_.device.is_cpu()) return context_.comm->allocate(numel, dtype);
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(context_.device));
}

void ParamGroup::book_bytes(std::int64_t bytes, memory::Purpose purpose) {
  context_.ledger->book(memory::Tier::Device, purpose, bytes);
  booked_[MemoryReport::index(purpose)] += bytes;
}

at::Tensor ParamGroup::book(at::Tensor tensor, memory::Purpose purpose) {
  book_bytes(bytes_of(tensor), purpose);
  return tensor;
}

// The resting parameters have new values.
void ParamGroup::tell_changed() {
  if (shared_) shared_->publish();
  if (from_shards_) from_shards_->forget();
}

at::Tensor ParamGroup::own_part(const at::Tensor& whole) const {
  return whole.narrow(0, shard_begin_, layout_.shard_numel());
}

void ParamGroup::point_members_into(const at::Tensor& flat) {
  const auto size = static_cast<std::int64_t>(flat.element_size());
  for (std::size_t i = 0; i < members_.size(); ++i)
    torchglue::gather_storage(storages_[i], flat, layout_.parameter_offset(i) * size);
}

std::uint64_t ParamGroup::adopt(bool broadcast) {
  at::NoGradGuard no_grad;
  torchglue::AllocationObserver::Pause pause;
  auto values = at::zeros({layout_.padded_numel()}, at::kFloat);
  for (std::size_t i = 0; i < members_.size(); ++i)
    values.narrow(0, layout_.parameter_offset(i), members_[i].tensor.numel())
        .copy_(members_[i].tensor.detach().reshape({-1}));
  if (broadcast && context_.comm->size() > 1 && values.numel() > 0) context_.comm->broadcast(values, 0)->wait();
  const auto hash = XXH3_64bits(values.const_data_ptr(), static_cast<std::size_t>(bytes_of(values)));
  if (trainable_ && context_.recipe.separate_master()) master_.copy_(values.narrow(0, owned_.begin, owned_.numel));
  parameters_.copy_(sharded_ ? own_part(values) : values);
  tell_changed();
  values = at::Tensor();
  const auto size = static_cast<std::int64_t>(parameters_.element_size());
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto& tensor = members_[i].tensor;
    const auto sizes = tensor.sizes().vec();
    // The parameter's TensorImpl stays; its dtype and storage change once, here.
    tensor.set_data(
        sharded_ ? torchglue::without_data(sizes, context_.recipe.parameter, parameters_.device())
                 : torchglue::alias(parameters_, layout_.parameter_offset(i) * size, sizes, context_.recipe.parameter));
  }
  for (const auto& member : members_) storages_.push_back(member.tensor.storage());
  if (sharded_) {
    residency_ = Residency::Gathered;  // so that release() sets the guard
    release();
  }
  return hash;
}

void ParamGroup::abandon() {
  if (sharded_) {
    try {
      release();
    } catch (const std::exception&) {
      // A gather in flight failed with its communicator: the data are gone either way.
    }
    for (std::size_t i = 0; i < storages_.size(); ++i)
      torchglue::release_storage(storages_[i], "parameter " + members_[i].name + " is sharded and its Engine is gone");
  }
}

std::int64_t ParamGroup::gathered_bytes() const {
  return layout_.padded_numel() * static_cast<std::int64_t>(parameters_.element_size());
}

void ParamGroup::wait_for_gather() {
  {
    base::TraceSpan wait(*context_.trace, base::TraceKind::GatherWait, name_);
    gather_work_->wait();
  }
  gathered_mark_.hold();
  gather_work_.reset();
  gather_trace_.end(name_, gathered_bytes());
}

void ParamGroup::read_in_place() {
  gather_trace_.begin(*context_.trace, base::TraceKind::GatherInPlace);
  {
    base::TraceSpan wait(*context_.trace, base::TraceKind::GatherWait, name_);
    context_.comm->gather(*shared_);
  }
  gather_trace_.end(name_, gathered_bytes());
}

void ParamGroup::begin_gather(bool exact) {
  ZERO_CHECK(residency_ == Residency::Sharded, "group ", name_, " gathered twice");
  gather_trace_.begin(*context_.trace, base::TraceKind::Gather);
  gathered_ = context_.gather_pool->take(layout_.padded_numel(), context_.recipe.parameter);
  {
    // After what the current stream holds: the buffer's last use is among it.
    const torchglue::SideStream::Scope side(*context_.gather_stream);
    gather_work_ = from_shards_->begin(gathered_, parameters_, exact);
    gathered_mark_.set(context_.device);
  }
  residency_ = Residency::Gathering;
}

void ParamGroup::finish_gather() {
  if (residency_ == Residency::Gathered) return;
  if (shared_) {
    read_in_place();
    point_members_into(shared_->whole());
    residency_ = Residency::Gathered;
    return;
  }
  if (residency_ == Residency::Sharded) begin_gather();
  wait_for_gather();
  point_members_into(gathered_);
  residency_ = Residency::Gathered;
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
  residency_ = Residency::Gathered;
}

void ParamGroup::release() {
  if (!sharded_ || residency_ == Residency::Sharded) return;
  if (residency_ == Residency::Gathering) wait_for_gather();
  for (std::size_t i = 0; i < members_.size(); ++i)
    torchglue::release_storage(storages_[i], "parameter " + members_[i].name + " (group " + name_ +
                                                 ") was read past the dispatcher while it is sharded. Hint: open "
                                                 "engine.gathered_parameters() around code that takes raw pointers.");
  if (gathered_.defined()) context_.gather_pool->put(std::move(gathered_));
  gathered_ = at::Tensor();
  residency_ = Residency::Sharded;
}

at::Tensor ParamGroup::whole() const {
  ZERO_CHECK(residency_ == Residency::Gathered, "group ", name_, " is not gathered");
  return gathered_.defined() ? gathered_ : shared_ ? shared_->whole() : parameters_;
}

void ParamGroup::write_back() {
  at::NoGradGuard no_grad;
  auto flat = whole();
  if (flat.numel() == 0) return;
  if (context_.comm->size() > 1) context_.comm->broadcast(flat, 0)->wait();
  if (sharded_) parameters_.copy_(own_part(flat));
  tell_changed();
  if (!trainable_ || !context_.recipe.separate_master()) return;
  // Untouched elements keep the bits of their master that the compute dtype does not show.
  const auto mine = flat.narrow(0, owned_.begin, owned_.numel);
  const auto changed = mine.ne(master_.to(context_.recipe.parameter));
  master_.copy_(at::where(changed, mine.to(at::kFloat), master_));
}

void ParamGroup::begin_publish() {
  if (!trainable_ || context_.comm->size() == 1 || sharded_ || context_.stage == 0 || parameters_.numel() == 0) return;
  publish_trace_.begin(*context_.trace, base::TraceKind::Publish);
  publish_work_ = context_.comm->all_gather(parameters_, own_part(parameters_));
}

void ParamGroup::finish_publish() {
  if (!publish_work_) return;
  {
    base::TraceSpan wait(*context_.trace, base::TraceKind::PublishWait, name_);
    publish_work_->wait();
  }
  publish_work_.reset();
  publish_trace_.end(name_, gathered_bytes());
}

void ParamGroup::refresh_parameters() {
  at::NoGradGuard no_grad;
  if (trainable_ && context_.recipe.separate_master())
    (sharded_ ? parameters_ : parameters_.narrow(0, owned_.begin, owned_.numel)).copy_(master_);
  tell_changed();
}

void ParamGroup::update(optim::ShardedOptimizer& optimizer, float factor) {
  if (!trainable_) return;
  base::TraceSpan update(*context_.trace, base::TraceKind::Update, name_);
  const auto size = parameters_.element_size();
  auto* const parameter_base =
      static_cast<char*>(parameters_.data_ptr()) + (sharded_ ? 0 : owned_.begin * static_cast<std::int64_t>(size));
  const auto span_at = [&](std::int64_t begin, std::int64_t numel, int parameter_group) {
    optim::Span span{};
    span.master = master_.data_ptr<float>() + begin;
    for (int k = 0; k < context_.num_slots; ++k) span.slots[k] = slots_[k].data_ptr<float>() + begin;
    span.parameter =
        context_.recipe.separate_master() ? parameter_base + begin * static_cast<std::int64_t>(size) : nullptr;
    span.parameter_dtype = compute_dtype();
    span.numel = numel;
    span.parameter_group = parameter_group;
    return span;
  };
  if (context_.direct_gradients) {
    const auto grads = at::TensorOptions().dtype(context_.recipe.gradient).device(context_.device);
    for (const auto& piece : layout_.pieces(owned_.begin, owned_.numel)) {
      const auto& grad = members_[piece.parameter].tensor.grad();
      auto span = span_at(piece.range_begin, piece.numel, parameter_groups_[piece.parameter]);
      // No gradient counts as zero: moments decay and weight decay applies, at every stage alike.
      at::Tensor zeros;
      if (!grad.defined()) zeros = at::zeros({span.numel}, grads);
      span.gradient = grad.defined() ? static_cast<const char*>(grad.const_data_ptr()) +
                                           piece.parameter_begin * static_cast<std::int64_t>(grad.element_size())
                                     : zeros.const_data_ptr();
      span.gradient_dtype = dtype_of(context_.recipe.gradient);
      optimizer.update(span, factor);
    }
    return;
  }
  // Stage 1 keeps whole gradients of which only the own part is reduced.
  const auto shift = gradients_.numel() == owned_.numel ? 0 : owned_.begin;
  const auto* gradient_base = static_cast<const char*>(gradients_.const_data_ptr());
  for (const auto& run : runs_) {
    auto span = span_at(run.begin, run.numel, run.parameter_group);
    span.gradient = gradient_base + (shift + run.begin) * static_cast<std::int64_t>(gradients_.element_size());
    span.gradient_dtype = dtype_of(context_.recipe.gradient);
    optimizer.update(span, factor);
  }
  tell_changed();
}

at::Tensor ParamGroup::master_shard() const {
  return owned_.numel == layout_.shard_numel() ? master_ : own_part(master_);
}

at::Tensor ParamGroup::slot_shard(int slot) const {
  const auto& whole = slots_[slot];
  return owned_.numel == layout_.shard_numel() ? whole : own_part(whole);
}

}  // namespace zero::engine
