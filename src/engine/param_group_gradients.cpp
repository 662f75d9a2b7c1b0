// The gradient side of a group: taking .grad, reducing over ranks, keeping the result.
//
// [Note: one rounding for all stages] A reduced gradient is the fp32 sum over ranks, rounded once
// to the wire dtype, in every stage: stage 0 has to send it on, and the others must see the same
// bits.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/kernels.h"
#include "comm/scattered.h"
#include "config/stage_rules.h"
#include "engine/param_group.h"
#include "torchglue/storage_access.h"

namespace zero::engine {
namespace {

char* at_element(const at::Tensor& tensor, std::int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<std::int64_t>(tensor.element_size());
}

void zero_gaps(const at::Tensor& flat, const memory::ShardLayout& layout) {
  for (const auto& gap : layout.gaps()) flat.narrow(0, gap.begin, gap.numel).zero_();
}

double squares_of(const at::Tensor& grad) {
  return base::sum_of_squares(grad.const_data_ptr(), dtype_of(grad.scalar_type()), grad.numel());
}

}  // namespace

// --- one pass -----------------------------------------------------------------------------------

void ParamGroup::choose_active() {
  if (!activity_changed()) return;
  for (std::size_t i = 0; i < members_.size(); ++i) active_[i] = members_[i].tensor.requires_grad();
  find_runs();
}

bool ParamGroup::activity_changed() const {
  for (std::size_t i = 0; trainable_ && i < members_.size(); ++i)
    if (members_[i].tensor.requires_grad() != (active_[i] != 0)) return true;
  return false;
}

std::string ParamGroup::find_meddling(bool first, bool updates) const {
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, aliases, tensor, unit] = members_[i];
    if (!trainable_) {
      if (tensor.requires_grad())
        return "requires_grad of parameter " + name +
               " became true, but the Engine took it frozen and holds no master of it. Hint: let it require grad when "
               "the Engine is made, and freeze it afterwards: requires_grad_(false) between steps.";
      continue;
    }
    if (!first && !updates && tensor.requires_grad() != (active_[i] != 0))
      return base::join("requires_grad of parameter ", name, " was changed to ", tensor.requires_grad() ? "true" : "false",
                        " between two micro-batches of one step. Hint: freeze and unfreeze after step() has acted.");
    if (keeps_graph_ || (first ? !tensor.grad().defined() : guard_.is_there(i))) continue;
    if (first)
      return "the .grad of parameter " + name +
             " holds a gradient that no backward of this Engine made. Hint: module.zero_grad(), and engine.backward(loss) "
             "instead of loss.backward().";
    return "the gradient of " + name + " (group " + name_ +
           ") was cleared or replaced between two micro-batches, or before step(). Hint: leave .grad alone, and do not call "
           "zero_grad(); the Engine clears gradients after the step.";
  }
  return "";
}

void ParamGroup::begin_pass(bool first, bool boundary, bool keeps_graph) {
  first_ = first;
  boundary_ = boundary;
  awaited_ = 0;
  if (!trainable_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    taken_[i] = 0;
    awaited_ += active_[i] != 0;
    if (guard_.is_there(i)) guard_.lift(i, kept_[i].grad);
  }
  keeps_graph_ = keeps_graph;
}

void ParamGroup::end_pass() {
  if (!trainable_ || keeps_graph_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) guard_.put(i);
}

// The gradient flat in the wire's dtype, where the other ranks can read it.
at::Tensor ParamGroup::readable(const at::Tensor& grad) const {
  const auto wire = context_.recipe.wire;
  if (grad.scalar_type() == wire && context_.comm->holds(grad) && torchglue::owns_storage(grad)) return grad.view({-1});
  auto copy = context_.blocks->make(grad.numel(), wire);
  convert(Stretch(copy), Stretch(grad));
  return copy;
}

at::Tensor& ParamGroup::reduce_input() {
  if (!reduce_input_.defined()) {
    reduce_input_ = context_.reduce_pool->take(layout_.padded_numel(), context_.recipe.wire);
    zero_gaps(reduce_input_, layout_);
  }
  return reduce_input_;
}

