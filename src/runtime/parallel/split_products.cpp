#include "parallel/split_products.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <xxhash.h>
#include <zero/errors.h>
#include <zero/tp.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "base/check.h"

namespace zero::parallel {
namespace {

using sharding::CutKind;

constexpr std::size_t kNone = ~std::size_t{0};

}  // namespace

// The arguments of an operator that multiplies by a weight.
struct SplitProducts::Product {
  std::string_view name;
  std::size_t input, weight, bias;
  bool transposed;  // the operator takes the weight's transpose
};

namespace {

// torch::nn::functional::linear calls t() and then addmm, or matmul and add_; Python's calls linear.
template <class Product>
const Product* product_of(const std::string& name) {
  static const std::array<Product, 4> products{{{"aten::linear", 0, 1, 2, false},
                                                {"aten::addmm", 1, 2, 0, true},
                                                {"aten::matmul", 0, 1, kNone, true},
                                                {"aten::mm", 0, 1, kNone, true}}};
  const auto* const found =
      std::find_if(products.begin(), products.end(), [&](const auto& p) { return p.name == name; });
  return found == products.end() ? nullptr : found;
}

bool adds(const std::string& name) { return name == "aten::add" || name == "aten::add_"; }

// The products of a formula that a Function computes itself.
bool multiplies(const std::string& name) {
  static const auto* const names = new std::unordered_set<std::string>{
      "aten::linear",  "aten::addmm", "aten::addmm_", "aten::matmul",    "aten::mm",   "aten::bmm",
      "aten::baddbmm", "aten::mv",    "aten::einsum", "aten::tensordot", "aten::inner"};
  return names->contains(name);
}

// Whether autograd runs the backward of a Function of the program. Its own nodes have classes of their own.
bool in_function() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const auto& value = *node;
  const std::string_view name = typeid(value).name();
  return name.find("CppNode") != name.npos || name.find("PyNode") != name.npos;
}

// Whether the tensor is all of a part, or its transpose.
bool is_all_of(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, bool transposed) {
  if (tensor.dim() != 2 || tensor.storage_offset() != 0) return false;
  return transposed ? tensor.size(0) == sizes[1] && tensor.size(1) == sizes[0] && tensor.stride(0) == 1
                    : tensor.size(0) == sizes[0] && tensor.size(1) == sizes[1] && tensor.stride(1) == 1;
}

std::vector<std::int64_t> lengths(const sharding::TensorCut& cut) {
  std::vector<std::int64_t> result;
  for (int part = 0; part < cut.parts; ++part)
    result.push_back(cut.part_sizes(part)[static_cast<std::size_t>(cut.dim)]);
  return result;
}

// All parts of a column product, in the order of the whole weight's rows.
at::Tensor gathered(const at::Tensor& y, const sharding::TensorCut& cut, const std::shared_ptr<Communicator>& group) {
  const auto all = tp::gather(y, group, -1, lengths(cut));
  if (cut.pieces.size() <= 1) return all;
  std::vector<at::Tensor> ordered;
  for (std::size_t piece = 0; piece < cut.pieces.size(); ++piece) {
    std::int64_t begin = 0;
    for (int part = 0; part < cut.parts; ++part) {
      const auto ranges = cut.ranges(part);
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        if (i == piece) ordered.push_back(all.narrow(-1, begin, ranges[i].numel()));
        begin += ranges[i].numel();
      }
    }
  }
  return at::cat(ordered, -1);
}

}  // namespace

SplitProducts::SplitProducts(std::shared_ptr<Communicator> group, at::Device device, bool shared_generator)
    : group_(std::move(group)), device_(device), shared_generator_(shared_generator) {
  begin_run();  // the program's own region
}

void SplitProducts::add(int tag, Parameter parameter) {
  const auto at = static_cast<std::size_t>(tag);
  if (parameters_.size() <= at) parameters_.resize(at + 1);
  parameters_[at] = std::move(parameter);
}

void SplitProducts::end_forward() noexcept {
  last_ = {};
  regions_.front()->close();
  compare_ = false;
}

