// See hf_config.h. Keys and defaults are those of transformers' configuration_gpt2.py, _llama.py, _bert.py, _t5.py and
// _vit.py.
#include "models/hf_config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "models/hf_fields.h"

namespace models {
namespace {

using Json = nlohmann::json;
constexpr int kDeepest = 16;
constexpr std::uintmax_t kLongestMiB = 4;
// With their names in both directions, a configuration of so many classes is still short enough to be read again.
constexpr std::int64_t kMostLabels = 1 << 15;

// A tree without duplicate keys, of limited depth.
Json parsed(const std::string& text, const std::string& source) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kDeepest)
      throw std::invalid_argument("[" + source + "] got JSON nested deeper than " + std::to_string(kDeepest) +
                                  ", expected a model's configuration");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      throw std::invalid_argument("[" + source + "] got the key " + value.dump() + " twice, expected it once");
    return true;
  };
  try {
    Json tree = Json::parse(text, check);
    if (!tree.is_object()) throw std::invalid_argument("[" + source + "] got no JSON object, expected one");
    return tree;
  } catch (const Json::exception& error) {
    throw std::invalid_argument("[" + source + "] is not JSON: " + error.what());
  }
}

Activation activation(HfFields& fields, const char* key, const std::string& missing) {
  const auto name = fields.text(key, missing);
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::GeluTanh;
  if (name == "relu") return Activation::Relu;
  fields.fault(key, "\"gelu\", \"gelu_new\", \"gelu_pytorch_tanh\" or \"relu\"");
  return Activation::Gelu;
}

GptConfig gpt(HfFields& f) {
  GptConfig c;
  c.vocabulary = f.integer("vocab_size", 50257);
  c.sequence = f.integer("n_positions", 1024);
  c.hidden = f.integer("n_embd", 768);
  c.layers = f.integer("n_layer", 12);
  c.heads = f.integer("n_head", 12);
  c.tied_output = f.flag("tie_word_embeddings", true);
  c.deviation = f.number("initializer_range", 0.02);
  c.dropout = f.number("resid_pdrop", 0.1);
  for (const char* key : {"embd_pdrop", "attn_pdrop"})
    if (f.number(key, 0.1) != c.dropout) f.fault(key, "the same as resid_pdrop, " + std::to_string(c.dropout));
  if (f.integer("n_inner", 4 * c.hidden) != 4 * c.hidden) f.fault("n_inner", "null or 4 times n_embd");
  if (activation(f, "activation_function", "gelu_new") != Activation::GeluTanh)
    f.fault("activation_function", "\"gelu_new\", as the model has no other");
  if (f.number("layer_norm_epsilon", 1e-5) != 1e-5) f.fault("layer_norm_epsilon", "1e-05, as the model has no other");
  f.only("scale_attn_weights", true);
  f.only("scale_attn_by_inverse_layer_idx", false);
  f.only("reorder_and_upcast_attn", false);
  f.only("add_cross_attention", false);
  f.known({"n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
           "summary_first_dropout"});
  return c;
}

void rope(HfFields& f, std::string& faults, std::vector<std::string>& unknown, LlamaConfig& c) {
  c.rope_theta = f.number("rope_theta", 10000);
  // Version 4 has rope_scaling next to rope_theta, version 5 both in rope_parameters.
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* given = f.get(key);
    if (given == nullptr) continue;
    if (!given->is_object()) {
      f.fault(key, "an object or null");
      continue;
    }
    HfFields r(*given, std::string(key) + ".", faults);
    c.rope_theta = r.number("rope_theta", c.rope_theta);
    if (r.number("partial_rotary_factor", 1) != 1) r.fault("partial_rotary_factor", "1, as the model has no other");
    const char* kind = r.get("rope_type") != nullptr ? "rope_type" : "type";
    const auto type = r.text(kind, "default");
    if (type != "default") {
      RopeScaling scaling;
      scaling.factor = r.number("factor", 0);
      if (!(scaling.factor > 0)) r.fault("factor", "a positive number");
      if (type == "linear") {
        scaling.kind = RopeScaling::Kind::Linear;
      } else if (type == "llama3") {
        scaling.low = r.number("low_freq_factor", 1);
        scaling.high = r.number("high_freq_factor", 4);
        scaling.original_sequence = r.integer("original_max_position_embeddings", c.sequence);
      } else {
        r.fault(kind, "\"default\", \"linear\" or \"llama3\"");
      }
      c.rope_scaling = scaling;
    }
    for (auto& name : r.unknown()) unknown.push_back(std::move(name));
  }
}

