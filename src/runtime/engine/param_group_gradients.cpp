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
#include "comm/tensor_segments.h"
#include "engine/param_group.h"
#include "kernels/elementwise.h"
#include "step/stage_rules.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::engine {
namespace {

char* at_element(const at::Tensor& tensor, std::int64_t element) {
  return static_cast<char*>(tensor.data_ptr()) + element * static_cast<std::int64_t>(tensor.element_size());
}

void zero_gaps(const at::Tensor& flat, const sharding::ShardLayout& layout) {
  for (const auto& gap : layout.gaps()) flat.narrow(0, gap.begin, gap.numel).zero_();
}

double squares_of(const at::Tensor& grad) {
  return kernels::sum_of_squares(grad.const_data_ptr(), dtype_of(grad.scalar_type()), grad.numel());
}

}  // namespace

// --- one pass -----------------------------------------------------------------------------------

void ParamGroup::choose_active() {
  if (!autograd_.activity_changed()) return;
  autograd_.choose_active();
  cut_runs();
}

void ParamGroup::begin_pass(bool first, bool boundary, bool keeps_graph) {
  first_ = first;
  boundary_ = boundary;
  awaited_ = 0;
  std::fill(taken_.begin(), taken_.end(), 0);
  for (std::size_t i = 0; i < members_.size(); ++i) awaited_ += autograd_.active(i);
  autograd_.begin_pass(keeps_graph);
}

at::Tensor& ParamGroup::reduce_input() {
  if (!reduce_input_.defined()) {
    reduce_input_ = context_.reduce_pool->take(layout_.padded_numel(), context_.recipe.wire);
    zero_gaps(reduce_input_, layout_);
  }
  return reduce_input_;
}