void SplitProducts::begin_run() {
  last_ = {};
  regions_.push_back(std::make_unique<RandomRegion>(shared_generator_ ? -1 : group_->rank(), device_));
}

void SplitProducts::end_run() noexcept {
  last_ = {};
  regions_.pop_back();
}

// Formulas of backward read the parts as they are. Modules run outside of backward; in recomputations, those of
// segments and others, which enable grad mode; and in the backward of a Function, which need not enable it. A formula
// multiplies the gradient by the weight, not by its transpose, so that the operand tells which of the two it is.
bool SplitProducts::in_backward_formula(torch_hooks::OperatorCall& call, const Product* product, const Use* uses,
                                        std::size_t count) const {
  if (regions_.size() > 1 || at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() == -1)
    return false;
  const bool of_function = in_function();
  for (const auto* use = uses; use != uses + count; ++use) {
    const auto& parameter = at(use->tag);
    if (parameter.cut.kind == CutKind::Whole || parameter.cut.cut.sizes.size() != 2) continue;
    if (call.name() == "aten::embedding") return false;
    const auto& part = parameter.cut.cut.part_sizes(group_->rank());
    // A part of one element is its own transpose.
    if (product && use->argument == product->weight && !use->in_list && (of_function || part[0] * part[1] > 1) &&
        is_all_of(call.argument(product->weight).toTensor(), part, product->transposed))
      return false;
    if (of_function && !multiplies(call.name())) return false;  // and is refused
  }
  return true;
}

void SplitProducts::handle(torch_hooks::OperatorCall& call, const Use* uses, std::size_t count) {
  const auto* const product = product_of<Product>(call.name());
  if (in_backward_formula(call, product, uses, count)) return call.run();
  for (const auto* use = uses; use != uses + count; ++use) {
    const auto& parameter = at(use->tag);
    if (parameter.cut.kind != CutKind::Whole) continue;
    if (use->in_list) refuse(call.name(), parameter);
    auto& argument = call.argument(use->argument);
    argument = tp::copy(argument.toTensor(), group_);  // sums the gradient
  }
  for (const auto* use = uses; use != uses + count; ++use) {
    const auto& parameter = at(use->tag);
    if (parameter.cut.kind == CutKind::Whole) continue;
    const bool is_bias = parameter.cut.cut.sizes.size() == 1;
    if (is_bias && !use->in_list && ((product && use->argument == product->bias) || adds(call.name()))) {
      const bool with_part = product && std::any_of(uses, uses + count, [&](const Use& other) {
                               return other.argument == product->weight;
                             });
      if (!with_part) require_part_beside(call, product, parameter);
      continue;
    }
    if (product && use->argument == product->weight && !use->in_list &&
        is_all_of(call.argument(product->weight).toTensor(), parameter.cut.cut.part_sizes(group_->rank()),
                  product->transposed)) {
      if (product->name == "aten::addmm" &&
          (!call.argument(3).toScalar().equal(1) || !call.argument(4).toScalar().equal(1)))
        refuse(call.name(), parameter);
      return parameter.cut.kind == CutKind::Column ? column(call, *product, parameter) : row(call, *product, parameter);
    }
    if (call.name() == "aten::embedding" && use->argument == 0 && parameter.cut.kind == CutKind::Column)
      return embedding(call, parameter);
    if (!readable_) refuse(call.name(), parameter);
  }
  call.run();
}

void SplitProducts::before_kernel(int tag, const char* kernel) {
  const auto& parameter = at(tag);
  if (parameter.cut.kind != CutKind::Whole || at::GradMode::is_enabled()) refuse(kernel, parameter);
}

// --- the three forms --------------------------------------------------------------------------