LlamaConfig llama(HfFields& f, std::string& faults, std::vector<std::string>& unknown) {
  LlamaConfig c;
  c.vocabulary = f.integer("vocab_size", 32000);
  c.hidden = f.integer("hidden_size", 4096);
  c.inner = f.integer("intermediate_size", 11008);
  c.layers = f.integer("num_hidden_layers", 32);
  c.heads = f.integer("num_attention_heads", 32);
  c.kv_heads = f.integer("num_key_value_heads", c.heads);
  c.head_width = f.integer("head_dim", 0);
  c.sequence = f.integer("max_position_embeddings", 2048);
  c.norm_epsilon = f.number("rms_norm_eps", 1e-6);
  c.tied_output = f.flag("tie_word_embeddings", false);
  c.attention_bias = f.flag("attention_bias", false);
  c.attention_dropout = f.number("attention_dropout", 0);
  c.mlp_bias = f.flag("mlp_bias", false);
  c.deviation = f.number("initializer_range", 0.02);
  c.pad_token = f.integer("pad_token_id", -1);
  const auto act = f.text("hidden_act", "silu");
  if (act != "silu" && act != "swish") f.fault("hidden_act", "\"silu\", as the model has no other");
  f.only("pretraining_tp", 1);
  f.only("sliding_window", Json());
  rope(f, faults, unknown, c);
  return c;
}

BertConfig bert(HfFields& f) {
  BertConfig c;
  c.vocabulary = f.integer("vocab_size", 30522);
  c.hidden = f.integer("hidden_size", 768);
  c.layers = f.integer("num_hidden_layers", 12);
  c.heads = f.integer("num_attention_heads", 12);
  c.inner = f.integer("intermediate_size", 3072);
  c.activation = activation(f, "hidden_act", "gelu");
  c.dropout = f.number("hidden_dropout_prob", 0.1);
  c.attention_dropout = f.number("attention_probs_dropout_prob", 0.1);
  c.classifier_dropout = f.number("classifier_dropout", -1);
  c.sequence = f.integer("max_position_embeddings", 512);
  c.token_types = f.integer("type_vocab_size", 2);
  c.deviation = f.number("initializer_range", 0.02);
  c.norm_epsilon = f.number("layer_norm_eps", 1e-12);
  c.tied_output = f.flag("tie_word_embeddings", true);
  c.pad_token = f.has("pad_token_id") ? f.integer("pad_token_id", -1) : 0;
  f.only("position_embedding_type", "absolute");
  f.only("is_decoder", false);
  f.only("add_cross_attention", false);
  f.known({"gradient_checkpointing", "model_max_length", "directionality", "pooler_fc_size",
           "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"});
  return c;
}