bool ParamGroup::take_gradient(std::size_t i) {
  if (keeps_graph_) return false;
  auto& parameter = members_[i].tensor;
  auto grad = parameter.grad();
  if (!grad.defined() || active_[i] == 0) return false;
  const bool again = taken_[i] != 0;
  if (again && (reduce_work_ || awaited_ == 0))
    throw ConfigError(
        "[Engine::backward] a second gradient of " + members_[i].name + " arrived after group " + name_ +
        " was reduced. Hint: run one backward per Engine::backward; reentrant checkpointing is not supported.");
  if (grad.requires_grad()) grad = grad.detach();  // its graph has been used
  if (grad.is_sparse()) grad = grad.to_dense();
  if (context_.direct_gradients) {
    keep_gradient(i, std::move(grad), again);
  } else if (context_.blocks != nullptr && context_.stage >= 2) {
    grad = readable(grad.contiguous());
    if (scattered_.empty()) scattered_.resize(members_.size());
    if (again)
      accumulate(Stretch(scattered_[i]), Stretch(grad));
    else
      scattered_[i] = grad;
    parameter.mutable_grad() = at::Tensor();
  } else {
    grad = grad.contiguous();
    const bool sends_now = context_.stage >= 2;
    const Stretch to(sends_now ? reduce_input() : gradients_, layout_.parameter_offset(i), grad.numel());
    if (again || (!sends_now && !first_))
      accumulate(to, Stretch(grad));
    else
      convert(to, Stretch(grad));
    parameter.mutable_grad() = at::Tensor();
  }
  if (again) return false;
  taken_[i] = 1;
  return --awaited_ == 0;
}

// Autograd's own .grad is the kept gradient; autograd adds to it in place in the passes to come.
void ParamGroup::keep_gradient(std::size_t i, at::Tensor grad, bool again) {
  auto& kept = kept_[i];
  if (!grad.is_contiguous() || grad.scalar_type() != context_.recipe.gradient)
    grad = grad.to(context_.recipe.gradient).contiguous();
  if ((!first_ || again) && kept.grad.defined() && kept.grad.const_data_ptr() != grad.const_data_ptr())
    throw ConfigError("[Engine::backward] the gradient of " + members_[i].name + " (group " + name_ +
                      ") was replaced while backward ran. Hint: a hook may change a gradient, not .grad.");
  // What other tensors share would change with the sum over ranks, and in the next passes.
  if (!torchglue::owns_storage(grad) && !grad.is_same(kept.grad)) grad = grad.clone();
  if (context_.blocks != nullptr && grad.numel() > 0 && !context_.comm->holds(grad))
    grad = readable(grad).view(grad.sizes());
  auto& parameter = members_[i].tensor;
  if (!grad.is_same(parameter.grad())) parameter.mutable_grad() = grad;
  kept.grad = std::move(grad);
  if (context_.blocks != nullptr) return;
  book_kept(i);
  // Now the gradient is still in the cache.
  kept.squares = boundary_ && context_.sums == nullptr ? squares_of(kept.grad) : -1.0;
}

void ParamGroup::book_kept(std::size_t i) {
  auto& kept = kept_[i];
  if (kept.booked != 0) return;
  kept.booked = static_cast<std::int64_t>(kept.grad.nbytes());
  if (context_.device.is_cpu())
    context_.ledger->rebook(memory::Tier::Device, memory::Purpose::Activations, memory::Purpose::Gradients, kept.booked);
  else  // nobody counts activations there
    context_.ledger->book(memory::Tier::Device, memory::Purpose::Gradients, kept.booked);
}

// Member i has no gradient in this pass.
void ParamGroup::take_zeros(std::size_t i) {
  taken_[i] = 1;
  const bool by_blocks = context_.blocks != nullptr && members_[i].tensor.numel() > 0;
  if (context_.direct_gradients) {
    auto& grad = kept_[i].grad;
    if (!by_blocks || grad.defined()) return;
    grad = context_.blocks->make(layout_.parameter_numel(i), context_.recipe.wire)
               .zero_()
               .view(members_[i].tensor.sizes());
    members_[i].tensor.mutable_grad() = grad;
  } else if (by_blocks && context_.stage >= 2) {
    if (scattered_.empty()) scattered_.resize(members_.size());
    scattered_[i] = context_.blocks->make(layout_.parameter_numel(i), context_.recipe.wire).zero_();
  } else if (context_.stage >= 2) {
    reduce_input().narrow(0, layout_.parameter_offset(i), layout_.parameter_numel(i)).zero_();
  } else if (first_) {
    gradients_.narrow(0, layout_.parameter_offset(i), layout_.parameter_numel(i)).zero_();
  }
}

