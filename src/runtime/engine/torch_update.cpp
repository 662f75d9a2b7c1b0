// See torch_update.h.
//
// [Note: what the background touches] Masters, optimizer states, the gradients of the delayed update and the pending
// parameters. The current parameters, new gradients and counters belong to the training thread. join() synchronizes
// both.
#include "engine/torch_update.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <algorithm>

#include "base/check.h"
#include "engine/dtypes.h"

namespace zero::engine {

TorchUpdate::TorchUpdate(optim::ShardedOptimizer& optimizer, std::shared_ptr<UpdateRule> rule, ModelBinding& binding,
                         TorchBuffers& buffers, const step::RunFacts& run,
                         std::vector<std::vector<int>> parameter_groups, observe::Trace& trace)
    : optimizer_(optimizer),
      binding_(binding),
      buffers_(buffers),
      run_(run),
      trace_(trace),
      rule_(rule ? std::make_unique<RuleUpdate>(std::move(rule), optimizer, binding, buffers, run) : nullptr) {
  for (auto& groups : parameter_groups) runs_.emplace_back(std::move(groups), optimizer.rounds_stochastically());
  for (int g = 0; g < static_cast<int>(runs_.size()); ++g) cut_runs(g);
}

void TorchUpdate::cut_runs(int group) {
  const auto& bound = binding_.group(group);
  runs_[static_cast<std::size_t>(group)].cut(bound.facts.layout, run_.owned_begin(bound.facts), bound.facts.owned(),
                                             bound.gradients);
}

void TorchUpdate::set_missed_steps(int group, std::vector<std::int64_t> missed) {
  runs_[static_cast<std::size_t>(group)].set_missed_steps(std::move(missed));
  cut_runs(group);
}

namespace {

void count_missed(std::vector<UpdateRuns>& runs, ModelBinding& binding) {
  for (std::size_t g = 0; g < runs.size(); ++g) runs[g].count(binding.group(static_cast<int>(g)).gradients);
}

}  // namespace

// A delayed update ends after requires_grad may have changed, one by the device's norm may not be applied.
void TorchUpdate::begin_update(std::optional<float> factor) {
  factor_ = factor;
  if (factor_) count_missed(runs_, binding_);
  optimizer_.begin_step();
  if (rule_) rule_->begin(factor_.value());
}

void TorchUpdate::end_update(bool applied) {
  if (!applied) return optimizer_.cancel_step();
  if (!factor_) count_missed(runs_, binding_);
  if (rule_) rule_->end();
  optimizer_.end_step();
}

void TorchUpdate::run_async(std::function<void()> job) {
  ZERO_CHECK(!async_job_.valid() || base::is_ready(async_job_), "[TorchUpdate::run_async] a job is running");
  async_job_ = thread_.add(std::move(job));
}

void TorchUpdate::join() {
  if (!async_job_.valid()) return;
  {
    // Also in the trace if nothing is left to wait for: it separates the job's slices from those of the next one.
    const observe::TraceSpan wait(trace_, observe::TraceKind::UpdateWait, "delayed");
    async_job_.wait();
  }
  async_job_.get();
}

void TorchUpdate::settle() noexcept {
  if (async_job_.valid()) async_job_.wait();  // its result and its error are not needed any more
}

void TorchUpdate::complete_updates() {
  optimizer_.complete_updates();
  zeros_.clear();
}

void TorchUpdate::update(int group, std::int64_t begin, std::int64_t numel, const step::UpdateTarget& target,
                         step::View grads) {
  auto& bound = binding_.group(group);
  if (bound.facts.by_rule) return rule_->update(bound, runs(group), begin, numel, target, grads);
  const auto& facts = bound.facts;
  const auto end = begin + numel;
  optim::Span whole{};
  whole.master = buffers_.data(target.master);
  whole.master_dtype = kernels_dtype(facts.precision.master);
  for (int k = 0; k < facts.num_slots(); ++k) whole.slots[k] = buffers_.data(target.slots[k]);
  whole.slots_in_blocks = facts.precision.slots == step::Dtype::U8;
  if (!whole.slots_in_blocks) whole.slot_dtype = kernels_dtype(facts.precision.slots);
  // A new parameter that is not written in place must be written completely, including frozen elements.
  const bool elsewhere = target.param && target.param_elsewhere;
  if (target.param) {
    buffers_.wait_read(target.param.buffer);
    whole.parameter = buffers_.data(target.param);
    whole.parameter_dtype = kernels_dtype(target.param.dtype);
  }
  whole.gradient_dtype = kernels_dtype(facts.precision.grad);
  std::vector<optim::Span> spans;
  const auto update = [&](std::int64_t at, std::int64_t count, const UpdateRuns::Run& run, const void* gradient) {
    auto span = whole.from(at - begin);
    if (run.parameter_group == UpdateRuns::kFrozen) {
      if (elsewhere) kernels::convert(span.parameter, span.parameter_dtype, span.master, span.master_dtype, count);
      return;
    }
    span.numel = count;
    span.parameter_group = run.parameter_group;
    span.missed_steps = run.missed_steps;
    span.gradient = gradient;
    if (optimizer_.rounds_stochastically()) {
      const auto& member = bound.members[run.member];
      span.parameter_hash = XXH3_64bits(member.name.data(), member.name.size());
      span.parameter_begin = member.elements_before(run_.topology.tensor_rank) + run.member_begin + at - run.begin;
    }
    spans.push_back(span);
  };
  if (!grads) {  // the members' .grad
    const auto width = step::width(facts.precision.grad);
    const auto pieces = facts.layout.pieces(run_.owned_begin(facts) + begin, numel);
    const auto group_of = [&](const auto& piece) { return runs(group).group_of(piece.parameter, bound.gradients); };
    // A missing gradient counts as zero: moments decay and weight decay applies, under every sharding policy.
    std::int64_t longest_missing = 0;
    for (const auto& piece : pieces)
      if (!bound.gradients.kept(piece.parameter).defined() && group_of(piece) != UpdateRuns::kFrozen)
        longest_missing = std::max(longest_missing, piece.numel);
    const void* zeros = nullptr;
    if (longest_missing > 0) {
      const auto like = at::TensorOptions().dtype(scalar_type(facts.precision.grad)).device(buffers_.setup().device);
      zeros_.push_back(at::zeros({longest_missing}, like));
      zeros = zeros_.back().const_data_ptr();
    }
    for (const auto& piece : pieces) {
      const auto& grad = bound.gradients.kept(piece.parameter);
      const auto at = begin + piece.range_begin;
      update(at, piece.numel,
             {at, piece.numel, group_of(piece), missed_steps(group)[piece.parameter], piece.parameter,
              piece.parameter_begin},
             grad.defined() ? static_cast<const char*>(grad.const_data_ptr()) + piece.parameter_begin * width : zeros);
    }
    optimizer_.update(spans, factor_);
    if (!run_.updates_together) zeros_.clear();
    return;
  }
  const auto shift = grads.numel == facts.owned() ? 0 : run_.owned_begin(facts);
  const auto* const first_gradient = static_cast<const char*>(buffers_.data(grads));
  for (const auto& run : runs(group).runs()) {
    const auto first = std::max(run.begin, begin), last = std::min(run.begin + run.numel, end);
    if (first < last) update(first, last - first, run, first_gradient + (shift + first) * width(grads.dtype));
  }
  optimizer_.update(spans, factor_);
}

}  // namespace zero::engine