T5Config t5(HfFields& f) {
  T5Config c;
  c.vocabulary = f.integer("vocab_size", 32128);
  c.hidden = f.integer("d_model", 512);
  c.head_width = f.integer("d_kv", 64);
  c.inner = f.integer("d_ff", 2048);
  c.encoder_layers = f.integer("num_layers", 6);
  c.decoder_layers = f.integer("num_decoder_layers", c.encoder_layers);
  c.heads = f.integer("num_heads", 8);
  c.buckets = f.integer("relative_attention_num_buckets", 32);
  c.max_distance = f.integer("relative_attention_max_distance", 128);
  c.dropout = f.number("dropout_rate", 0.1);
  c.norm_epsilon = f.number("layer_norm_epsilon", 1e-6);
  c.factor = f.number("initializer_factor", 1);
  c.tied_output = f.flag("tie_word_embeddings", true);
  // Version 5.23 ties always unless the weights differ, and tells by this key what v1.0 scales.
  c.scaled_output = f.flag("scale_decoder_outputs", c.tied_output);
  c.pad_token = f.integer("pad_token_id", 0);
  c.start_token = f.integer("decoder_start_token_id", c.pad_token);
  const auto ends = f.integers("eos_token_id");
  c.eos_token = !ends.empty() ? ends.front() : f.has("eos_token_id") ? -1 : 1;
  auto kind = f.text("feed_forward_proj", "relu");
  c.gated = kind.starts_with("gated-");
  if (c.gated) kind = kind.substr(6);
  if (kind == "relu")
    c.activation = Activation::Relu;
  else if (kind == "gelu_new" || (kind == "gelu" && c.gated))  // which transformers reads so
    c.activation = Activation::GeluTanh;
  else if (kind == "gelu")
    c.activation = Activation::Gelu;
  else
    f.fault("feed_forward_proj", "\"relu\", \"gelu\", \"gelu_new\" or one of them after \"gated-\"");
  f.only("is_encoder_decoder", true);
  f.only("is_decoder", false);
  f.known({"dense_act_fn", "is_gated_act", "n_positions", "output_past", "classifier_dropout"});
  return c;
}

VitConfig vit(HfFields& f) {
  VitConfig c;
  c.hidden = f.integer("hidden_size", 768);
  c.layers = f.integer("num_hidden_layers", 12);
  c.heads = f.integer("num_attention_heads", 12);
  c.inner = f.integer("intermediate_size", 3072);
  c.activation = activation(f, "hidden_act", "gelu");
  c.dropout = f.number("hidden_dropout_prob", 0);
  c.attention_dropout = f.number("attention_probs_dropout_prob", 0);
  c.deviation = f.number("initializer_range", 0.02);
  c.norm_epsilon = f.number("layer_norm_eps", 1e-12);
  c.qkv_bias = f.flag("qkv_bias", true);
  c.image = f.integer("image_size", 224);
  c.patch = f.integer("patch_size", 16);
  c.channels = f.integer("num_channels", 3);
  f.known({"encoder_stride", "pooler_output_size", "pooler_act"});
  return c;
}

// Names of classes in order, from id2label; else as many as num_labels.
std::vector<std::string> labels_of(HfFields& f) {
  std::vector<std::string> labels;
  const std::int64_t count = f.integer("num_labels", -1);
  const Json* names = f.get("id2label");
  const auto many = std::max(count, static_cast<std::int64_t>(names == nullptr ? 0 : names->size()));
  if (many > kMostLabels) {
    f.fault(count == many ? "num_labels" : "id2label", "at most " + std::to_string(kMostLabels) + " classes");
    return {};
  }
  if (names != nullptr && names->is_object()) {
    for (std::size_t i = 0; i < names->size(); ++i) {
      const auto found = names->find(std::to_string(i));
      if (found == names->end() || !found->is_string()) {
        f.fault("id2label", "a text for each of \"0\", \"1\" and so on");
        return {};
      }
      labels.push_back(found->get<std::string>());
    }
  } else if (names != nullptr) {
    f.fault("id2label", "an object");
  } else {
    for (std::int64_t i = 0; i < count; ++i) labels.push_back("LABEL_" + std::to_string(i));
  }
  if (count > 0 && static_cast<std::size_t>(count) != labels.size()) f.fault("num_labels", "the size of id2label");
  return labels;
}

