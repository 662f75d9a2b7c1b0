// See model_pass.h.
#include "plan/model_pass.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"
#include "plan/model.h"

namespace zero::planning {
namespace {

// Inputs of checkpointed segments. They stay on the device, or are offloaded from the end of the first run until the
// segment is recomputed. With `parts`, this rank keeps a part of each. A GPU fetches them one segment ahead, and all
// ranks of a tensor-parallel group gather parts one segment ahead.
class Checkpoints {
 public:
  Checkpoints(PassSink& memory, Tier tier, int parts) : memory_(memory), tier_(tier), parts_(parts) {}
  void keep(const Tensor& input, std::int64_t bytes) { inputs_.push_back({input, nullptr, bytes}); }
  void first_run_ended() {
    auto& last = inputs_.back();
    if (tier_ == Tier::Device && parts_ == 1) return;
    if (parts_ > 1) last.part = memory_.make(kept(last));
    last.whole.reset();
    if (tier_ == Tier::Device) return;
    memory_.put_away(tier_, kept(last));
    last.part.reset();
  }
  bool empty() const { return inputs_.empty(); }
  std::int64_t bytes_of_last() const { return inputs_.back().bytes; }
  // Removes and returns the input of the last remaining segment.
  Tensor take() {
    bring_back(inputs_.size() - 1);
    auto input = std::move(inputs_.back().whole);
    inputs_.pop_back();
    const bool ahead = memory_.on_gpu() || (parts_ > 1 && tier_ == Tier::Device);
    if (ahead && !inputs_.empty()) bring_back(inputs_.size() - 1);
    return input;
  }

 private:
  struct Input {
    Tensor whole;  // null: divided or offloaded
    Tensor part;   // null: offloaded, or not divided
    std::int64_t bytes;
  };
  std::int64_t kept(const Input& input) const {
    return parts_ == 1 ? input.bytes : (input.bytes + 8 * parts_ - 1) / (8 * parts_) * 8;
  }
  void bring_back(std::size_t segment) {
    auto& input = inputs_[segment];
    if (input.whole) return;
    if (tier_ != Tier::Device) {
      if (parts_ > 1)
        input.part = memory_.make(kept(input));
      else
        input.whole = memory_.make(input.bytes);
      memory_.bring_back(tier_, kept(input));
    }
    if (parts_ > 1) input.whole = memory_.make(kept(input) * parts_);
    input.part.reset();
  }

  PassSink& memory_;
  const Tier tier_;
  const int parts_;
  std::vector<Input> inputs_;
};

// Checks the calls of a model's description and forwards them to the sink.
class DescribedPass final : public PlanPass {
 public:
  DescribedPass(std::size_t num_parameters, const MicroBatch& batch, PassSink& memory)
      : memory_(memory), num_parameters_(num_parameters), checkpoints_(memory, batch.inputs, batch.input_parts) {}

  void allocate(std::int64_t tensor, std::int64_t bytes) override {
    check(bytes >= 0, "bytes", bytes, "at least 0");
    add(tensor, memory_.make(bytes), bytes);
  }
  void release(std::int64_t tensor) override {
    known(tensor).released = true;
    known(tensor).tensor.reset();
  }
  void use(std::size_t first, std::size_t count) override {
    check(first < num_parameters_ && count <= num_parameters_ - first, "parameter", first + count - 1,
          base::join("less than ", num_parameters_));
    std::vector<std::size_t> parameters(count);
    std::iota(parameters.begin(), parameters.end(), first);
    memory_.use(std::span<const std::size_t>(parameters));
  }
  void begin_segment(std::int64_t input) override { checkpoints_.keep(known(input).tensor, known(input).bytes); }
  void end_segment() override {
    check(!checkpoints_.empty(), "segment", 0, "a segment that has begun");
    checkpoints_.first_run_ended();
  }
  void rerun_segment(std::int64_t input) override {
    check(!checkpoints_.empty(), "segment", 0, "a segment that has run");
    const auto bytes = checkpoints_.bytes_of_last();
    add(input, checkpoints_.take(), bytes);
  }
  void begin_backward() override { memory_.begin_backward(); }
  void gradient(std::size_t parameter, std::int64_t tensor) override {
    check(parameter < num_parameters_, "parameter", parameter, base::join("less than ", num_parameters_));
    auto& handed_over = known(tensor);
    check(!handed_over.released, "tensor", tensor, "one that was not released");
    handed_over.released = true;
    memory_.gradient(parameter, std::move(handed_over.tensor));
  }
  void end_backward() override { memory_.end_backward(); }

