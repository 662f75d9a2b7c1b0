// See model_pass.h. Names follow models/gpt.cpp; a Tensor lives as long as somebody holds it, as there.
#include "plan/model_pass.h"

#include <algorithm>

#include "base/check.h"

namespace zero::planning {
namespace {

// The cross entropy's fp32 rows (models/cross_entropy.cpp).
constexpr std::int64_t kRowElements[] = {std::int64_t{1} << 18, std::int64_t{1} << 26};  // CPU, GPU

// Inputs of segments between their two runs: kept on the device, or away from the end of the first run to the
// beginning of the second. A GPU brings them back one segment ahead.
class Checkpoints {
 public:
  Checkpoints(PassSink& memory, Tier tier, std::int64_t bytes) : memory_(memory), tier_(tier), bytes_(bytes) {}
  void keep(const Tensor& input) { inputs_.push_back(input); }
  void first_run_ended() {
    if (tier_ == Tier::Device) return;
    memory_.put_away(tier_, bytes_);
    inputs_.back().reset();
  }
  // Of the last segment that is left.
  Tensor take() {
    bring_back(inputs_.size() - 1);
    auto input = std::move(inputs_.back());
    inputs_.pop_back();
    if (memory_.on_gpu() && !inputs_.empty()) bring_back(inputs_.size() - 1);
    return input;
  }

 private:
  void bring_back(std::size_t segment) {
    if (inputs_[segment]) return;
    inputs_[segment] = memory_.make(bytes_);
    memory_.bring_back(tier_, bytes_);
  }

  PassSink& memory_;
  const Tier tier_;
  const std::int64_t bytes_;
  std::vector<Tensor> inputs_;
};

class GptPass {
 public:
  GptPass(const PlanModel& model, const MicroBatch& batch, PassSink& memory)
      : m_(model),
        memory_(memory),
        segments_(std::min(batch.segments, model.layers)),
        samples_(batch.samples),
        element_(batch.element),
        tokens_(batch.samples * model.sequence),
        wide_(tokens_ * model.hidden * batch.element),
        inputs_(memory, batch.inputs, wide_) {}

  void run() {
    auto x = embed();
    std::vector<Saved> layers;  // of layers that run once
    if (segments_ == 0) {
      for (std::int64_t i = 0; i < m_.layers; ++i) x = forward(i, x, &layers.emplace_back());
    } else {
      for (std::int64_t part = 0; part < segments_; ++part) {
        inputs_.keep(x);
        for (auto i = begin_of(part); i < begin_of(part + 1); ++i) x = forward(i, x, nullptr);
        inputs_.first_run_ended();
      }
    }
    Saved head;
    head.input = std::move(x);
    use_norm(final_norm());
    head.norm1 = make(wide_);
    head.norm1_statistics = statistics();
    memory_.use({output()});
    auto logits = make(tokens_ * m_.vocabulary * element_);
    { const auto likely = rows(); }
    memory_.begin_backward();

    // The loss; then the output layer, the last norm.
    auto slope = [&] {
      auto gradient = make(tokens_ * m_.vocabulary * element_);
      const auto likely = rows();
      return gradient;
    }();
    logits.reset();
    memory_.use({output()});
    auto dx = make(wide_);
    auto waiting = make(m_.vocabulary * m_.hidden * element_);
    slope.reset(), head.norm1.reset();
    if (!m_.tied) memory_.gradient(output(), std::move(waiting));
    dx = norm_backward(final_norm(), std::move(dx), head.input, head.norm1_statistics);
    if (segments_ == 0) {
      for (auto i = m_.layers; i-- > 0;) {
        dx = backward(i, std::move(dx), layers.back());
        layers.pop_back();
      }
    } else {
      for (auto part = segments_; part-- > 0;) {
        std::vector<Saved> again;
        auto y = inputs_.take();
        for (auto i = begin_of(part); i < begin_of(part + 1); ++i) y = forward(i, y, &again.emplace_back());
        y.reset();
        for (auto i = begin_of(part + 1); i-- > begin_of(part);) {
          dx = backward(i, std::move(dx), again.back());
          again.pop_back();
        }
      }
    }
    embed_backward(std::move(dx), std::move(waiting));
    memory_.end_backward();
  }

