// See model_config.h. Fields and defaults are those of transformers' configuration_gpt2.py, _llama.py, _bert.py and
// _t5.py.
#include "interchange/model_config.h"

#include <zero/errors.h>
#include <nlohmann/json.hpp>

#include "base/check.h"

namespace zero::interchange {
namespace {

using Json = nlohmann::ordered_json;

// What a model's files say of it.
struct Described {
  Json known = {};           // told by names, shapes and the number of heads
  Json assumed = {};         // told by nothing: transformers' defaults, unless the user gives others
  bool ours = false;         // assumed is what the model computes with
  std::string missing = {};  // why there is no description
};

class Tensors {
 public:
  Tensors(const std::vector<OutTensor>& tensors, const std::map<std::string, std::string>& aliases)
      : aliases_(aliases) {
    for (const auto& tensor : tensors) by_name_[tensor.name] = &tensor;
  }
  bool has(const std::string& name) const { return by_name_.contains(name); }
  bool tied(const std::string& name) const { return aliases_.contains(name); }
  // A matrix's size; 0 if there is no such matrix.
  std::int64_t size(const std::string& name, std::size_t dim) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() || found->second->shape.size() != 2 ? 0 : found->second->shape[dim];
  }
  // Numbers from 0 that a name has between two texts.
  std::int64_t count(const std::string& before, const std::string& after) const {
    std::int64_t count = 0;
    while (has(before + std::to_string(count) + after)) ++count;
    return count;
  }
  const char* dtype(const std::string& name) const {
    const auto found = by_name_.find(name);
    const std::string dtype = found == by_name_.end() ? "F32" : found->second->dtype;
    return dtype == "BF16" ? "bfloat16" : dtype == "F16" ? "float16" : "float32";
  }

