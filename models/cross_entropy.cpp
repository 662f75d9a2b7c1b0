// Cross entropy for large vocabularies. The logits are converted to fp32 a few rows at a time, in forward and backward,
// because a full fp32 copy would dominate the memory peak of a step.
#include "models/cross_entropy.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>
#include <optional>

#include "models/gpt_config.h"

namespace models {
namespace {

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  // counting: [n], false for rows that do not count, whose targets are of any class; none: all rows count.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, const std::optional<at::Tensor>& counting) {
    const at::Tensor counts = counting.value_or(at::Tensor());
    const std::int64_t rows = logits.size(0), step = loss_rows(logits.size(1), !logits.is_cpu());
    at::Tensor total;  // undefined: all rows
    if (counts.defined()) total = counts.sum().clamp_min(1);
    context->save_for_backward({logits, targets, counts, total});
    at::Tensor sum = torch::zeros({}, logits.options().dtype(torch::kFloat64));
    for (std::int64_t row = 0; row < rows; row += step) {
      const std::int64_t count = std::min(step, rows - row);
      const at::Tensor likely = torch::log_softmax(logits.narrow(0, row, count), -1, torch::kFloat32);
      at::Tensor chosen = likely.gather(1, targets.narrow(0, row, count).unsqueeze(1));
      if (counts.defined()) chosen.masked_fill_(counts.narrow(0, row, count).logical_not().unsqueeze(1), 0);
      sum -= chosen.sum(torch::kFloat64);
    }
    return (total.defined() ? sum / total : sum / rows).to(torch::kFloat32);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &counts = saved[2], &total = saved[3];
    const std::int64_t rows = logits.size(0), step = loss_rows(logits.size(1), !logits.is_cpu());
    const at::Tensor wide = grads[0].to(torch::kFloat32);
    const at::Tensor factor = total.defined() ? wide / total * counts.unsqueeze(1) : wide / rows;
    at::Tensor grad = torch::empty_like(logits, at::MemoryFormat::Contiguous);
    for (std::int64_t row = 0; row < rows; row += step) {
      const std::int64_t count = std::min(step, rows - row);
      at::Tensor slope = torch::softmax(logits.narrow(0, row, count), -1, torch::kFloat32);
      const at::Tensor target = targets.narrow(0, row, count).unsqueeze(1);
      slope.scatter_add_(1, target, torch::full_like(target, -1, slope.options()));
      grad.narrow(0, row, count).copy_(slope.mul_(total.defined() ? factor.narrow(0, row, count) : factor));
    }
    return {grad, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  TORCH_CHECK(logits.dim() == 2 && targets.dim() == 1 && logits.size(0) == targets.size(0) && logits.size(0) > 0,
              "[cross_entropy] got logits ", logits.sizes(), " and targets ", targets.sizes(),
              ", expected [n, classes] and [n]");
  // A CPU looks; for a GPU that would be a synchronization.
  const at::Tensor counts = targets.ne(kIgnored);
  if (logits.is_cpu() && counts.all().item<bool>())
    return CrossEntropy::apply(logits, targets, std::optional<at::Tensor>());
  return CrossEntropy::apply(logits, targets.masked_fill(counts.logical_not(), 0), std::optional(counts));
}

void check_targets(const char* where, const at::Tensor& tokens, const at::Tensor& targets) {
  TORCH_CHECK(tokens.sizes() == targets.sizes(), "[", where, "] got targets ", targets.sizes(), ", expected ",
              tokens.sizes());
}

}  // namespace models