 private:
  struct Numbered {
    Tensor tensor;
    std::int64_t bytes = 0;
    bool released = false;
  };
  template <class Number>
  static void check(bool good, const char* what, Number got, const std::string& expected) {
    if (!good) throw ConfigError(base::join("[PlanModel::pass] got ", what, " ", got, ", expected ", expected));
  }
  void add(std::int64_t number, Tensor tensor, std::int64_t bytes) {
    check(number == static_cast<std::int64_t>(tensors_.size()), "tensor", number, std::to_string(tensors_.size()));
    tensors_.push_back({std::move(tensor), bytes});
  }
  Numbered& known(std::int64_t tensor) {
    check(tensor >= 0 && tensor < static_cast<std::int64_t>(tensors_.size()), "tensor", tensor,
          "one that was allocated");
    return tensors_[static_cast<std::size_t>(tensor)];
  }

  PassSink& memory_;
  const std::size_t num_parameters_;
  Checkpoints checkpoints_;
  std::vector<Numbered> tensors_;
};

// For models without a description: layers run one after the other, and each saves what its operators save with fused
// attention and without dropout. Sizes are multiples of tokens * hidden elements.
class LayeredPass {
 public:
  LayeredPass(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
              PassSink& memory)
      : m_(model),
        memory_(memory),
        parameters_(parameters),
        element_(batch.element),
        share_(batch.share),
        tokens_(batch.samples * (share_.tokens > 0 ? share_.tokens : model.sequence)),
        wide_(tokens_ * model.hidden * batch.element),
        checkpoints_(memory, batch.inputs, batch.input_parts),
        fp32_(batch.fp32) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (layer_of(parameters[i]).empty())
        root_.push_back(i);
      else if (layers_.empty() || layer_of(parameters[layers_.back().front()]) != layer_of(parameters[i]))
        layers_.push_back({i});
      else
        layers_.back().push_back(i);
    }
    // One segment per layer of the model means one per encoder layer and one per decoder layer.
    const auto count = static_cast<std::int64_t>(layers_.size());
    segments_ = batch.segments == model.layers ? count : std::min(batch.segments, count);
  }

