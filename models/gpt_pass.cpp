// See gpt_pass.h. Names and lifetimes of tensors follow gpt.cpp.
#include "models/gpt_pass.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace models {
namespace {

class PassTensor {
 public:
  PassTensor(PassListener& listener, std::int64_t number) : listener_(&listener), number_(number) {}
  ~PassTensor() {
    if (listener_ != nullptr) listener_->released(number_);
  }
  PassTensor(const PassTensor&) = delete;
  PassTensor& operator=(const PassTensor&) = delete;
  std::int64_t number() const { return number_; }
  // Transfers ownership to the listener, which then gets no released() for it.
  std::int64_t hand_over() {
    listener_ = nullptr;
    return number_;
  }

 private:
  PassListener* listener_;
  const std::int64_t number_;
};
using Tensor = std::shared_ptr<PassTensor>;

class GptPass {
 public:
  GptPass(const GptConfig& config, const GptBatch& batch, PassListener& listener)
      : config_(config),
        listener_(listener),
        segments_(std::min(batch.segments, config.layers)),
        samples_(batch.samples),
        element_(batch.element),
        positions_(part(batch.tokens, config.sequence)),
        tokens_(batch.samples * positions_),
        wide_(tokens_ * config.hidden * batch.element),
        heads_(part(batch.heads, config.heads)),
        attended_(heads_ * (config.hidden / config.heads)),
        inner_(part(batch.inner, 4 * config.hidden)),
        vocabulary_(part(batch.vocabulary, config.vocabulary)),
        logits_(batch.gathered_logits ? config.vocabulary : vocabulary_),
        gpu_(batch.gpu),
        fp32_(batch.fp32) {}

  void run() {
    auto x = embed();
    std::vector<Saved> layers;  // of layers that are not recomputed
    if (segments_ == 0) {
      for (std::int64_t i = 0; i < config_.layers; ++i) x = forward(i, x, &layers.emplace_back());
    } else {
      for (std::int64_t part = 0; part < segments_; ++part) {
        listener_.segment_begins(x->number());
        for (auto i = begin_of(part); i < begin_of(part + 1); ++i) x = forward(i, x, nullptr);
        listener_.segment_ends();
      }
    }
    Saved head;
    head.norm1 = norm(final_norm(), x, head.input, head.norm1_statistics);
    x.reset();
    listener_.used(output(), 1);
    auto logits = make(tokens_ * vocabulary_ * element_);
    if (logits_ != vocabulary_) logits = make(tokens_ * logits_ * element_);  // gathered
    { const auto likely = rows(); }
    listener_.backward_begins();

    // Backward of the loss, the output layer and the last norm.
    auto slope = [&] {
      auto gradient = make(tokens_ * logits_ * element_);
      const auto likely = rows();
      return gradient;
    }();
    logits.reset();
    if (logits_ != vocabulary_) slope = make(tokens_ * vocabulary_ * element_);
    listener_.used(output(), 1);
    auto dx = make(wide_);
    auto waiting = make(vocabulary_ * config_.hidden * element_);
    slope.reset(), head.norm1.reset();
    if (!config_.tied_output) gradient_of(output(), std::move(waiting));
    dx = norm_backward(final_norm(), std::move(dx), head.input, head.norm1_statistics);
    if (segments_ == 0) {
      for (auto i = config_.layers; i-- > 0;) {
        dx = backward(i, std::move(dx), layers.back());
        layers.pop_back();
      }
    } else {
      for (auto part = segments_; part-- > 0;) {
        std::vector<Saved> again;
        auto y = std::make_shared<PassTensor>(listener_, tensors_++);
        listener_.segment_runs_again(y->number());
        for (auto i = begin_of(part); i < begin_of(part + 1); ++i) y = forward(i, y, &again.emplace_back());
        y.reset();
        for (auto i = begin_of(part + 1); i-- > begin_of(part);) {
          dx = backward(i, std::move(dx), again.back());
          again.pop_back();
        }
      }
    }
    embed_backward(std::move(dx), std::move(waiting));
    listener_.backward_ends();
  }

 private:
  // Tensors of a layer that autograd saves.
  struct Saved {
    Tensor input, norm1, norm1_statistics, qkv, mixed, sums, middle, norm2, norm2_statistics, up, activated;
  };

