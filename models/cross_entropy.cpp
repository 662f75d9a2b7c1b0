// Cross entropy for large vocabularies. The logits are converted to fp32 a few rows at a time, in forward and backward,
// because a full fp32 copy would dominate the memory peak of a step.
#include <algorithm>

#include "models/gpt.h"

namespace models {
namespace {

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets) {
    context->save_for_backward({logits, targets});
    const std::int64_t rows = logits.size(0), step = loss_rows(logits.size(1), !logits.is_cpu());
    at::Tensor sum = torch::zeros({}, logits.options().dtype(torch::kFloat64));
    for (std::int64_t row = 0; row < rows; row += step) {
      const std::int64_t count = std::min(step, rows - row);
      const at::Tensor likely = torch::log_softmax(logits.narrow(0, row, count), -1, torch::kFloat32);
      sum -= likely.gather(1, targets.narrow(0, row, count).unsqueeze(1)).sum(torch::kFloat64);
    }
    return (sum / rows).to(torch::kFloat32);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const at::Tensor& targets = saved[1];
    const std::int64_t rows = logits.size(0), step = loss_rows(logits.size(1), !logits.is_cpu());
    const at::Tensor factor = grads[0].to(torch::kFloat32) / rows;
    at::Tensor grad = torch::empty_like(logits, at::MemoryFormat::Contiguous);
    for (std::int64_t row = 0; row < rows; row += step) {
      const std::int64_t count = std::min(step, rows - row);
      at::Tensor slope = torch::softmax(logits.narrow(0, row, count), -1, torch::kFloat32);
      const at::Tensor target = targets.narrow(0, row, count).unsqueeze(1);
      slope.scatter_add_(1, target, torch::full_like(target, -1, slope.options()));
      grad.narrow(0, row, count).copy_(slope.mul_(factor));
    }
    return {grad, at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  TORCH_CHECK(logits.dim() == 2 && targets.dim() == 1 && logits.size(0) == targets.size(0) && logits.size(0) > 0,
              "[cross_entropy] got logits ", logits.sizes(), " and targets ", targets.sizes(),
              ", expected [n, classes] and [n]");
  return CrossEntropy::apply(logits, targets);
}

}  // namespace models
