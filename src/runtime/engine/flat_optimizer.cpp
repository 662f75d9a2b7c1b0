// The public interface of the sharded optimizer: converts options to settings and tensors to one span. No arithmetic.
#include <zero/flat_optimizer.h>

#include <ATen/ATen.h>

#include "base/check.h"
#include "optim/sharded_optimizer.h"

namespace zero {
namespace {

std::optional<kernels::Dtype> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Dtype::F32;
    case at::kBFloat16:
      return kernels::Dtype::BF16;
    case at::kHalf:
      return kernels::Dtype::F16;
    default:
      return std::nullopt;
  }
}

std::string described(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return base::join(at::toString(tensor.scalar_type()), tensor.is_contiguous() ? "" : ", not contiguous", ", ",
                    tensor.numel(), " elements on ", tensor.device().str());
}

// Returns the dtype of a valid tensor.
kernels::Dtype check(const at::Tensor& tensor, const std::string& name, std::int64_t elements, bool fp32) {
  const auto dtype = tensor.defined() ? dtype_of(tensor) : std::nullopt;
  if (!dtype || (fp32 && *dtype != kernels::Dtype::F32) || !tensor.is_contiguous() || !tensor.device().is_cpu() ||
      tensor.numel() != elements)
    throw ConfigError(base::join("[FlatOptimizer::step] got for ", name, ": ", described(tensor), "; expected ",
                                 fp32 ? "fp32" : "fp32, bf16 or fp16", ", contiguous, ", elements,
                                 " elements on cpu, as many as the master"));
  return *dtype;
}

}  // namespace

struct FlatOptimizer::State {
  optim::ShardedOptimizer optimizer;
};

FlatOptimizer::FlatOptimizer(const Options& options)
    : state_(new State{{options.settings().optimizer, options.settings().schedule, {}}}) {
  if (options.settings().optimizer.type == config::OptimizerType::Muon)
    throw ConfigError(
        "[FlatOptimizer] got optimizer.type Muon, expected a rule of elements. Hint: an Engine has Muon.");
}
FlatOptimizer::~FlatOptimizer() = default;
FlatOptimizer::FlatOptimizer(FlatOptimizer&&) noexcept = default;

std::vector<std::string> FlatOptimizer::state_names() const {
  std::vector<std::string> names;
  for (int slot = 0; slot < state_->optimizer.num_slots(); ++slot)
    names.emplace_back(state_->optimizer.slot_name(slot));
  return names;
}

std::vector<at::Tensor> FlatOptimizer::make_states(std::int64_t elements) const {
  std::vector<at::Tensor> states;
  for (int slot = 0; slot < state_->optimizer.num_slots(); ++slot)
    states.push_back(at::full({elements}, state_->optimizer.slot_initial_value(), at::kFloat));
  return states;
}

void FlatOptimizer::step(const FlatTensors& tensors, float factor) {
  auto& optimizer = state_->optimizer;
  const auto elements = tensors.master.defined() ? tensors.master.numel() : 0;
  check(tensors.master, "the master", elements, true);
  if (static_cast<int>(tensors.states.size()) != optimizer.num_slots())
    throw ConfigError(base::join("[FlatOptimizer::step] got ", tensors.states.size(), " states, expected ",
                                 optimizer.num_slots(), ". Hint: make_states() makes them"));
  optim::Span span;
  span.gradient_dtype = check(tensors.gradient, "the gradient", elements, false);
  for (std::size_t slot = 0; slot < tensors.states.size(); ++slot) {
    check(tensors.states[slot], optimizer.slot_name(static_cast<int>(slot)), elements, true);
    span.slots[slot] = tensors.states[slot].mutable_data_ptr<float>();
  }
  if (tensors.parameter.defined()) {
    span.parameter_dtype = check(tensors.parameter, "the parameter", elements, false);
    span.parameter = tensors.parameter.mutable_data_ptr();
  }
  span.master = tensors.master.mutable_data_ptr<float>();
  span.gradient = tensors.gradient.const_data_ptr();
  span.numel = elements;
  optimizer.begin_step();
  optimizer.update(span, factor);
  optimizer.end_step();
}

std::int64_t FlatOptimizer::applied_steps() const { return state_->optimizer.applied_steps(); }
double FlatOptimizer::lr() const { return state_->optimizer.lr(); }

}  // namespace zero
