// The other direction of hf_config.cpp: config.json of a configuration; and configurations by name.
#include <set>
#include <stdexcept>
#include <utility>

#include <nlohmann/json.hpp>

#include "models/hf_config.h"

namespace models {
namespace {

using Json = nlohmann::ordered_json;

Json token(std::int64_t token) { return token < 0 ? Json() : Json(token); }

const char* name_of(Activation activation) {
  return activation == Activation::Gelu ? "gelu" : activation == Activation::GeluTanh ? "gelu_new" : "relu";
}

Json fields_of(const GptConfig& c) {
  return {{"vocab_size", c.vocabulary},
          {"n_positions", c.sequence},
          {"n_embd", c.hidden},
          {"n_layer", c.layers},
          {"n_head", c.heads},
          {"n_inner", nullptr},
          {"resid_pdrop", c.dropout},
          {"embd_pdrop", c.dropout},
          {"attn_pdrop", c.dropout},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", 1e-5},
          {"initializer_range", c.deviation},
          {"tie_word_embeddings", c.tied_output}};
}

Json fields_of(const LlamaConfig& c) {
  Json rope = {{"rope_theta", c.rope_theta}, {"rope_type", "default"}};
  if (c.rope_scaling) {
    rope["factor"] = c.rope_scaling->factor;
    rope["rope_type"] = "linear";
    if (c.rope_scaling->kind == RopeScaling::Kind::Llama3) {
      rope["rope_type"] = "llama3";
      rope["low_freq_factor"] = c.rope_scaling->low;
      rope["high_freq_factor"] = c.rope_scaling->high;
      rope["original_max_position_embeddings"] = c.rope_scaling->original_sequence;
    }
  }
  return {{"vocab_size", c.vocabulary},
          {"hidden_size", c.hidden},
          {"intermediate_size", c.inner},
          {"num_hidden_layers", c.layers},
          {"num_attention_heads", c.heads},
          {"num_key_value_heads", c.kv_heads},
          {"head_dim", c.width()},
          {"hidden_act", "silu"},
          {"max_position_embeddings", c.sequence},
          {"initializer_range", c.deviation},
          {"rms_norm_eps", c.norm_epsilon},
          {"rope_parameters", rope},
          {"attention_bias", c.attention_bias},
          {"attention_dropout", c.attention_dropout},
          {"mlp_bias", c.mlp_bias},
          {"tie_word_embeddings", c.tied_output}};
}

Json fields_of(const BertConfig& c) {
  return {{"vocab_size", c.vocabulary},
          {"hidden_size", c.hidden},
          {"num_hidden_layers", c.layers},
          {"num_attention_heads", c.heads},
          {"intermediate_size", c.inner},
          {"hidden_act", name_of(c.activation)},
          {"hidden_dropout_prob", c.dropout},
          {"attention_probs_dropout_prob", c.attention_dropout},
          {"classifier_dropout", c.classifier_dropout < 0 ? Json() : Json(c.classifier_dropout)},
          {"max_position_embeddings", c.sequence},
          {"type_vocab_size", c.token_types},
          {"initializer_range", c.deviation},
          {"layer_norm_eps", c.norm_epsilon},
          {"tie_word_embeddings", c.tied_output}};
}

Json fields_of(const T5Config& c) {
  const std::string kind = c.activation == Activation::GeluTanh && c.gated ? "gelu" : name_of(c.activation);
  return {{"vocab_size", c.vocabulary},
          {"d_model", c.hidden},
          {"d_kv", c.head_width},
          {"d_ff", c.inner},
          {"num_layers", c.encoder_layers},
          {"num_decoder_layers", c.decoder_layers},
          {"num_heads", c.heads},
          {"relative_attention_num_buckets", c.buckets},
          {"relative_attention_max_distance", c.max_distance},
          {"dropout_rate", c.dropout},
          {"layer_norm_epsilon", c.norm_epsilon},
          {"initializer_factor", c.factor},
          {"feed_forward_proj", (c.gated ? "gated-" : "") + kind},
          {"is_encoder_decoder", true},
          {"tie_word_embeddings", c.tied_output},
          {"scale_decoder_outputs", c.scaled_output},
          {"decoder_start_token_id", c.start_token}};
}

Json fields_of(const VitConfig& c) {
  return {{"hidden_size", c.hidden},
          {"num_hidden_layers", c.layers},
          {"num_attention_heads", c.heads},
          {"intermediate_size", c.inner},
          {"hidden_act", name_of(c.activation)},
          {"hidden_dropout_prob", c.dropout},
          {"attention_probs_dropout_prob", c.attention_dropout},
          {"initializer_range", c.deviation},
          {"layer_norm_eps", c.norm_epsilon},
          {"qkv_bias", c.qkv_bias},
          {"image_size", c.image},
          {"patch_size", c.patch},
          {"num_channels", c.channels}};
}

struct NamedConfig {
  std::string name;
  AnyConfig config;
};

LlamaConfig llama(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t kv_heads,
                  std::int64_t inner, std::int64_t sequence) {
  LlamaConfig c;
  c.layers = layers, c.hidden = hidden, c.heads = heads, c.kv_heads = kv_heads, c.inner = inner;
  c.sequence = sequence, c.vocabulary = 32000, c.norm_epsilon = 1e-5;
  return c;
}
LlamaConfig tied(LlamaConfig c) {
  c.tied_output = true;
  return c;
}
LlamaConfig llama_32_1b() {
  LlamaConfig c = tied(llama(16, 2048, 32, 8, 8192, 131072));
  c.vocabulary = 128256, c.rope_theta = 500000;
  c.rope_scaling = RopeScaling{.factor = 32};
  return c;
}
BertConfig bert(std::int64_t layers, std::int64_t hidden) {
  BertConfig c;
  c.layers = layers, c.hidden = hidden, c.heads = hidden / 64, c.inner = 4 * hidden;
  return c;
}
T5Config t5(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t inner, bool first) {
  T5Config c;
  c.encoder_layers = c.decoder_layers = layers, c.hidden = hidden, c.heads = heads, c.head_width = 64, c.inner = inner;
  c.gated = !first, c.activation = first ? Activation::Relu : Activation::GeluTanh;
  c.tied_output = c.scaled_output = first;
  return c;
}
VitConfig vit(std::int64_t layers, std::int64_t hidden) {
  VitConfig c;
  c.layers = layers, c.hidden = hidden, c.heads = hidden / 64, c.inner = 4 * hidden, c.labels = 1000;
  return c;
}

// Published shapes. Llamas of 15 to 110 million parameters are those of llama2.c.
const std::vector<NamedConfig>& named() {
  static const std::vector<NamedConfig> all = [] {
    std::vector<NamedConfig> models;
    for (auto& name : GptConfig::preset_names()) models.push_back({name, GptConfig::preset(name)});
    const std::vector<NamedConfig> others = {{"llama-15m", tied(llama(6, 288, 6, 6, 768, 256))},
                                             {"llama-42m", tied(llama(8, 512, 8, 8, 1376, 1024))},
                                             {"llama-110m", tied(llama(12, 768, 12, 12, 2048, 1024))},
                                             {"tinyllama-1.1b", llama(22, 2048, 32, 4, 5632, 2048)},
                                             {"llama-3.2-1b", llama_32_1b()},
                                             {"llama-2-7b", llama(32, 4096, 32, 32, 11008, 4096)},
                                             {"bert-tiny", bert(2, 128)},
                                             {"bert-mini", bert(4, 256)},
                                             {"bert-small", bert(4, 512)},
                                             {"bert-medium", bert(8, 512)},
                                             {"bert-base", bert(12, 768)},
                                             {"bert-large", bert(24, 1024)},
                                             {"t5-small", t5(6, 512, 8, 2048, true)},
                                             {"t5-base", t5(12, 768, 12, 3072, true)},
                                             {"t5-large", t5(24, 1024, 16, 4096, true)},
                                             {"t5-v1.1-small", t5(8, 512, 6, 1024, false)},
                                             {"t5-v1.1-base", t5(12, 768, 12, 2048, false)},
                                             {"vit-tiny", vit(12, 192)},
                                             {"vit-small", vit(12, 384)},
                                             {"vit-base", vit(12, 768)},
                                             {"vit-large", vit(24, 1024)}};
    models.insert(models.end(), others.begin(), others.end());
    return models;
  }();
  return all;
}

}  // namespace

std::string hf_config_text(const HfConfig& config, const std::string& dtype) {
  constexpr const char* heads[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM",
                                   "T5ForConditionalGeneration", "ViTForImageClassification"};
  Json all = {{"architectures", {config.architecture.empty() ? heads[config.config.index()] : config.architecture}},
              {"model_type", model_type(config.config)},
              {"dtype", dtype}};
  all.update(std::visit([](const auto& c) { return fields_of(c); }, config.config));
  // Names of classes are kept also where the model has no head for them.
  std::int64_t pad = config.pad_token, labels = static_cast<std::int64_t>(config.labels.size());
  std::vector<std::int64_t> ends = config.eos_tokens;
  if (const auto* c = std::get_if<LlamaConfig>(&config.config)) pad = c->pad_token;
  if (const auto* c = std::get_if<BertConfig>(&config.config)) pad = c->pad_token, labels = c->labels;
  if (const auto* c = std::get_if<VitConfig>(&config.config)) labels = c->labels;
  if (const auto* c = std::get_if<T5Config>(&config.config)) {
    pad = c->pad_token;
    if (ends.empty() && c->eos_token >= 0) ends = {c->eos_token};
  }
  all["bos_token_id"] = token(config.bos_token);
  all["eos_token_id"] = ends.empty() ? Json() : ends.size() == 1 ? Json(ends.front()) : Json(ends);
  all["pad_token_id"] = token(pad);
  if (labels > 0) {
    // In the order of the numbers. To look a key up in such an object takes as long as it is large.
    Json::object_t names, numbers;
    std::set<std::string> known;
    for (std::int64_t i = 0; i < labels; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto name = at < config.labels.size() ? config.labels[at] : "LABEL_" + std::to_string(i);
      names.emplace_back(std::to_string(i), name);
      if (known.insert(name).second) numbers.emplace_back(name, i);
    }
    all["id2label"] = names;
    all["label2id"] = numbers;
  }
  return all.dump(2) + "\n";
}

HfConfig hf_preset(const std::string& name) {
  for (const auto& known : named())
    if (name == known.name) return {.config = known.config, .architecture = ""};
  std::string names;
  for (const auto& known : named()) names += (names.empty() ? "" : ", ") + known.name;
  throw std::invalid_argument("[hf_preset] got \"" + name + "\", expected one of " + names);
}

std::vector<std::string> hf_preset_names() {
  std::vector<std::string> names;
  for (const auto& known : named()) names.emplace_back(known.name);
  return names;
}

}  // namespace models
