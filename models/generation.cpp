// See generation.h.
#include "models/generation.h"

#include <ATen/CPUGeneratorImpl.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace models {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) : model_(model), was_training_(model.is_training()) {
    for (const auto& module : model.modules(/*include_self=*/false)) parts_.emplace_back(module, module->is_training());
    model_.eval();
  }
  // Parts of a model may be in evaluation mode while it trains. train() goes down to all parts, which follow theirs.
  ~EvaluationMode() {
    model_.train(was_training_);
    for (const auto& [module, was_training] : parts_)
      if (module->is_training() != was_training) module->train(was_training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& model_;
  const bool was_training_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> parts_;
};

at::Tensor chosen(const at::Tensor& logits, const Sampling& sampling, at::Generator& generator) {
  const at::Tensor wide = logits.to(torch::kFloat32);
  if (sampling.temperature <= 0) return wide.argmax(-1, true);
  const at::Tensor likely = torch::softmax(filtered_logits(wide.cpu(), sampling), -1);
  return torch::multinomial(likely, 1, false, generator).to(logits.device());
}

}  // namespace

void Sampling::validate() const {
  std::string faults;
  if (!(temperature >= 0)) faults += "\n  temperature: got " + std::to_string(temperature) + ", expected at least 0";
  if (top_k < 0) faults += "\n  top_k: got " + std::to_string(top_k) + ", expected at least 0";
  if (!(top_p > 0 && top_p <= 1)) faults += "\n  top_p: got " + std::to_string(top_p) + ", expected above 0, up to 1";
  if (!faults.empty()) throw std::invalid_argument("[Sampling]" + faults);
}

at::Tensor filtered_logits(const at::Tensor& logits, const Sampling& sampling) {
  at::Tensor next = logits / sampling.temperature;
  if (sampling.top_k > 0 && sampling.top_k < next.size(-1)) {
    const at::Tensor least = std::get<0>(next.topk(sampling.top_k, -1)).narrow(-1, sampling.top_k - 1, 1);
    next = next.masked_fill(next < least, kNever);
  }
  if (sampling.top_p < 1) {
    const auto [ordered, places] = next.sort(-1);  // the least likely first
    at::Tensor left_out = torch::softmax(ordered, -1).cumsum(-1).le(1 - sampling.top_p);
    left_out.select(-1, -1).fill_(false);
    next = next.masked_fill(left_out.scatter(-1, places, left_out), kNever);
  }
  return next;
}

at::Tensor generate_by(torch::nn::Module& model, const NextLogits& next, at::Tensor tokens, std::int64_t count,
                       const Sampling& sampling) {
  sampling.validate();
  if (tokens.dim() != 2 || tokens.size(1) < 1 || count < 0)
    throw std::invalid_argument("[generate] got tokens of " + std::to_string(tokens.dim()) + " dimensions and count " +
                                std::to_string(count) + ", expected [batch, time >= 1] and at least 0");
  const torch::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(sampling.seed);
  at::Tensor newest = tokens, ended = torch::zeros({tokens.size(0), 1}, tokens.options().dtype(torch::kBool));
  for (std::int64_t k = 0; k < count; ++k) {
    newest = chosen(next(newest), sampling, generator);
    if (!sampling.eos_tokens.empty()) {
      newest = newest.masked_fill(ended, sampling.pad_token);
      for (const std::int64_t eos : sampling.eos_tokens) ended = ended.logical_or(newest.eq(eos));
    }
    tokens = torch::cat({tokens, newest}, 1);
    const bool all = !sampling.eos_tokens.empty() && ended.all().item<bool>();
    if (sampling.stop ? sampling.stop(all) : all) break;
  }
  return tokens;
}

}  // namespace models