// Keys of every configuration that change nothing here.
constexpr std::initializer_list<const char*> kHarmless = {"transformers_version",
                                                          "dtype",
                                                          "torch_dtype",
                                                          "use_cache",
                                                          "label2id",
                                                          "_name_or_path",
                                                          "task_specific_params",
                                                          "return_dict",
                                                          "output_hidden_states",
                                                          "output_attentions",
                                                          "finetuning_task",
                                                          "is_encoder_decoder",
                                                          "tokenizer_class",
                                                          "prefix",
                                                          "do_sample",
                                                          "max_length",
                                                          "chunk_size_feed_forward"};

}  // namespace

HfConfig parse_hf_config(const std::string& text, const std::string& source) {
  const Json tree = parsed(text, source);
  std::string faults;
  HfFields fields(tree, "", faults);
  HfConfig result;
  const auto type = fields.text("model_type", "");
  if (type == "gpt2")
    result.config = gpt(fields);
  else if (type == "llama")
    result.config = llama(fields, faults, result.unknown);
  else if (type == "bert")
    result.config = bert(fields);
  else if (type == "t5")
    result.config = t5(fields);
  else if (type == "vit")
    result.config = vit(fields);
  else
    fields.fault("model_type", "\"gpt2\", \"llama\", \"bert\", \"t5\" or \"vit\"");
  fields.known(kHarmless);
  fields.only("quantization_config", Json());
  fields.only("problem_type", "single_label_classification");
  if (const Json* names = fields.get("architectures"); names != nullptr) {
    if (names->is_array() && !names->empty() && names->front().is_string())
      result.architecture = names->front().get<std::string>();
    else
      fields.fault("architectures", "a list of texts");
  }
  result.bos_token = fields.integer("bos_token_id", -1);
  result.eos_tokens = fields.integers("eos_token_id");
  result.pad_token = fields.integer("pad_token_id", -1);
  // Which are not none where the file is silent.
  if (const auto* b = std::get_if<BertConfig>(&result.config)) result.pad_token = b->pad_token;
  if (const auto* t = std::get_if<T5Config>(&result.config)) {
    result.pad_token = t->pad_token;
    if (result.eos_tokens.empty() && t->eos_token >= 0) result.eos_tokens = {t->eos_token};
  }
  result.labels = labels_of(fields);
  if (const auto count = static_cast<std::int64_t>(result.labels.size()); count > 0) {
    if (auto* b = std::get_if<BertConfig>(&result.config)) b->labels = count;
    if (auto* v = std::get_if<VitConfig>(&result.config)) v->labels = count;
  }
  if (faults.empty()) {  // else the sizes are defaults in part
    try {
      std::visit([](const auto& config) { config.validate(); }, result.config);
    } catch (const std::invalid_argument& error) {
      faults = std::string("\n  ") + error.what();
    }
  }
  if (!faults.empty()) throw std::invalid_argument("[" + source + "] cannot be used:" + faults);
  for (auto& key : fields.unknown()) result.unknown.push_back(std::move(key));
  return result;
}

bool is_hf_path(const std::string& name_or_path) {
  std::error_code error;
  return std::filesystem::exists(name_or_path, error);
}

HfConfig read_hf_config(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path file = fs::is_directory(path) ? fs::path(path) / "config.json" : fs::path(path);
  std::error_code code;
  const auto bytes = fs::file_size(file, code);
  if (code) throw std::invalid_argument("[" + file.string() + "] cannot be read: " + code.message());
  if (bytes > kLongestMiB << 20)
    throw std::invalid_argument("[" + file.string() + "] got " + std::to_string(bytes) +
                                " bytes, expected a configuration of at most " + std::to_string(kLongestMiB) + " MiB");
  std::ifstream in(file, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) throw std::invalid_argument("[" + file.string() + "] cannot be read");
  return parse_hf_config(text.str(), file.string());
}

const char* model_type(const AnyConfig& config) {
  constexpr const char* names[] = {"gpt2", "llama", "bert", "t5", "vit"};
  return names[config.index()];
}

}  // namespace models