void SplitProducts::column(torch_hooks::OperatorCall& call, const Product& product, const Parameter& weight) {
  const auto x = call.argument(product.input).toTensor();
  const auto width = weight.cut.cut.sizes[1];
  if (x.dim() > 0 && x.size(-1) != width)
    throw ConfigError(base::join("[Engine::forward] got ", x.size(-1), " features for ", weight.name, ", which takes ",
                                 width, ": the layer before it is split. Hint: cut ", weight.name,
                                 " by rows, or set gather_output for the layer before it."));
  if (weight.cut.sequence)
    require_tokens(x, weight);
  else if (compare_)
    compare(x, weight);
  call.argument(product.input) = copied(x, weight);
  if (!weight.cut.gather_output) {
    if (weight.cut.head)  // nothing is drawn on logits, and an evaluation has no other end
      regions_.back()->close();
    else
      regions_.back()->open();
    return call.run();
  }
  regions_.back()->close();
  std::optional<at::Tensor> bias;
  if (product.bias != kNone && !call.argument(product.bias).isNone()) bias = call.argument(product.bias).toTensor();
  const auto input = call.argument(product.input).toTensor(), part = call.argument(product.weight).toTensor();
  auto y = gathered(product.transposed ? at::matmul(input, part) : at::linear(input, part), weight.cut.cut, group_);
  call.finish(bias ? y + *bias : y);
}

void SplitProducts::row(torch_hooks::OperatorCall& call, const Product& product, const Parameter& weight) {
  regions_.back()->close();
  last_ = {};
  auto x = call.argument(product.input).toTensor();
  const auto all = lengths(weight.cut.cut);
  const auto width = all[static_cast<std::size_t>(group_->rank())];
  const auto expected = weight.cut.scatter_input ? weight.cut.cut.sizes[1] : width;
  if (x.dim() == 0 || x.size(-1) != expected)
    throw ConfigError(base::join("[Engine::forward] got ", x.dim() == 0 ? 1 : x.size(-1), " features for ", weight.name,
                                 ", which takes ", weight.cut.scatter_input ? "all " : "this rank's ", expected,
                                 weight.cut.scatter_input ? ": the layer before it is split. Hint: leave out "
                                                            "scatter_input."
                                                          : ": the layer before it is not split. Hint: cut that layer "
                                                            "by columns, or set scatter_input."));
  if (weight.cut.scatter_input) x = tp::scatter(x, group_, -1, all);
  std::optional<at::Tensor> bias;
  if (product.bias != kNone && !call.argument(product.bias).isNone()) bias = call.argument(product.bias).toTensor();
  const auto part = call.argument(product.weight).toTensor();
  const auto y = summed(product.transposed ? at::matmul(x, part) : at::linear(x, part), weight);
  call.finish(bias ? y + *bias : y);
}

void SplitProducts::embedding(torch_hooks::OperatorCall& call, const Parameter& weight) {
  if (call.argument(3).toBool() || call.argument(4).toBool())
    throw ConfigError("[Engine::forward] the embedding " + weight.name +
                      " has sparse gradients or scale_grad_by_freq, which its parts do not support. Hint: \"skip\" it "
                      "in tensor_parallel.partition_config.");
  regions_.back()->close();
  const auto ids = call.argument(1).toTensor();
  if (compare_) compare(ids, weight);
  const auto range = weight.cut.cut.ranges(group_->rank()).front();
  call.finish(summed(tp::vocab_parallel_rows(call.argument(0).toTensor(), ids, range.begin, weight.cut.cut.sizes[0],
                                             call.argument(2).toInt()),
                     weight));
}

// The sum over the group: whole on every rank, or each rank's stretch of the tokens, in which it draws its own numbers.
at::Tensor SplitProducts::summed(const at::Tensor& y, const Parameter& weight) {
  if (!weight.cut.sequence) return tp::reduce(y, group_);
  require_tokens(y, weight);
  if (const auto tokens = y.size(1), over = tokens % parts(); over != 0)
    throw ConfigError(base::join("[Engine::forward] got ", tokens, tokens == 1 ? " token" : " tokens", " for ",
                                 weight.name, ", expected a multiple of ", parts(),
                                 ": sequence regions divide the tokens over the tensor-parallel ranks. Hint: ",
                                 tokens < parts() ? "" : base::join(tokens - over, " or "), tokens - over + parts(),
                                 " tokens."));
  regions_.back()->open();
  return tp::reduce_scatter(y, group_, 1);
}

