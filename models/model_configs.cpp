// See model_configs.h.
#include "models/model_configs.h"

#include <sstream>
#include <stdexcept>

namespace models {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 31;

// Collects the fields at fault; done() throws all of them at once.
class Faults {
 public:
  explicit Faults(const char* where) : where_(where) {}
  template <class T>
  void require(bool good, const char* field, const T& got, const std::string& expected) {
    if (!good) text_ << "\n  " << field << ": got " << got << ", expected " << expected;
  }
  // Of sizes: from `least` to 2^31.
  void at_least(const char* field, std::int64_t got, std::int64_t least) {
    require(got >= least, field, got, "at least " + std::to_string(least));
    require(got <= kMost, field, got, "at most 2^31");
  }
  // Of all parameters, computed in fp64: beyond this, bytes and products of sizes do not fit 64 bits.
  void parameters(double got) {
    require(got <= 0x1p56, "parameters", got, "at most 2^56. Hint: smaller sizes or fewer layers");
  }
  void share(const char* field, double got) { require(got >= 0 && got < 1, field, got, "from 0 up to but without 1"); }
  void positive(const char* field, double got) { require(got > 0 && got < 1e30, field, got, "a positive number"); }
  void token(const char* field, std::int64_t got, std::int64_t least, std::int64_t vocabulary) {
    require(got >= least && got < vocabulary, field, got,
            "a token below the vocabulary of " + std::to_string(vocabulary) + (least < 0 ? ", or -1 for none" : ""));
  }
  void divides(const char* field, std::int64_t got, const char* what, std::int64_t whole) {
    require(got >= 1 && whole % got == 0, field, got,
            "a divisor of " + std::string(what) + " = " + std::to_string(whole));
  }
  void done() const {
    const auto text = text_.str();
    if (!text.empty()) throw std::invalid_argument("[" + std::string(where_) + "]" + text);
  }

 private:
  const char* where_;
  std::ostringstream text_;
};

// Elements of all parameters, as int64 or, where they may not fit that, as double.
template <class T>
T parameters_of(const LlamaConfig& c) {
  const T hidden = c.hidden, inner = c.inner, width = c.width(), queries = c.heads * width, keys = c.kv_heads * width;
  T layer = 2 * hidden * (queries + keys) + 3 * hidden * inner + 2 * hidden;
  if (c.attention_bias) layer += queries + 2 * keys + hidden;
  if (c.mlp_bias) layer += 2 * inner + hidden;
  return (c.tied_output ? 1 : 2) * c.vocabulary * hidden + c.layers * layer + hidden;
}

template <class T>
T parameters_of(const BertConfig& c) {
  const T hidden = c.hidden, inner = c.inner;
  const T layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden;
  return (c.vocabulary + c.sequence + c.token_types) * hidden + 2 * hidden + c.layers * layer;
}

template <class T>
T parameters_of(const T5Config& c) {
  const T hidden = c.hidden, heads = c.heads;
  const T attention = 4 * hidden * heads * c.head_width, mlp = (c.gated ? 3 : 2) * hidden * c.inner;
  const T encoder = c.encoder_layers * (attention + mlp + 2 * hidden);
  const T decoder = c.decoder_layers * (2 * attention + mlp + 3 * hidden);
  return (c.tied_output ? 1 : 2) * c.vocabulary * hidden + encoder + decoder + 2 * hidden + 2 * c.buckets * heads;
}

template <class T>
T parameters_of(const VitConfig& c) {
  const T hidden = c.hidden, inner = c.inner;
  const T layer =
      4 * hidden * hidden + (c.qkv_bias ? 4 : 1) * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden;
  const T embeddings = hidden * (1 + T(c.channels) * c.patch * c.patch + 1 + c.patches());
  return embeddings + hidden + c.layers * layer + 2 * hidden + hidden * c.labels + c.labels;
}

}  // namespace

std::int64_t LlamaConfig::num_parameters() const { return parameters_of<std::int64_t>(*this); }