 private:
  // What autograd saved of a layer.
  struct Saved {
    Tensor input, norm1, norm1_statistics, qkv, mixed, sums, middle, norm2, norm2_statistics, up, activated;
  };

  Tensor make(std::int64_t bytes) { return memory_.make(bytes); }
  Tensor statistics() { return make(2 * tokens_ * element_); }
  // A run of rows of the logits in fp32, beside a copy where they are converted.
  std::vector<Tensor> rows() {
    const auto step = std::max<std::int64_t>(1, kRowElements[memory_.on_gpu()] / m_.vocabulary);
    const auto bytes = std::min(step, tokens_) * m_.vocabulary * 4;
    std::vector<Tensor> all{make(bytes)};
    if (element_ < 4) all.push_back(make(bytes));
    return all;
  }

  // Parameters, as model.cpp lists them.
  enum In { kNorm1 = 0, kQkv = 2, kProjection = 4, kNorm2 = 6, kUp = 8, kDown = 10, kOfLayer = 12 };
  std::size_t of(std::int64_t layer, In which) const { return static_cast<std::size_t>(2 + layer * kOfLayer + which); }
  std::size_t final_norm() const { return of(m_.layers, kNorm1); }
  std::size_t output() const { return m_.tied ? 0 : final_norm() + 2; }
  void use_norm(std::size_t weight) { memory_.use({weight, weight + 1}); }
  std::int64_t begin_of(std::int64_t part) const { return part * m_.layers / segments_; }

  Tensor embed() {
    memory_.use({0});
    const auto tokens = make(wide_);
    memory_.use({1});
    return make(wide_);
  }

  // One block. What is saved goes to `saved`; null: it is dropped.
  Tensor forward(std::int64_t i, const Tensor& x, Saved* saved) {
    Saved here;
    here.input = x;
    use_norm(of(i, kNorm1));
    here.norm1 = make(wide_);
    here.norm1_statistics = statistics();
    memory_.use({of(i, kQkv), of(i, kQkv) + 1});
    here.qkv = make(3 * wide_);
    if (saved == nullptr) here.norm1.reset(), here.norm1_statistics.reset();
    here.mixed = make(wide_);
    here.sums = make(4 * tokens_ * m_.heads);
    memory_.use({of(i, kProjection), of(i, kProjection) + 1});
    const auto projected = make(wide_);
    if (saved == nullptr) here.mixed.reset(), here.sums.reset();
    here.middle = make(wide_);
    use_norm(of(i, kNorm2));
    here.norm2 = make(wide_);
    here.norm2_statistics = statistics();
    memory_.use({of(i, kUp), of(i, kUp) + 1});
    here.up = make(m_.mlp_width() / m_.hidden * wide_);
    here.activated = make(m_.mlp_width() / m_.hidden * wide_);
    memory_.use({of(i, kDown), of(i, kDown) + 1});
    const auto mlp = make(wide_);
    if (saved == nullptr) here.norm2.reset(), here.norm2_statistics.reset(), here.up.reset(), here.activated.reset();
    auto result = make(wide_);
    if (saved != nullptr) *saved = std::move(here);
    return result;
  }

  // The gradient of a linear layer's input; `input` and `gradient` are let go.
  Tensor linear_backward(std::size_t weight, std::int64_t in, std::int64_t out, Tensor gradient, Tensor& input,
                         const Tensor* kept_by_others = nullptr) {
    memory_.use({weight});
    auto result = make(tokens_ * in * element_);
    auto of_weight = make(in * out * element_), of_bias = make(out * element_);
    if (kept_by_others == nullptr) input.reset();
    gradient.reset();
    memory_.gradient(weight + 1, std::move(of_bias));
    memory_.gradient(weight, std::move(of_weight));
    return result;
  }