  void run() {
    use(root_);
    auto x = memory_.make(wide_);
    const auto count = static_cast<std::int64_t>(layers_.size());
    std::vector<Tensor> kept, inputs;  // of all layers; with segments, of the current segment
    for (std::int64_t i = 0; i < count; ++i) {
      if (segments_ == 0) inputs.push_back(x);
      if (starts_segment(i)) checkpoints_.keep(x, wide_);
      auto inside = layer(i);
      if (segments_ == 0) kept.push_back(std::move(inside));
      x = memory_.make(wide_);
      if (segments_ > 0 && (i + 1 == count || starts_segment(i + 1))) checkpoints_.first_run_ended();
    }
    use(root_);
    const auto rows = share_.gathered_logits ? m_.vocabulary : part(share_.vocabulary, m_.vocabulary);
    auto norm = memory_.make((1 + copying_norms(root_)) * wide_), logits = memory_.make(tokens_ * rows * element_);
    memory_.begin_backward();
    auto slope = memory_.make(tokens_ * rows * element_);
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
        use_in_backward(i);
      }
      {
        auto inside = memory_.make(has_experts(m_, i) ? expert_rows() * inner_of_row() : inner_wide()),
             of_result = memory_.make(wide_);
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
  static std::int64_t part(double fraction, std::int64_t all) {
    return static_cast<std::int64_t>(fraction * static_cast<double>(all) + 0.5);
  }
  // With experts, these are used after what is before them and, in backward, before.
  void use_in_backward(std::int64_t layer) {
    auto members = layers_[static_cast<std::size_t>(layer)];
    if (has_experts(m_, layer)) std::reverse(members.begin(), members.end());
    use(members);
  }
  // Norms of GPT and BERT with parameters that stay fp32 save an fp32 copy of their 16-bit input (models/layers.h).
  std::int64_t copying_norms(const std::vector<std::size_t>& members) const {
    if (fp32_.empty() || element_ == 4 || (m_.kind != PlanModel::Kind::Gpt && m_.kind != PlanModel::Kind::Bert))
      return 0;
    std::set<std::string> norms;
    for (const auto i : members) {
      const auto& name = parameters_[i].name;
      const auto module = name.substr(0, name.rfind('.'));
      if (fp32_[i] && (module.find("norm") != std::string::npos || module.find("Norm") != std::string::npos))
        norms.insert(module);
    }
    return static_cast<std::int64_t>(norms.size());
  }
  std::int64_t expert_rows() const { return kept_rows(m_.experts, tokens_); }
  std::int64_t inner_of_row() const { return m_.mlp_width() * element_; }
  // What a layer's experts save in place of the MLP's two tensors: rows to and from them, two inner tensors of each
  // row, the gate's input, logits and probabilities in fp32; with a residual expert, its tensors and both results.
  std::int64_t of_experts() const {
    const auto rows = expert_rows() * (2 * m_.hidden * element_ + 2 * inner_of_row());
    const auto gate = tokens_ * 4 * (2 * m_.experts.count + (element_ < 4 ? m_.hidden : 0));
    return rows + gate + (m_.experts.residual ? 2 * inner_wide() + 2 * wide_ : 0);
  }
  std::int64_t inner_wide() const { return tokens_ * part(share_.inner, m_.mlp_width()) * element_; }
  // Saves norm, query, key, value, attention, middle, norm, and the MLP's two tensors, or four of a gated MLP.
  Tensor layer(std::int64_t i) {
    use(layers_[static_cast<std::size_t>(i)]);
    const bool llama = m_.kind == PlanModel::Kind::Llama;
    const double kv = llama && m_.kv_heads > 0 ? static_cast<double>(m_.kv_heads) / static_cast<double>(m_.heads) : 1;
    const double attention = m_.kind == PlanModel::Kind::T5 && m_.head_width > 0
                                 ? static_cast<double>(m_.heads * m_.head_width) / static_cast<double>(m_.hidden)
                                 : 1;
    const double rotated = llama ? 1 + kv : 0;
    const double widths = 3 + static_cast<double>(copying_norms(layers_[static_cast<std::size_t>(i)])) +
                          share_.heads * (attention * (2 + 2 * kv) + rotated);
    return memory_.make(static_cast<std::int64_t>(widths * static_cast<double>(wide_)) +
                        (has_experts(m_, i) ? of_experts() : (llama ? 4 : 2) * inner_wide()));
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
  const std::int64_t element_;
  const Share share_;
  const std::int64_t tokens_, wide_;
  Checkpoints checkpoints_;
  const std::vector<bool>& fp32_;
  std::vector<std::size_t> root_;
  std::vector<std::vector<std::size_t>> layers_;
};

}  // namespace

std::int64_t segments_of(const Options& options, std::int64_t layers) {
  const auto& activations = options.settings().activations;
  if (!activations.checkpointing && !activations.partition) return 0;
  return activations.num_checkpoints > 0 ? std::min(activations.num_checkpoints, layers) : layers;
}

Tier checkpoint_tier(const config::ActivationSettings& activations) {
  return !activations.file_path.empty() ? Tier::File : activations.to_host ? Tier::Host : Tier::Device;
}

void run_micro_batch(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
                     PassSink& memory) {
  if (!model.pass) return LayeredPass(model, parameters, batch, memory).run();
  DescribedPass described(parameters.size(), batch, memory);
  model.pass(model,
             {.samples = batch.samples,
              .segments = batch.segments,
              .element = batch.element,
              .gpu = memory.on_gpu(),
              .tokens = batch.share.tokens,
              .heads = batch.share.heads,
              .inner = batch.share.inner,
              .vocabulary = batch.share.vocabulary,
              .gathered_logits = batch.share.gathered_logits,
              .fp32 = batch.fp32},
             described);
}

}  // namespace zero::planning