void LlamaConfig::validate() const {
  Faults faults("LlamaConfig");
  faults.at_least("layers", layers, 1);
  faults.at_least("hidden", hidden, 1);
  faults.at_least("inner", inner, 1);
  faults.at_least("sequence", sequence, 1);
  faults.at_least("vocabulary", vocabulary, 2);
  if (head_width > 0)
    faults.at_least("heads", heads, 1);
  else
    faults.divides("heads", heads, "hidden", hidden);
  faults.divides("kv_heads", kv_heads, "heads", heads);
  faults.at_least("head_width", head_width, 0);
  if (heads >= 1) faults.require(width() >= 2 && width() % 2 == 0, "head_width", width(), "an even number");
  faults.positive("rope_theta", rope_theta);
  faults.positive("norm_epsilon", norm_epsilon);
  faults.positive("deviation", deviation);
  faults.share("attention_dropout", attention_dropout);
  faults.token("pad_token", pad_token, -1, vocabulary);
  if (rope_scaling) {
    faults.positive("rope_scaling.factor", rope_scaling->factor);
    if (rope_scaling->kind == RopeScaling::Kind::Llama3) {
      faults.at_least("rope_scaling.original_sequence", rope_scaling->original_sequence, 1);
      faults.positive("rope_scaling.low", rope_scaling->low);
      faults.require(rope_scaling->high > rope_scaling->low, "rope_scaling.high", rope_scaling->high, "more than low");
    }
  }
  faults.done();
  faults.parameters(parameters_of<double>(*this));
  faults.done();
}

std::int64_t BertConfig::num_parameters() const { return parameters_of<std::int64_t>(*this); }

void BertConfig::validate() const {
  Faults faults("BertConfig");
  faults.at_least("layers", layers, 1);
  faults.at_least("hidden", hidden, 1);
  faults.at_least("inner", inner, 1);
  faults.at_least("sequence", sequence, 1);
  faults.at_least("vocabulary", vocabulary, 2);
  faults.at_least("token_types", token_types, 1);
  faults.at_least("labels", labels, 1);
  faults.divides("heads", heads, "hidden", hidden);
  faults.positive("norm_epsilon", norm_epsilon);
  faults.positive("deviation", deviation);
  faults.share("dropout", dropout);
  faults.share("attention_dropout", attention_dropout);
  if (classifier_dropout != -1) faults.share("classifier_dropout", classifier_dropout);
  faults.token("pad_token", pad_token, -1, vocabulary);
  faults.done();
  faults.parameters(parameters_of<double>(*this));
  faults.done();
}

std::int64_t T5Config::num_parameters() const { return parameters_of<std::int64_t>(*this); }

void T5Config::validate() const {
  Faults faults("T5Config");
  faults.at_least("encoder_layers", encoder_layers, 1);
  faults.at_least("decoder_layers", decoder_layers, 1);
  faults.at_least("hidden", hidden, 1);
  faults.at_least("heads", heads, 1);
  faults.at_least("head_width", head_width, 1);
  faults.at_least("inner", inner, 1);
  faults.at_least("vocabulary", vocabulary, 2);
  faults.require(buckets >= 4 && buckets % 4 == 0, "buckets", buckets, "a multiple of 4");
  faults.at_least("buckets", buckets, 1);
  faults.at_least("max_distance", max_distance, 1);
  faults.require(max_distance > buckets / 2, "max_distance", max_distance, "more than half of the buckets");
  faults.positive("norm_epsilon", norm_epsilon);
  faults.positive("factor", factor);
  faults.share("dropout", dropout);
  faults.token("pad_token", pad_token, 0, vocabulary);
  faults.token("eos_token", eos_token, -1, vocabulary);
  faults.token("start_token", start_token, 0, vocabulary);
  faults.done();
  faults.parameters(parameters_of<double>(*this));
  faults.done();
}

std::int64_t VitConfig::num_parameters() const { return parameters_of<std::int64_t>(*this); }

void VitConfig::validate() const {
  Faults faults("VitConfig");
  faults.at_least("layers", layers, 1);
  faults.at_least("hidden", hidden, 1);
  faults.at_least("inner", inner, 1);
  faults.at_least("channels", channels, 1);
  faults.at_least("labels", labels, 1);
  faults.divides("heads", heads, "hidden", hidden);
  faults.at_least("image", image, 1);
  faults.require(patch >= 1 && patch <= image, "patch", patch, "from 1 to image = " + std::to_string(image));
  faults.positive("norm_epsilon", norm_epsilon);
  faults.positive("deviation", deviation);
  faults.share("dropout", dropout);
  faults.share("attention_dropout", attention_dropout);
  faults.done();
  faults.parameters(parameters_of<double>(*this));
  faults.done();
}

}  // namespace models