std::vector<std::string> ParamGroup::flush_missing() {
  std::vector<std::string> missing;
  if (!trainable_ || keeps_graph_) return missing;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (taken_[i] != 0 || active_[i] == 0) continue;
    // Of a pass before that kept its graph, or of the micro-batches before.
    if (members_[i].tensor.grad().defined() && !members_[i].tensor.grad().is_same(kept_[i].grad)) {
      take_gradient(i);
      continue;
    }
    missing.push_back(members_[i].name);
    take_zeros(i);
  }
  awaited_ = 0;
  return missing;
}

void ParamGroup::drop_foreign(std::size_t i) {
  if (!guard_.is_there(i)) members_[i].tensor.mutable_grad() = at::Tensor();
}

void ParamGroup::discard(bool accumulated) {
  if (!trainable_) return;
  if (reduce_work_) {
    reduce_work_->wait();
    reduced_mark_.hold();
    reduce_work_.reset();
  }
  if (reduce_output_.defined() && !reduce_output_.is_same(gradients_) && context_.stage >= 2)
    context_.reduce_pool->put(std::move(reduce_output_));
  if (reduce_input_.defined() && !reduce_input_.is_same(gradients_)) context_.reduce_pool->put(std::move(reduce_input_));
  reduce_input_ = reduce_output_ = at::Tensor();
  scattered_.clear();
  squared_ = keeps_graph_ = false;
  awaited_ = 0;
  if (accumulated)
    drop_gradients();
  else
    end_pass();
}

// The sum of squares of the shard takes its pieces in one order at every stage and transport (base/kernels.h); here
// they are taken while they are still in the cache.
void ParamGroup::add_squares(std::int64_t begin, std::int64_t end) {
  if (!context_.direct_gradients) {
    sum_of_squares_ +=
        base::sum_of_squares(at_element(gradients_, begin), dtype_of(gradients_.scalar_type()), end - begin);
    return;
  }
  const auto dtype = dtype_of(context_.recipe.gradient);
  for (auto at = begin; at < end; at += comm::kSummedNumel) {
    const auto numel = std::min(comm::kSummedNumel, end - at);
    const auto pieces = layout_.pieces(shard_begin_ + at, numel);
    const auto data_of = [&](const memory::ShardLayout::Piece& piece) {
      return at_element(kept_[piece.parameter].grad, piece.parameter_begin);
    };
    if (pieces.size() == 1 && pieces[0].numel == numel) {
      sum_of_squares_ += base::sum_of_squares(data_of(pieces[0]), dtype, numel);
      continue;
    }
    std::vector<char> flat(static_cast<std::size_t>(numel) * base::size_of(dtype));  // zero in the gaps
    for (const auto& piece : pieces)
      std::memcpy(flat.data() + static_cast<std::size_t>(piece.range_begin) * base::size_of(dtype), data_of(piece),
                  static_cast<std::size_t>(piece.numel) * base::size_of(dtype));
    sum_of_squares_ += base::sum_of_squares(flat.data(), dtype, numel);
  }
}

std::int64_t ParamGroup::reduced_bytes() const {
  return layout_.padded_numel() * static_cast<std::int64_t>(at::elementSize(context_.recipe.wire));
}

void ParamGroup::wait_for_reduction() {
  {
    base::TraceSpan wait(*context_.trace, base::TraceKind::ReduceWait, name_);
    reduce_work_->wait();
  }
  reduced_mark_.hold();
  reduce_trace_.end(name_, reduced_bytes());
}