 private:
  std::map<std::string, const OutTensor*> by_name_;
  const std::map<std::string, std::string>& aliases_;
};

constexpr const char* kHeadsUnknown = "the number of attention heads is not known. Hint: --heads N";

void require_divisor(std::int64_t heads, std::int64_t width, const char* what) {
  if (width % heads != 0)
    throw ConfigError(base::join("[export] heads: got ", heads, ", expected a divisor of the ", what, " ", width));
}

Described gpt2(const Tensors& t, std::int64_t heads) {
  const std::string token = "transformer.wte.weight", position = "transformer.wpe.weight";
  const auto width = t.size(token, 1), inner = t.size("transformer.h.0.mlp.c_fc.weight", 1);
  if (width == 0 || t.size(position, 0) == 0 || inner == 0) return {.missing = "the names are not those of a GPT-2"};
  if (heads < 1) return {.missing = kHeadsUnknown};
  require_divisor(heads, width, "width");
  return {{{"architectures", {"GPT2LMHeadModel"}},
           {"model_type", "gpt2"},
           {"vocab_size", t.size(token, 0)},
           {"n_positions", t.size(position, 0)},
           {"n_embd", width},
           {"n_layer", t.count("transformer.h.", ".ln_1.weight")},
           {"n_head", heads},
           {"n_inner", inner},
           {"tie_word_embeddings", t.tied("lm_head.weight")},
           {"dtype", t.dtype(token)}},
          {{"activation_function", "gelu_new"},
           {"layer_norm_epsilon", 1e-5},
           {"bos_token_id", nullptr},
           {"eos_token_id", nullptr}},
          true};
}

Described llama(const Tensors& t, std::int64_t heads) {
  const std::string token = "model.embed_tokens.weight", layer = "model.layers.0.";
  const auto width = t.size(token, 1), queries = t.size(layer + "self_attn.q_proj.weight", 0);
  const auto keys = t.size(layer + "self_attn.k_proj.weight", 0), inner = t.size(layer + "mlp.gate_proj.weight", 0);
  const bool bias = t.has(layer + "self_attn.q_proj.bias");
  if (width == 0 || queries == 0 || keys == 0 || inner == 0 || bias != t.has(layer + "self_attn.o_proj.bias"))
    return {.missing = "the names are not those of a LlamaForCausalLM"};
  if (heads < 1) return {.missing = kHeadsUnknown};
  require_divisor(heads, width, "width");
  require_divisor(heads, queries, "rows of q_proj");
  const auto head = queries / heads;
  if (head % 2 != 0 || keys % head != 0)
    throw ConfigError(base::join("[export] heads: got ", heads, ", which makes heads of ", head,
                                 " rows, expected an even number that divides the ", keys, " rows of k_proj"));
  return {{{"architectures", {"LlamaForCausalLM"}},
           {"model_type", "llama"},
           {"vocab_size", t.size(token, 0)},
           {"hidden_size", width},
           {"intermediate_size", inner},
           {"num_hidden_layers", t.count("model.layers.", ".input_layernorm.weight")},
           {"num_attention_heads", heads},
           {"num_key_value_heads", keys / head},
           {"head_dim", head},
           {"attention_bias", bias},
           {"mlp_bias", t.has(layer + "mlp.gate_proj.bias")},
           {"tie_word_embeddings", t.tied("lm_head.weight")},
           {"dtype", t.dtype(token)}},
          {{"hidden_act", "silu"},
           {"rms_norm_eps", 1e-6},
           {"rope_parameters", {{"rope_theta", 10000.0}, {"rope_type", "default"}}},
           {"max_position_embeddings", 2048},
           {"bos_token_id", nullptr},
           {"eos_token_id", nullptr}}};
}

Described bert(const Tensors& t, std::int64_t heads) {
  const std::string embeddings = "bert.embeddings.", token = embeddings + "word_embeddings.weight";
  const auto width = t.size(token, 1), inner = t.size("bert.encoder.layer.0.intermediate.dense.weight", 0);
  const bool masked = t.has("cls.predictions.bias"), pairs = t.has("cls.seq_relationship.weight");
  const bool pooler = t.has("bert.pooler.dense.weight");
  // Heads of other tasks have names in common.
  if (width == 0 || inner == 0 || !masked || pairs != pooler)
    return {.missing = "the names are not those of a BertForMaskedLM or BertForPreTraining"};
  if (heads < 1) return {.missing = kHeadsUnknown};
  require_divisor(heads, width, "width");
  return {{{"architectures", {pairs ? "BertForPreTraining" : "BertForMaskedLM"}},
           {"model_type", "bert"},
           {"vocab_size", t.size(token, 0)},
           {"hidden_size", width},
           {"num_hidden_layers", t.count("bert.encoder.layer.", ".output.dense.weight")},
           {"num_attention_heads", heads},
           {"intermediate_size", inner},
           {"max_position_embeddings", t.size(embeddings + "position_embeddings.weight", 0)},
           {"type_vocab_size", t.size(embeddings + "token_type_embeddings.weight", 0)},
           {"tie_word_embeddings", t.tied("cls.predictions.decoder.weight")},
           {"dtype", t.dtype(token)}},
          {{"hidden_act", "gelu"}, {"layer_norm_eps", 1e-12}, {"pad_token_id", 0}}};
}

// The bias of positions has a column for each head.
Described t5(const Tensors& t, std::int64_t heads) {
  const std::string token = "shared.weight", layer = "encoder.block.0.layer.";
  const std::string positions = layer + "0.SelfAttention.relative_attention_bias.weight";
  const auto width = t.size(token, 1), own = t.size(positions, 1), rows = t.size(layer + "0.SelfAttention.q.weight", 0);
  const bool gated = t.has(layer + "1.DenseReluDense.wi_0.weight");
  const auto inner = t.size(layer + (gated ? "1.DenseReluDense.wi_0.weight" : "1.DenseReluDense.wi.weight"), 0);
  const auto decoders = t.count("decoder.block.", ".layer.0.SelfAttention.q.weight");
  if (width == 0 || own == 0 || inner == 0 || rows % own != 0 || decoders == 0)
    return {.missing = "the names are not those of a T5ForConditionalGeneration"};
  if (heads > 0 && heads != own)
    throw ConfigError(base::join("[export] heads: got ", heads, ", expected the ", own, " that ", positions, " has"));
  return {{{"architectures", {"T5ForConditionalGeneration"}},
           {"model_type", "t5"},
           {"vocab_size", t.size(token, 0)},
           {"d_model", width},
           {"d_kv", rows / own},
           {"d_ff", inner},
           {"num_layers", t.count("encoder.block.", ".layer.0.SelfAttention.q.weight")},
           {"num_decoder_layers", decoders},
           {"num_heads", own},
           {"relative_attention_num_buckets", t.size(positions, 0)},
           {"is_encoder_decoder", true},
           {"tie_word_embeddings", t.tied("lm_head.weight")},
           {"dtype", t.dtype(token)}},
          {{"feed_forward_proj", gated ? "gated-gelu" : "relu"},
           {"layer_norm_epsilon", 1e-6},
           {"relative_attention_max_distance", 128},
           {"decoder_start_token_id", 0},
           {"pad_token_id", 0},
           {"eos_token_id", 1}}};
}

// Puts "KEY=VALUE" into the fields. VALUE is JSON, else a text.
void give(Described& model, const std::string& field) {
  const auto equals = field.find('=');
  if (equals == std::string::npos || equals == 0)
    throw ConfigError("[export] config field: got \"" + field + "\", expected KEY=VALUE such as rms_norm_eps=1e-5");
  const auto key = field.substr(0, equals), text = field.substr(equals + 1);
  auto value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) value = text;
  if (model.known.contains(key) && model.known[key] != value)
    throw ConfigError("[export] config field: got " + key + "=" + text + ", expected " + model.known[key].dump() +
                      ", which the exported tensors have");
  if (model.known.contains(key)) return;
  // Older versions have it next to the other parameters of rotary embeddings.
  if (key == "rope_theta" && model.assumed.contains("rope_parameters"))
    model.assumed["rope_parameters"]["rope_theta"] = value;
  model.known[key] = value;
  model.assumed.erase(key);
}

}  // namespace

ModelConfig model_config(const std::string& map, const std::vector<OutTensor>& tensors,
                         const std::map<std::string, std::string>& aliases, const ExportOptions& options) {
  const Tensors all(tensors, aliases);
  Described model;
  if (map == "gpt2")
    model = gpt2(all, options.heads);
  else if (map == "llama")
    model = llama(all, options.heads);
  else if (map == "bert")
    model = bert(all, options.heads);
  else if (map == "t5")
    model = t5(all, options.heads);
  else
    model.missing = "copy the one of the model that the names are of";
  if (!options.prefix.empty()) model.missing = "the names have a prefix";
  if (!model.missing.empty()) return {"", "no config.json: " + model.missing};
  for (const auto& field : options.config) give(model, field);
  std::string assumed;
  for (const auto& [key, value] : model.assumed.items()) {
    assumed += (assumed.empty() ? "" : ", ") + key + " " + value.dump();
    model.known[key] = value;
  }
  return {model.known.dump(2) + "\n", assumed.empty() || model.ours
                                          ? ""
                                          : "config.json: tensors do not tell, so these are transformers' defaults: " +
                                                assumed + ". Hint: --config-field KEY=VALUE for others"};
}

}  // namespace zero::interchange