  Tensor make(std::int64_t bytes) {
    const auto tensor = tensors_++;
    listener_.allocated(tensor, bytes);
    return std::make_shared<PassTensor>(listener_, tensor);
  }
  void gradient_of(std::size_t parameter, Tensor tensor) { listener_.gradient(parameter, tensor->hand_over()); }
  // A chunk of rows of the logits in fp32, and a second one if they are converted from 16 bits.
  std::vector<Tensor> rows() {
    const auto bytes = std::min(loss_rows(logits_, gpu_), tokens_) * logits_ * 4;
    std::vector<Tensor> all{make(bytes)};
    if (element_ < 4) all.push_back(make(bytes));
    return all;
  }

  // Parameters, in the order of registration.
  enum In { kNorm1 = 0, kQkv = 2, kProjection = 4, kNorm2 = 6, kUp = 8, kDown = 10, kOfLayer = 12 };
  std::size_t of(std::int64_t layer, In which) const { return static_cast<std::size_t>(2 + layer * kOfLayer + which); }
  std::size_t final_norm() const { return of(config_.layers, kNorm1); }
  std::size_t output() const { return config_.tied_output ? 0 : final_norm() + 2; }
  void use_norm(std::size_t weight) { listener_.used(weight, 2); }
  std::int64_t begin_of(std::int64_t part) const { return part * config_.layers / segments_; }

  Tensor embed() {
    listener_.used(0, 1);
    const auto tokens = make(wide_);
    listener_.used(1, 1);
    return make(wide_);
  }

  // One block. Saved tensors are moved to `saved`; null: they are released.
  Tensor forward(std::int64_t i, const Tensor& x, Saved* saved) {
    Saved here;
    here.norm1 = norm(of(i, kNorm1), x, here.input, here.norm1_statistics);
    if (saved == nullptr) here.input.reset();
    listener_.used(of(i, kQkv), 2);
    here.qkv = make(3 * attended());
    if (saved == nullptr) here.norm1.reset(), here.norm1_statistics.reset();
    here.mixed = make(attended());
    here.sums = make(4 * tokens_ * heads_);
    listener_.used(of(i, kProjection), 2);
    const auto projected = make(wide_);
    if (saved == nullptr) here.mixed.reset(), here.sums.reset();
    auto middle = make(wide_);
    here.norm2 = norm(of(i, kNorm2), middle, here.middle, here.norm2_statistics);
    if (saved == nullptr) here.middle.reset();
    listener_.used(of(i, kUp), 2);
    here.up = make(tokens_ * inner_ * element_);
    here.activated = make(tokens_ * inner_ * element_);
    listener_.used(of(i, kDown), 2);
    const auto mlp = make(wide_);
    if (saved == nullptr) here.norm2.reset(), here.norm2_statistics.reset(), here.up.reset(), here.activated.reset();
    auto result = make(wide_);
    if (saved != nullptr) *saved = std::move(here);
    return result;
  }

  // models::LayerNorm: it computes in fp32 if the dtypes of its input and parameters differ. `input`: what it saves.
  Tensor norm(std::size_t weight, const Tensor& x, Tensor& input, Tensor& statistics) {
    use_norm(weight);
    if (!mixed(weight)) {
      input = x;
      auto result = make(wide_);
      statistics = make(2 * tokens_ * element_);
      return result;
    }
    input = make(wide_in_fp32());
    const auto wide = make(wide_in_fp32());
    statistics = make(2 * tokens_ * 4);
    return make(wide_);
  }
  bool is_fp32(std::size_t parameter) const { return element_ == 4 || (!fp32_.empty() && fp32_[parameter]); }
  bool mixed(std::size_t weight) const { return element_ < 4 && (is_fp32(weight) || is_fp32(weight + 1)); }
  std::int64_t wide_in_fp32() const { return tokens_ * config_.hidden * 4; }
  std::int64_t width(std::size_t parameter) const { return is_fp32(parameter) ? 4 : element_; }

  static std::int64_t part(std::int64_t given, std::int64_t all) { return given > 0 ? given : all; }
  std::int64_t attended() const { return tokens_ * attended_ * element_; }