void ParamGroup::begin_reduce_scattered() {
  comm::ScatteredSum sum;
  sum.shard_numel = layout_.shard_numel();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (layout_.parameter_numel(i) == 0) continue;
    auto data = context_.direct_gradients ? kept_[i].grad.view({-1}) : scattered_[i];
    if (context_.predivide != 1.0f) scale(Stretch(data), context_.predivide);
    sum.vector.push_back({layout_.parameter_offset(i), std::move(data)});
  }
  const bool straight = context_.stage >= 2 && first_ && context_.recipe.gradient == context_.recipe.wire;
  if (straight) {
    sum.out = gradients_;
  } else if (context_.stage >= 2) {
    sum.out = reduce_output_ = context_.reduce_pool->take(layout_.shard_numel(), context_.recipe.wire);
    for (const auto& gap : layout_.gaps()) {
      const auto begin = std::max(gap.begin, shard_begin_),
                 end = std::min(gap.begin + gap.numel, shard_begin_ + layout_.shard_numel());
      if (begin < end) reduce_output_.narrow(0, begin - shard_begin_, end - begin).zero_();
    }
  }
  sum.to_all = context_.stage == 0;
  squared_ = boundary_ && (straight || context_.direct_gradients);
  sum_of_squares_ = 0;
  if (squared_) sum.summed = [this](std::int64_t begin, std::int64_t end) { add_squares(begin, end); };
  reduce_trace_.begin(*context_.trace, base::TraceKind::Reduce);
  reduce_work_ = context_.comm->reduce_scattered(std::move(sum));
}

void ParamGroup::begin_reduce() {
  if (!trainable_ || layout_.padded_numel() == 0 || keeps_graph_) return;
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (taken_[i] == 0) take_zeros(i);  // frozen
  if (context_.blocks != nullptr &&
      (context_.direct_gradients ? boundary_ : config::shards_gradients(context_.stage)))
    return begin_reduce_scattered();
  if (context_.direct_gradients || !config::reduces_now(context_.stage, boundary_)) return;
  const auto wire = context_.recipe.wire;
  if (context_.stage >= 2) {
    const bool straight = first_ && context_.recipe.gradient == wire;
    reduce_output_ = straight ? gradients_ : context_.reduce_pool->take(layout_.shard_numel(), wire);
  } else {
    reduce_input_ = gradients_;
    if (context_.recipe.gradient != wire) {
      reduce_input_ = context_.reduce_pool->take(layout_.padded_numel(), wire);
      convert(Stretch(reduce_input_), Stretch(gradients_));
    }
    reduce_output_ = own_part(reduce_input_);
  }
  if (context_.predivide != 1.0f) scale(Stretch(reduce_input_), context_.predivide);
  reduce_trace_.begin(*context_.trace, base::TraceKind::Reduce);
  const torchglue::SideStream::Scope side(*context_.reduce_stream);
  reduce_work_ = context_.gradient_bits > 0
                     ? context_.comm->reduce_scatter_quantized(reduce_output_, reduce_input_, context_.gradient_bits)
                     : context_.comm->reduce_scatter(reduce_output_, reduce_input_);
  reduced_mark_.set(context_.device);
}

void ParamGroup::finish_reduce() {
  if (!trainable_ || keeps_graph_) return;
  if (reduce_work_) {
    wait_for_reduction();
    if (context_.direct_gradients) {
      // summed where they are
    } else if (context_.stage >= 2) {
      if (reduce_output_.defined() && !reduce_output_.is_same(gradients_)) {
        if (first_)
          convert(Stretch(gradients_), Stretch(reduce_output_));
        else
          accumulate(Stretch(gradients_), Stretch(reduce_output_));
        context_.reduce_pool->put(reduce_output_);
      }
      if (reduce_input_.defined()) context_.reduce_pool->put(reduce_input_);
      scattered_.clear();
    } else {
      if (context_.stage == 0 && context_.comm->size() > 1) {  // the second half of an all-reduce
        reduce_trace_.begin(*context_.trace, base::TraceKind::Reduce);
        reduce_work_ = context_.comm->all_gather(reduce_input_, reduce_output_);
        wait_for_reduction();
      }
      if (!reduce_input_.is_same(gradients_)) {
        if (context_.stage == 0)
          convert(Stretch(gradients_), Stretch(reduce_input_));
        else
          convert(Stretch(own_part(gradients_)), Stretch(reduce_output_));
        context_.reduce_pool->put(reduce_input_);
      }
    }
    reduce_input_ = reduce_output_ = at::Tensor();
    reduce_work_.reset();
  }
  if (!boundary_) return;
  if (!std::exchange(squared_, false)) take_squares();
  offload_gradients();
}