  Tensor norm_backward(std::size_t weight, Tensor gradient, Tensor& input, Tensor& statistics) {
    use_norm(weight);
    auto result = make(wide_);
    auto of_weight = make(m_.hidden * element_), of_bias = make(m_.hidden * element_);
    gradient.reset(), input.reset(), statistics.reset();
    memory_.gradient(weight, std::move(of_weight));
    memory_.gradient(weight + 1, std::move(of_bias));
    return result;
  }

  // dx: of the block's result; what is added to a gradient that waits is added in place.
  Tensor backward(std::int64_t i, Tensor dx, Saved& saved) {
    const auto inner = m_.mlp_width();
    auto inside = linear_backward(of(i, kDown), inner, m_.hidden, nullptr, saved.activated);
    {
      auto of_up = make(tokens_ * inner * element_);
      saved.up.reset();
      inside = std::move(of_up);
    }
    inside = linear_backward(of(i, kUp), m_.hidden, inner, std::move(inside), saved.norm2);
    norm_backward(of(i, kNorm2), std::move(inside), saved.middle, saved.norm2_statistics);
    auto of_mixed = linear_backward(of(i, kProjection), m_.hidden, m_.hidden, nullptr, saved.mixed, &saved.mixed);
    std::vector<Tensor> of_parts{make(wide_), make(wide_), make(wide_)};
    of_mixed.reset(), saved.mixed.reset(), saved.sums.reset(), saved.qkv.reset();
    auto stacked = make(3 * wide_);
    of_parts.clear();
    auto in_order = make(3 * wide_);
    stacked.reset();
    auto of_norm = linear_backward(of(i, kQkv), m_.hidden, 3 * m_.hidden, std::move(in_order), saved.norm1);
    norm_backward(of(i, kNorm1), std::move(of_norm), saved.input, saved.norm1_statistics);
    return dx;
  }

  void embed_backward(Tensor dx, Tensor waiting) {
    {
      Tensor of_samples;
      if (samples_ > 1) of_samples = make(m_.sequence * m_.hidden * element_);
      auto of_positions = make(m_.sequence * m_.hidden * element_);
      of_samples.reset();
      memory_.gradient(1, std::move(of_positions));
    }
    auto of_tokens = make(m_.vocabulary * m_.hidden * element_);
    dx.reset();
    if (m_.tied) {  // autograd adds the two into a third
      auto sum = make(m_.vocabulary * m_.hidden * element_);
      waiting.reset();
      of_tokens = std::move(sum);
    }
    memory_.gradient(0, std::move(of_tokens));
  }