  // Returns the gradient of a linear layer's input; releases `input` and `gradient`.
  Tensor linear_backward(std::size_t weight, std::int64_t in, std::int64_t out, Tensor gradient, Tensor& input,
                         const Tensor* kept_by_others = nullptr) {
    listener_.used(weight, 1);
    auto result = make(tokens_ * in * element_);
    auto of_weight = make(in * out * element_), of_bias = make(out * element_);
    if (kept_by_others == nullptr) input.reset();
    gradient.reset();
    gradient_of(weight + 1, std::move(of_bias));
    gradient_of(weight, std::move(of_weight));
    return result;
  }

  Tensor norm_backward(std::size_t weight, Tensor gradient, Tensor& input, Tensor& statistics) {
    use_norm(weight);
    const auto computed = mixed(weight) ? 4 : element_;
    if (mixed(weight)) gradient = make(wide_in_fp32());
    auto result = make(tokens_ * config_.hidden * computed);
    auto of_weight = make(config_.hidden * computed), of_bias = make(config_.hidden * computed);
    // The kernel's sums of both, for each thread; a rank has one. They can have the size of a gradient.
    if (!gpu_) make(2 * config_.hidden * computed);
    gradient.reset(), input.reset(), statistics.reset();
    if (width(weight) != computed) of_weight = make(config_.hidden * width(weight));
    if (width(weight + 1) != computed) of_bias = make(config_.hidden * width(weight + 1));
    gradient_of(weight, std::move(of_weight));
    gradient_of(weight + 1, std::move(of_bias));
    return mixed(weight) ? make(wide_) : result;
  }

  // dx: gradient of the block's result. Gradients of the residual branches are added to it in place.
  Tensor backward(std::int64_t i, Tensor dx, Saved& saved) {
    auto inside = linear_backward(of(i, kDown), inner_, config_.hidden, nullptr, saved.activated);
    {
      auto of_up = make(tokens_ * inner_ * element_);
      saved.up.reset();
      inside = std::move(of_up);
    }
    inside = linear_backward(of(i, kUp), config_.hidden, inner_, std::move(inside), saved.norm2);
    norm_backward(of(i, kNorm2), std::move(inside), saved.middle, saved.norm2_statistics);
    auto of_mixed = linear_backward(of(i, kProjection), attended_, config_.hidden, nullptr, saved.mixed, &saved.mixed);
    std::vector<Tensor> of_parts{make(attended()), make(attended()), make(attended())};
    of_mixed.reset(), saved.mixed.reset(), saved.sums.reset(), saved.qkv.reset();
    auto stacked = make(3 * attended());
    of_parts.clear();
    auto in_order = make(3 * attended());
    stacked.reset();
    auto of_norm = linear_backward(of(i, kQkv), config_.hidden, 3 * attended_, std::move(in_order), saved.norm1);
    norm_backward(of(i, kNorm1), std::move(of_norm), saved.input, saved.norm1_statistics);
    return dx;
  }

  void embed_backward(Tensor dx, Tensor waiting) {
    {
      Tensor of_samples;
      if (samples_ > 1) of_samples = make(positions_ * config_.hidden * element_);
      auto of_positions = make(config_.sequence * config_.hidden * element_);
      of_samples.reset();
      gradient_of(1, std::move(of_positions));
    }
    auto of_tokens = make(vocabulary_ * config_.hidden * element_);
    dx.reset();
    if (config_.tied_output) {  // autograd adds both gradients into a third tensor
      auto sum = make(vocabulary_ * config_.hidden * element_);
      waiting.reset();
      of_tokens = std::move(sum);
    }
    gradient_of(0, std::move(of_tokens));
  }

  const GptConfig& config_;
  PassListener& listener_;
  const std::int64_t segments_, samples_, element_, positions_, tokens_, wide_;
  const std::int64_t heads_, attended_, inner_, vocabulary_;  // of this rank; attended_: columns of attention's result
  const std::int64_t logits_;                                 // columns that the loss reads
  const bool gpu_;
  const std::vector<bool>& fp32_;
  std::int64_t tensors_ = 0;
};

}  // namespace

void describe_pass(const GptConfig& config, const GptBatch& batch, PassListener& listener) {
  GptPass(config, batch, listener).run();
}

}  // namespace models
