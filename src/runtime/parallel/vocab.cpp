// Embeddings and losses that are divided over the vocabulary.
#include <zero/errors.h>
#include <zero/tp.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sharding/tensor_cut.h"

namespace zero::tp {
namespace {

// Rows that are converted to fp32 at a time, because an fp32 copy of all logits would dominate the memory peak.
std::int64_t rows_at_once(std::int64_t columns) {
  constexpr std::int64_t kElements = 1 << 18;
  return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(columns, 1));
}

// Calls body(first row, number of rows).
template <class Body>
void by_rows(const at::Tensor& logits, const Body& body) {
  const auto rows = logits.size(0), step = rows_at_once(logits.size(1));
  for (std::int64_t row = 0; row < rows; row += step) body(row, std::min(step, rows - row));
}

struct Problem {
  Group group;
  CrossEntropyOptions options;
  std::int64_t begin = 0;
};

// The part of a target that is spread over all classes, with its own.
double spread(const CrossEntropyOptions& options) {
  const auto classes = static_cast<double>(options.vocabulary);
  if (options.vocabulary == 1) return 0;  // there is no other class
  return options.label_smoothing == 0 ? 0 : options.label_smoothing * classes / (classes - 1);
}

struct SavedProblem final : torch::CustomClassHolder {
  explicit SavedProblem(Problem p) : problem(std::move(p)) {}
  const Problem problem;
};

// Whether the row's target is a column of this rank, and which.
std::pair<at::Tensor, at::Tensor> own_columns(const at::Tensor& targets, std::int64_t begin, std::int64_t columns) {
  const auto own = targets.ge(begin).logical_and(targets.lt(begin + columns));
  return {own, (targets - begin).masked_fill(own.logical_not(), 0)};
}

class VocabParallelCrossEntropy : public torch::autograd::Function<VocabParallelCrossEntropy> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, c10::intrusive_ptr<SavedProblem> saved) {
    const auto& [group, options, begin] = saved->problem;
    const auto rows = logits.size(0), columns = logits.size(1);
    const bool smooths = options.label_smoothing > 0;
    const auto numbers = at::TensorOptions().dtype(at::kFloat).device(logits.device());
    // Of each row: the largest logit here, the sum of exp(logit - largest), the target's logit or 0, the sum.
    auto mine = at::zeros({smooths ? 4 : 3, rows}, numbers);
    by_rows(logits, [&](std::int64_t row, std::int64_t count) {
      const auto z = logits.narrow(0, row, count).to(at::kFloat);
      const auto of = mine.narrow(1, row, count);
      const auto largest = z.amax(-1);
      of[0].copy_(largest);
      of[1].copy_((z - largest.unsqueeze(1)).exp_().sum(-1).masked_fill(largest.isneginf(), 0));  // all masked
      const auto [own, column] = own_columns(targets.narrow(0, row, count), begin, columns);
      of[2].copy_(z.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(own.logical_not(), 0));
      if (smooths) of[3].copy_(z.sum(-1));
    });
    auto all = at::empty({group->size(), mine.size(0), rows}, numbers);
    if (rows > 0) group->all_gather(all.view({-1}), mine.view({-1}))->wait();
    const auto largest = all.select(1, 0).amax(0);
    auto sum = at::zeros({rows}, numbers), target = at::zeros({rows}, numbers), total = at::zeros({rows}, numbers);
    for (int j = 0; j < group->size(); ++j) {
      sum += all[j][1] * (all[j][0] - largest).exp().masked_fill(all[j][0].isneginf(), 0);
      target += all[j][2];
      if (smooths) total += all[j][3];
    }
    const auto normalizer = largest + sum.log();
    const auto counts = targets.ne(options.ignore_index);
    auto loss = normalizer - target;
    if (smooths)
      loss = loss * (1 - spread(options)) +
             (normalizer - total / static_cast<double>(options.vocabulary)) * spread(options);
    const auto counted = counts.sum();
    context->save_for_backward({logits, targets, normalizer, counted});
    context->saved_data["problem"] = at::IValue::make_capsule(std::move(saved));
    return (loss.masked_fill(counts.logical_not(), 0).sum(at::kDouble) / counted).to(at::kFloat);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (at::GradMode::is_enabled())
      throw ConfigError("[tp::cross_entropy] got a backward pass with create_graph; it is differentiable once");
    const auto holder = context->saved_data["problem"].toCapsule();
    const auto& [group, options, begin] = static_cast<const SavedProblem&>(*holder).problem;
    const auto saved = context->get_saved_variables();
    const auto &logits = saved[0], &targets = saved[1], &normalizer = saved[2], &counted = saved[3];
    // Where no row counts, the loss is NaN, and its gradient 0, as torch's.
    const auto factor = gradients[0].to(at::kFloat) / counted.clamp_min(1);
    auto gradient = at::empty_like(logits, at::MemoryFormat::Contiguous);
    by_rows(logits, [&](std::int64_t row, std::int64_t count) {
      const auto of_rows = targets.narrow(0, row, count);
      auto slope = (logits.narrow(0, row, count).to(at::kFloat) - normalizer.narrow(0, row, count).unsqueeze(1)).exp_();
      if (options.label_smoothing > 0) slope -= spread(options) / static_cast<double>(options.vocabulary);
      const auto [own, column] = own_columns(of_rows, begin, logits.size(1));
      slope.scatter_add_(1, column.unsqueeze(1), (own.to(at::kFloat) * (spread(options) - 1)).unsqueeze(1));
      slope.masked_fill_(of_rows.eq(options.ignore_index).unsqueeze(1), 0);
      gradient.narrow(0, row, count).copy_(slope.mul_(factor));
    });
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const Group& group,
                         const CrossEntropyOptions& wanted) {
  const auto fail = [](const std::string& text) { throw ConfigError("[tp::cross_entropy] " + text); };
  if (logits.dim() != 2 || targets.dim() != 1 || logits.size(0) != targets.size(0) || !logits.is_floating_point())
    fail(
        base::join("got logits ", logits.sizes(), " and targets ", targets.sizes(), ", expected [n, columns] and [n]"));
  if (wanted.label_smoothing < 0 || wanted.label_smoothing > 1)
    fail(base::join("got label_smoothing ", wanted.label_smoothing, ", expected 0 to 1"));
  auto options = wanted;
  if (options.vocabulary == 0) options.vocabulary = logits.size(1) * group->size();
  if (options.vocabulary < group->size())
    fail(base::join("got a vocabulary of ", options.vocabulary, ", expected at least ", group->size(), ", one a rank"));
  const auto range = sharding::cut_range(options.vocabulary, 1, group->rank(), group->size());
  if (range.numel() != logits.size(1))
    fail(base::join("got ", logits.size(1), " columns on tp ", group->rank(), ", expected ", range.numel(), " of ",
                    options.vocabulary));
  const auto outside = targets.lt(0).logical_or(targets.ge(options.vocabulary));
  TORCH_CHECK_INDEX(!outside.logical_and(targets.ne(options.ignore_index)).any().item<bool>(),
                    "a target is out of bounds of ", options.vocabulary, " classes");
  return VocabParallelCrossEntropy::apply(logits, targets,
                                          c10::make_intrusive<SavedProblem>(Problem{group, options, range.begin}));
}

at::Tensor vocab_parallel_rows(const at::Tensor& weight, const at::Tensor& ids, std::int64_t begin,
                               std::int64_t vocabulary, std::int64_t padding_idx) {
  const auto end = begin + weight.size(0);
  TORCH_CHECK_INDEX(
      ids.numel() == 0 || (ids.min().item<std::int64_t>() >= 0 && ids.max().item<std::int64_t>() < vocabulary),
      "index out of range in self: ids of an embedding of ", vocabulary, " rows");
  const auto elsewhere = ids.lt(begin).logical_or(ids.ge(end));
  const auto own = (ids - begin).masked_fill(elsewhere, 0);
  const auto padding = padding_idx >= begin && padding_idx < end ? padding_idx - begin : -1;
  return at::embedding(weight, own, padding).masked_fill(elsewhere.unsqueeze(-1), 0);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& weight, const at::Tensor& ids, const Group& group,
                                    std::int64_t begin, std::int64_t vocabulary, std::int64_t padding_idx) {
  return reduce(vocab_parallel_rows(weight, ids, begin, vocabulary, padding_idx), group);
}

}  // namespace zero::tp