// The reduced shard goes to host memory, and the device has room again.
void ParamGroup::offload_gradients() {
  if (!offloaded_gradients_.defined()) return;
  base::TraceSpan copy(*context_.trace, base::TraceKind::Copy, name_,
                       static_cast<std::int64_t>(offloaded_gradients_.nbytes()));
  if (!context_.direct_gradients) {
    offloaded_gradients_.copy_(own_shard(gradients_));
    return;
  }
  for (const auto& gap : layout_.gaps()) {
    const auto begin = std::max(gap.begin, shard_begin_),
               end = std::min(gap.begin + gap.numel, shard_begin_ + layout_.shard_numel());
    if (begin < end) offloaded_gradients_.narrow(0, begin - shard_begin_, end - begin).zero_();
  }
  for (const auto& piece : layout_.pieces(shard_begin_, layout_.shard_numel())) {
    auto to = offloaded_gradients_.narrow(0, piece.range_begin, piece.numel);
    const auto& grad = kept_[piece.parameter].grad;
    if (grad.defined())
      to.copy_(grad.view({-1}).narrow(0, piece.parameter_begin, piece.numel));
    else
      to.zero_();
  }
  drop_gradients();
}

// Of a flat gradient kept whole, or kept as the shard alone.
at::Tensor ParamGroup::own_shard(const at::Tensor& kept) const {
  return kept.numel() == layout_.shard_numel() ? kept : own_part(kept);
}

void ParamGroup::take_squares() {
  sum_of_squares_ = 0;
  num_sums_ = 0;
  if (context_.sums != nullptr) {
    const auto add = [&](const at::Tensor& values) { context_.sums->add(first_sum_ + num_sums_++, Stretch(values)); };
    if (context_.direct_gradients) {
      for (const auto& kept : kept_)
        if (kept.grad.defined()) add(kept.grad);
    } else if (gradients_.numel() > 0) {
      add(own_shard(gradients_));
    }
    return;
  }
  if (context_.direct_gradients) {
    for (const auto& kept : kept_)
      if (kept.grad.defined()) sum_of_squares_ += kept.squares < 0 ? squares_of(kept.grad) : kept.squares;
  } else if (gradients_.numel() > 0) {
    sum_of_squares_ = squares_of(own_shard(gradients_));
  }
}

double ParamGroup::sum_of_squares() const {
  if (context_.sums == nullptr) return sum_of_squares_;
  double sum = 0;  // in the order in which the host would have added
  for (int i = 0; i < num_sums_; ++i) sum += (*context_.sums)[first_sum_ + i];
  return sum;
}

void ParamGroup::close_accumulation() {
  boundary_ = true;
  if (!config::shards_gradients(context_.stage)) begin_reduce();
  finish_reduce();
}

std::pair<std::int64_t, at::Tensor> ParamGroup::own_gradient(std::size_t i) const {
  for (const auto& piece : layout_.pieces(shard_begin_, layout_.shard_numel())) {
    if (piece.parameter != i) continue;
    if (!context_.direct_gradients || offloaded_gradients_.defined()) {
      const auto part = offloaded_gradients_.defined() ? offloaded_gradients_ : own_shard(gradients_);
      return {piece.parameter_begin, part.narrow(0, piece.range_begin, piece.numel)};
    }
    const auto& grad = kept_[i].grad;
    if (!grad.defined())
      return {piece.parameter_begin,
              at::zeros({piece.numel}, at::TensorOptions().dtype(context_.recipe.gradient).device(context_.device))};
    return {piece.parameter_begin, grad.view({-1}).narrow(0, piece.parameter_begin, piece.numel)};
  }
  return {0, at::empty({0}, at::TensorOptions().dtype(context_.recipe.gradient).device(context_.device))};
}

std::string ParamGroup::find_non_finite() const {
  if (!trainable_ || std::isfinite(sum_of_squares())) return "";
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (!at::isfinite(own_gradient(i).second).all().item<bool>()) return members_[i].name;
  return "";
}

void ParamGroup::drop_gradients() {
  if (!trainable_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto& kept = kept_[i];
    // The observer reports the free as one of activations: give it something to cancel.
    if (kept.booked != 0 && !context_.device.is_cpu())
      context_.ledger->book(memory::Tier::Device, memory::Purpose::Gradients, -kept.booked);
    else if (kept.booked != 0)
      context_.ledger->rebook(memory::Tier::Device, memory::Purpose::Gradients, memory::Purpose::Activations,
                              kept.booked);
    kept = {};
    members_[i].tensor.mutable_grad() = at::Tensor();
  }
}

}  // namespace zero::engine