bool ParamGroup::take_gradient(std::size_t i) {
  if (autograd_.keeps_graph()) return false;
  auto& parameter = members_[i].tensor;
  auto grad = parameter.grad();
  if (!grad.defined() || !autograd_.active(i)) return false;
  const bool again = taken_[i] != 0;
  if (again && (reduce_work_ || awaited_ == 0))
    throw ConfigError(
        "[Engine::backward] a second gradient of " + members_[i].name + " arrived after group " + name_ +
        " was reduced. Hint: run one backward per Engine::backward; reentrant checkpointing is not supported.");
  if (grad.requires_grad()) grad = grad.detach();  // its graph has been used
  if (grad.is_sparse()) grad = grad.to_dense();
  if (context_.direct_gradients) {
    autograd_.keep(i, std::move(grad), !first_ || again, boundary_ && context_.sums == nullptr);
  } else if (context_.blocks != nullptr && context_.stage >= 2) {
    grad = autograd_.readable(grad.contiguous());
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

// Member i has no gradient in this pass.
void ParamGroup::take_zeros(std::size_t i) {
  taken_[i] = 1;
  const bool by_blocks = context_.blocks != nullptr && members_[i].tensor.numel() > 0;
  if (context_.direct_gradients) {
    if (by_blocks && !autograd_.kept(i).defined()) autograd_.keep_zeros(i, layout_.parameter_numel(i));
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
  if (!trainable_ || autograd_.keeps_graph()) return missing;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (taken_[i] != 0 || !autograd_.active(i)) continue;
    // Of a pass before that kept its graph.
    if (members_[i].tensor.grad().defined() && !members_[i].tensor.grad().is_same(autograd_.kept(i))) {
      take_gradient(i);
      continue;
    }
    missing.push_back(members_[i].name);
    take_zeros(i);
  }
  awaited_ = 0;
  return missing;
}

void ParamGroup::copy_sums() {
  if (!trainable_) return;
  if (context_.direct_gradients) return autograd_.copy_kept();
  const torch_hooks::AllocationObserver::Pause pause;
  auto copy = gradients_.clone();
  context_.ledger->book(gradients_tier_, step::Purpose::Gradients, static_cast<std::int64_t>(copy.nbytes()));
  copied_gradients_ = std::move(copy);
}

void ParamGroup::forget_sums() {
  autograd_.forget_copy();
  if (!copied_gradients_.defined()) return;
  context_.ledger->book(gradients_tier_, step::Purpose::Gradients,
                        -static_cast<std::int64_t>(copied_gradients_.nbytes()));
  copied_gradients_ = at::Tensor();
}

void ParamGroup::discard(Back back) {
  if (!trainable_) return;
  if (reduce_work_) {
    reduce_work_->wait();
    reduced_mark_.hold();
    reduce_work_.reset();
  }
  if (reduce_output_.defined() && !reduce_output_.is_same(gradients_) && context_.stage >= 2)
    context_.reduce_pool->put(std::move(reduce_output_));
  if (reduce_input_.defined() && !reduce_input_.is_same(gradients_))
    context_.reduce_pool->put(std::move(reduce_input_));
  reduce_input_ = reduce_output_ = at::Tensor();
  scattered_.clear();
  squared_ = false;
  awaited_ = 0;
  if (back == Back::ToNothing) return autograd_.drop();
  if (back == Back::ToCopy && context_.direct_gradients) autograd_.go_back();
  if (back == Back::ToCopy && copied_gradients_.defined()) gradients_.copy_(copied_gradients_);
  autograd_.end_pass();
}

// The sum of squares of the shard takes its pieces in one order at every stage and transport (kernels/elementwise.h);
// here they are taken while they are still in the cache.
void ParamGroup::add_squares(std::int64_t begin, std::int64_t end) {
  if (!context_.direct_gradients) {
    sum_of_squares_ +=
        kernels::sum_of_squares(at_element(gradients_, begin), dtype_of(gradients_.scalar_type()), end - begin);
    return;
  }
  const auto dtype = dtype_of(context_.recipe.gradient);
  for (auto at = begin; at < end; at += comm::kSummedNumel) {
    const auto numel = std::min(comm::kSummedNumel, end - at);
    const auto pieces = layout_.pieces(shard_begin_ + at, numel);
    const auto data_of = [&](const sharding::ShardLayout::Piece& piece) {
      return at_element(autograd_.kept(piece.parameter), piece.parameter_begin);
    };
    if (pieces.size() == 1 && pieces[0].numel == numel) {
      sum_of_squares_ += kernels::sum_of_squares(data_of(pieces[0]), dtype, numel);
      continue;
    }
    std::vector<char> flat(static_cast<std::size_t>(numel) * kernels::size_of(dtype));  // zero in the gaps
    for (const auto& piece : pieces)
      std::memcpy(flat.data() + static_cast<std::size_t>(piece.range_begin) * kernels::size_of(dtype), data_of(piece),
                  static_cast<std::size_t>(piece.numel) * kernels::size_of(dtype));
    sum_of_squares_ += kernels::sum_of_squares(flat.data(), dtype, numel);
  }
}

std::int64_t ParamGroup::reduced_bytes() const {
  return layout_.padded_numel() * static_cast<std::int64_t>(at::elementSize(context_.recipe.wire));
}

void ParamGroup::wait_for_reduction() {
  {
    observe::TraceSpan wait(*context_.trace, observe::TraceKind::ReduceWait, name_);
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
    auto data = context_.direct_gradients ? autograd_.kept(i).view({-1}) : scattered_[i];
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
  reduce_trace_.begin(*context_.trace, observe::TraceKind::Reduce);
  reduce_work_ = context_.comm->reduce_scattered(std::move(sum));
}

void ParamGroup::begin_reduce() {
  if (!trainable_ || layout_.padded_numel() == 0 || autograd_.keeps_graph()) return;
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (taken_[i] == 0) take_zeros(i);  // frozen
  if (context_.blocks != nullptr && (context_.direct_gradients ? boundary_ : step::shards_gradients(context_.stage)))
    return begin_reduce_scattered();
  if (context_.direct_gradients || !step::reduces_now(context_.stage, boundary_)) return;
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
  reduce_trace_.begin(*context_.trace, observe::TraceKind::Reduce);
  const gpu::SideStream::Scope side(*context_.reduce_stream);
  reduce_work_ = context_.gradient_bits > 0
                     ? context_.comm->reduce_scatter_quantized(reduce_output_, reduce_input_, context_.gradient_bits)
                     : context_.comm->reduce_scatter(reduce_output_, reduce_input_);
  reduced_mark_.set(context_.device);
}

void ParamGroup::finish_reduce() {
  if (!trainable_ || autograd_.keeps_graph()) return;
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
        reduce_trace_.begin(*context_.trace, observe::TraceKind::Reduce);
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
  observe::TraceSpan copy(*context_.trace, observe::TraceKind::Copy, name_,
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
    const auto& grad = autograd_.kept(piece.parameter);
    if (grad.defined())
      to.copy_(grad.view({-1}).narrow(0, piece.parameter_begin, piece.numel));
    else
      to.zero_();
  }
  autograd_.drop();
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
      for (std::size_t i = 0; i < members_.size(); ++i)
        if (autograd_.kept(i).defined()) add(autograd_.kept(i));
    } else if (gradients_.numel() > 0) {
      add(own_shard(gradients_));
    }
    return;
  }
  if (context_.direct_gradients) {
    sum_of_squares_ = autograd_.sum_of_squares();
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
  if (!step::shards_gradients(context_.stage)) begin_reduce();
  finish_reduce();
}

std::pair<std::int64_t, at::Tensor> ParamGroup::own_gradient(std::size_t i) const {
  for (const auto& piece : layout_.pieces(shard_begin_, layout_.shard_numel())) {
    if (piece.parameter != i) continue;
    if (!context_.direct_gradients || offloaded_gradients_.defined()) {
      const auto part = offloaded_gradients_.defined() ? offloaded_gradients_ : own_shard(gradients_);
      return {piece.parameter_begin, part.narrow(0, piece.range_begin, piece.numel)};
    }
    const auto& grad = autograd_.kept(i);
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

}  // namespace zero::engine