  const PlanModel& m_;
  PassSink& memory_;
  const std::int64_t segments_, samples_, element_, tokens_, wide_;
  Checkpoints inputs_;
};

// Any model: its units one after the other, each keeping what its layer's operators save with fused attention and
// without dropout. In widths of tokens * hidden elements.
class LayeredPass {
 public:
  LayeredPass(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
              PassSink& memory)
      : m_(model),
        memory_(memory),
        parameters_(parameters),
        element_(batch.element),
        tokens_(batch.samples * model.sequence),
        wide_(tokens_ * model.hidden * batch.element),
        checkpoints_(memory, batch.inputs, wide_) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].unit.empty())
        root_.push_back(i);
      else if (layers_.empty() || parameters[layers_.back().front()].unit != parameters[i].unit)
        layers_.push_back({i});
      else
        layers_.back().push_back(i);
    }
    // A segment a layer of the model is one a layer of the encoder and of the decoder.
    const auto count = static_cast<std::int64_t>(layers_.size());
    segments_ = batch.segments == model.layers ? count : std::min(batch.segments, count);
  }

  void run() {
    use(root_);
    auto x = memory_.make(wide_);
    const auto count = static_cast<std::int64_t>(layers_.size());
    std::vector<Tensor> kept, inputs;  // of layers that run once; with segments, of the one at work
    for (std::int64_t i = 0; i < count; ++i) {
      if (segments_ == 0) inputs.push_back(x);
      if (starts_segment(i)) checkpoints_.keep(x);
      auto inside = layer(i);
      if (segments_ == 0) kept.push_back(std::move(inside));
      x = memory_.make(wide_);
      if (segments_ > 0 && (i + 1 == count || starts_segment(i + 1))) checkpoints_.first_run_ended();
    }
    use(root_);
    auto norm = memory_.make(wide_), logits = memory_.make(tokens_ * m_.vocabulary * element_);
    memory_.begin_backward();
    auto slope = memory_.make(tokens_ * m_.vocabulary * element_);
    logits.reset();
    use(root_);
    auto dx = memory_.make(wide_);
    slope.reset(), norm.reset(), x.reset();
    for (auto i = count; i-- > 0;) {
      if (segments_ > 0 && kept.empty()) {
        auto begin = i;
        while (!starts_segment(begin)) --begin;
        inputs.push_back(checkpoints_.take());
        for (auto k = begin; k <= i; ++k) {
          kept.push_back(layer(k));
          if (k < i) inputs.push_back(memory_.make(wide_));
        }
      } else {
        use(layers_[static_cast<std::size_t>(i)]);
      }
      {
        auto inside = memory_.make(inner_wide()), of_result = memory_.make(wide_);
        gradients(layers_[static_cast<std::size_t>(i)]);
      }
      kept.pop_back();
      inputs.pop_back();
    }
    gradients(root_);
    memory_.end_backward();
  }

 private:
  // The part-th of S segments of L layers begins at part * L / S, rounded down.
  bool starts_segment(std::int64_t layer) const {
    const auto count = static_cast<std::int64_t>(layers_.size());
    const auto part = (layer * segments_ + count - 1) / count;
    return part < segments_ && part * count / segments_ == layer;
  }
  std::int64_t inner_wide() const { return tokens_ * m_.mlp_width() * element_; }
  // norm, query, key, value, attention, middle, norm; the MLP's two, or four where it is gated.
  Tensor layer(std::int64_t i) {
    use(layers_[static_cast<std::size_t>(i)]);
    const bool llama = m_.kind == PlanModel::Kind::Llama;
    const double kv = llama && m_.kv_heads > 0 ? static_cast<double>(m_.kv_heads) / static_cast<double>(m_.heads) : 1;
    const double attention = m_.kind == PlanModel::Kind::T5 && m_.head_width > 0
                                 ? static_cast<double>(m_.heads * m_.head_width) / static_cast<double>(m_.hidden)
                                 : 1;
    const double rotated = llama ? 1 + kv : 0;
    const double widths = 3 + attention * (2 + 2 * kv) + rotated;
    return memory_.make(static_cast<std::int64_t>(widths * static_cast<double>(wide_)) +
                        (llama ? 4 : 2) * inner_wide());
  }
  void use(const std::vector<std::size_t>& members) {
    for (const auto i : members) memory_.use({i});
  }
  void gradients(const std::vector<std::size_t>& members) {
    for (auto i = members.size(); i-- > 0;)
      memory_.gradient(members[i], memory_.make(parameters_[members[i]].numel * element_));
  }

  const PlanModel& m_;
  PassSink& memory_;
  const std::vector<Parameter>& parameters_;
  std::int64_t segments_ = 0;
  const std::int64_t element_, tokens_, wide_;
  Checkpoints checkpoints_;
  std::vector<std::size_t> root_;
  std::vector<std::vector<std::size_t>> layers_;
};

}  // namespace

std::int64_t segments_of(const Options& options, std::int64_t layers) {
  const auto& activations = options.settings().activations;
  const bool split = options.effective()["activation_checkpointing.partition_activations"] == "true";
  if (!activations.checkpointing && !split) return 0;
  return activations.num_checkpoints > 0 ? std::min(activations.num_checkpoints, layers) : layers;
}

Tier checkpoint_tier(const config::ActivationSettings& activations) {
  return !activations.file_path.empty() ? Tier::File : activations.to_host ? Tier::Host : Tier::Device;
}

void run_micro_batch(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
                     PassSink& memory) {
  if (model.kind == PlanModel::Kind::Gpt)
    GptPass(model, batch, memory).run();
  else
    LayeredPass(model, parameters, batch, memory).run();
}

}  // namespace zero::planning