void SplitProducts::require_tokens(const at::Tensor& x, const Parameter& weight) const {
  if (x.dim() != 3)
    throw ConfigError(base::join("[Engine::forward] got a tensor of shape ", x.sizes(), " for ", weight.name,
                                 ", expected [batch, tokens, features]. Hint: sequence regions divide the tokens over "
                                 "the tensor-parallel ranks; view the tensor so, or set sequence to false."));
}

at::Tensor SplitProducts::copied(const at::Tensor& x, const Parameter& weight) {
  const auto in_tp = [&] { return weight.cut.sequence ? tp::gather_split(x, group_, 1) : tp::copy(x, group_); };
  if (x.is_inference()) return in_tp();  // it has no version
  const bool grad_mode = at::GradMode::is_enabled();
  if (!last_.x.defined() || !last_.x.is_same(x) || last_.version != x._version() || last_.grad_mode != grad_mode)
    last_ = {x, in_tp(), static_cast<std::uint32_t>(x._version()), grad_mode};
  return last_.copied;
}

// --- checks -----------------------------------------------------------------------------------

void SplitProducts::compare(const at::Tensor& x, const Parameter& weight) {
  const auto values = x.detach().cpu().contiguous();
  const auto hash = XXH3_64bits(values.const_data_ptr(), values.nbytes());
  const auto all = group_->all_gather_bytes(base::join(x.sizes(), " ", hash));
  std::string different;
  for (std::size_t j = 1; j < all.size(); ++j)
    if (all[j] != all[0]) different += base::join(different.empty() ? "" : ", ", j);
  if (different.empty()) return;
  throw ConfigError("[Engine::forward] the ranks of a tensor-parallel group got different input for " + weight.name +
                    ": tp 0 and tp " + different +
                    ". Hint: all ranks of a group read the same samples, by mesh.rank(\"dp\") of mesh.size(\"dp\"), "
                    "and draw the same random numbers outside of split layers.");
}

// A part of a bias is added to a product with a part of its weight.
void SplitProducts::require_part_beside(torch_hooks::OperatorCall& call, const Product* product,
                                        const Parameter& bias) const {
  const auto whole = bias.cut.cut.sizes[0];
  if (bias.cut.cut.part_sizes(group_->rank())[0] == whole) return;
  const auto is_whole = [&](std::size_t argument, std::int64_t dim) {
    const auto& value = call.argument(argument);
    return value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().size(dim) == whole;
  };
  if (product ? !is_whole(product->weight, product->transposed ? -1 : 0) : !is_whole(0, -1) && !is_whole(1, -1)) return;
  throw ConfigError(base::join("[Engine::forward] ", call.name(), " got ", whole, " features with ", bias.name, ", ",
                               holding(bias),
                               ": the weight of the same module was replaced behind the Engine. Hint: keep the tensor; "
                               "in a scope of gathered_parameters(true) write with copy_ to this rank's part, or give "
                               "set_parameter_state() the whole values."));
}

std::string SplitProducts::holding(const Parameter& parameter) const {
  if (parameter.cut.kind == CutKind::Whole) return "whose gradient is summed over tp";
  const auto& cut = parameter.cut.cut;
  std::string ranges;
  for (const auto& range : cut.ranges(group_->rank()))
    ranges += base::join(ranges.empty() ? "" : ", ", range.begin, "-", range.end - 1);
  return base::join("of which this rank holds ", cut.dim == 0 ? "rows " : "columns ", ranges, " of ",
                    cut.sizes[static_cast<std::size_t>(cut.dim)]);
}

void SplitProducts::refuse(const std::string& op, const Parameter& parameter) const {
  const bool embedding = op.find("embedding") != std::string::npos;
  throw ConfigError("[Engine::forward] " + op + " reads " + parameter.name + ", " + holding(parameter) +
                    (embedding ? ". Hint: embeddings are cut over the vocabulary, by partition_type \"column\"; "
                               : ". Hint: torch::linear or matmul use parts of a weight [out, in]; ") +
                    "otherwise \"skip\" it in tensor_parallel.partition_config.");
}

}  // namespace zero::parallel
