#include "tools/support/gpt_mesh.h"

#include <string>
#include <tuple>

#include <zero/errors.h>
#include <zero/moe.h>
#include <zero/sp.h>
#include <zero/tp.h>

#include "config/document.h"
#include "config/settings.h"

namespace zero::cli {

Options with_heads_whole(const Options& options, const models::GptConfig& model) {
  const auto& document = options.document();
  const auto& mesh = options.settings().mesh;
  const bool planned = document.is_set("tensor_parallel.partition_config");
  const std::int64_t ranks = std::int64_t{planned ? 1 : mesh.tensor} * mesh.sequence;
  if (model.heads < ranks)
    throw ConfigError("[Options] got " +
                      (planned || mesh.tensor == 1
                           ? std::string()
                           : "tensor_parallel.autotp_size " + std::to_string(mesh.tensor) + " x ") +
                      "sequence_parallel_size " + std::to_string(mesh.sequence) + " and " +
                      std::to_string(model.heads) + (model.heads == 1 ? " head" : " heads") +
                      ", expected at least one head for each rank. Hint: choose degrees whose product is at most " +
                      std::to_string(model.heads) + ".");
  if (mesh.tensor == 1 || planned) return options;
  const std::string width = std::to_string(model.hidden / model.heads);
  const char* const rule = "rule: the heads of the built-in GPT";
  auto result = options.with("tensor_parallel.partition_config",
                             R"({"layer_specs": [{"patterns": ["blocks\\.\\d+\\.qkv\\.weight"],
        "partition_type": "column", "shape": [3, -1], "multiple": )" +
                                 width + R"(}, {"patterns": ["blocks\\.\\d+\\.projection\\.weight"],
        "partition_type": "row", "multiple": )" +
                                 width + "}]}",
                             rule);
  if (!document.is_set("tensor_parallel.preset_model"))
    result = result.with("tensor_parallel.preset_model", "gpt", rule);
  return result;
}

std::int64_t elements_of(const torch::nn::Module& model) {
  std::int64_t sum = 0;
  for (const at::Tensor& parameter : model.parameters()) sum += parameter.numel();
  // Experts of other ranks are registered too.
  for (const auto& module : model.modules()) {
    const auto* const layer = dynamic_cast<const ExpertLayer*>(module.get());
    if (layer == nullptr || layer->ep_size() == 1) continue;
    std::int64_t of_experts = 0;
    for (const at::Tensor& parameter : module->named_children()["experts"]->parameters())
      of_experts += parameter.numel();
    sum -= of_experts / layer->ep_size() * (layer->ep_size() - 1);
  }
  return sum;
}

GptShare::GptShare(models::Gpt model, const Mesh& mesh, const Options& options)
    : model_(std::move(model)),
      mesh_(mesh),
      divided_logits_(options.settings().mesh.plan.vocab_parallel_lm_head && mesh.size("tp") > 1),
      aux_factor_(options.settings().model.experts.aux_loss) {
  std::tie(begin_, end_) = mesh.tokens(model_->config().sequence);
  divide_sequences(true);
}

void GptShare::divide_sequences(bool divide) {
  if (mesh_.size("sp") == 1) return;
  model_->first_position(divide ? begin_ : 0);
  if (!divide) return model_->attend_by(nullptr);
  // [batch, heads, time, width] here, [batch, time, heads, width] there.
  model_->attend_by([&mesh = mesh_, tokens = model_->config().sequence](const auto& local, const at::Tensor& q,
                                                                        const at::Tensor& k, const at::Tensor& v) {
    const auto swapped = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
      return local(a.transpose(1, 2), b.transpose(1, 2), c.transpose(1, 2)).transpose(1, 2);
    };
    return attention_over_heads(mesh, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), swapped, tokens)
        .transpose(1, 2);
  });
}

at::Tensor GptShare::loss_of(const at::Tensor& samples) {
  const auto length = end_ - begin_;
  const auto tokens = samples.narrow(1, begin_, length), targets = samples.narrow(1, begin_ + 1, length);
  if (!divided_logits_) return model_->forward(tokens, targets);
  return tp::cross_entropy(model_->forward(tokens).flatten(0, 1), targets.flatten(), mesh_.group("tp"),
                           {.vocabulary = model_->config().vocabulary});
}

void GptShare::backward(Engine& engine, const at::Tensor& cross_entropy, std::int64_t samples) {
  auto loss = cross_entropy;
  if (const auto aux = model_->take_aux_loss(); aux.defined()) {
    loss = loss + aux_factor_ * aux;
    aux_loss_ = aux.detach();
  }
  // The mean over ranks is the mean over tokens if all ranks have equally many.
  if (model_->config().sequence % mesh_.size("sp") == 0)
    engine.backward(loss);
  else
    engine.backward(loss * static_cast<double>(tokens_in(samples)), {.tokens = tokens_in(samples)});
}

}  // namespace zero::cli
