// The shapes of Llama, BERT, T5 and ViT, for code without torch. Field names are plain; models/hf_config.h maps them to
// the keys of Hugging Face's config.json. Defaults of what is not a size are transformers'.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace models {

// Rotary frequencies for longer sequences than a model was first trained on.
struct RopeScaling {
  enum class Kind { Linear, Llama3 } kind = Kind::Llama3;  // Linear: all divided by `factor`
  double factor = 8;
  // Of Llama3 (Llama 3.1): wavelengths above original_sequence / low are divided by `factor`, those below
  // original_sequence / high are kept, and between the two it is interpolated.
  double low = 1, high = 4;
  std::int64_t original_sequence = 8192;

  bool operator==(const RopeScaling&) const = default;
};

struct LlamaConfig {
  std::int64_t layers = 4, hidden = 128, heads = 4;
  std::int64_t kv_heads = 4;     // a divisor of heads: each key and value serves heads / kv_heads queries
  std::int64_t head_width = 0;   // even; 0: hidden / heads
  std::int64_t inner = 344;      // of the MLP
  std::int64_t sequence = 2048;  // longest input, in tokens
  std::int64_t vocabulary = 256;
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling = {};
  double norm_epsilon = 1e-6;
  bool attention_bias = false, mlp_bias = false;
  bool tied_output = false;
  double attention_dropout = 0;
  double deviation = 0.02;      // of initial weights
  std::int64_t pad_token = -1;  // its embedding starts at zero and gets no gradient by a lookup; -1: none

  std::int64_t width() const { return head_width > 0 ? head_width : hidden / heads; }
  // Elements of all parameters; a tied output layer counts once.
  std::int64_t num_parameters() const;
  // Throws std::invalid_argument that names every field at fault.
  void validate() const;
  bool operator==(const LlamaConfig&) const = default;
};

enum class Activation { Gelu, GeluTanh, Relu };

struct BertConfig {
  std::int64_t layers = 2, hidden = 128, heads = 2, inner = 512;
  std::int64_t sequence = 512;  // longest input, in tokens
  std::int64_t vocabulary = 30522, token_types = 2;
  Activation activation = Activation::Gelu;
  double norm_epsilon = 1e-12;
  double dropout = 0.1, attention_dropout = 0.1;
  double classifier_dropout = -1;  // -1: dropout
  double deviation = 0.02;
  std::int64_t pad_token = 0;  // as in LlamaConfig
  bool tied_output = true;     // of the masked LM
  std::int64_t labels = 2;     // of the classifier

  // Elements of the encoder without pooler and heads.
  std::int64_t num_parameters() const;
  void validate() const;
  bool operator==(const BertConfig&) const = default;
};

struct T5Config {
  std::int64_t encoder_layers = 2, decoder_layers = 2;
  std::int64_t hidden = 128, heads = 4, head_width = 32, inner = 256;
  std::int64_t vocabulary = 32128;
  std::int64_t buckets = 32, max_distance = 128;  // of relative positions
  bool gated = false;                             // T5 v1.1: activation(x W0) * (x W1)
  Activation activation = Activation::Relu;       // GeluTanh in v1.1
  double norm_epsilon = 1e-6;
  double dropout = 0.1;
  double factor = 1;  // of initial deviations
  bool tied_output = true;
  bool scaled_output = true;  // the last hidden state is multiplied by hidden^-0.5; v1.0
  std::int64_t pad_token = 0, eos_token = 1, start_token = 0;

  std::int64_t num_parameters() const;
  void validate() const;
  bool operator==(const T5Config&) const = default;
};

struct VitConfig {
  std::int64_t layers = 12, hidden = 768, heads = 12, inner = 3072;
  std::int64_t image = 224, patch = 16, channels = 3;  // square images and patches, in pixels
  Activation activation = Activation::Gelu;
  double norm_epsilon = 1e-12;
  double dropout = 0, attention_dropout = 0;
  double deviation = 0.02;
  bool qkv_bias = true;
  std::int64_t labels = 2;

  std::int64_t patches() const { return (image / patch) * (image / patch); }
  std::int64_t num_parameters() const;
  void validate() const;
  bool operator==(const VitConfig&) const = default;
};

}  // namespace models
