// config.json and configurations by name: published sizes, what is refused and in which words, hostile files.
#include "models/hf_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>

#include "support/folder.h"

namespace hf_config_test {
namespace {
using models::hf_preset;
using models::parse_hf_config;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}
std::string refusal(const std::string& text) {
  return error_of([&] { (void)parse_hf_config(text, "folder/config.json"); });
}
std::int64_t size_of(const std::string& name) {
  return std::visit([](const auto& config) { return config.num_parameters(); }, hf_preset(name).config);
}

// Of the models on Hugging Face's hub; of BERT without pooler and heads, of ViT with 1000 classes.
TEST(HfConfigTest, PresetsHaveThePublishedSizes) {
  EXPECT_EQ(size_of("gpt2"), 124439808);
  EXPECT_EQ(size_of("tinyllama-1.1b"), 1100048384);
  EXPECT_EQ(size_of("llama-3.2-1b"), 1235814400);
  EXPECT_EQ(size_of("llama-2-7b"), 6738415616);
  EXPECT_NEAR(static_cast<double>(size_of("llama-110m")), 110e6, 1e6);
  EXPECT_EQ(size_of("bert-base"), 109482240 - 768 * 769);
  EXPECT_EQ(size_of("bert-large"), 335141888 - 1024 * 1025);
  EXPECT_EQ(size_of("t5-small"), 60506624);
  EXPECT_EQ(size_of("t5-base"), 222903552);
  EXPECT_EQ(size_of("t5-v1.1-small"), 76961152);
  EXPECT_EQ(size_of("t5-v1.1-base"), 247577856);
  EXPECT_EQ(size_of("vit-base"), 86567656);
  EXPECT_EQ(size_of("vit-large"), 304326632);
  const auto error = error_of([] { (void)hf_preset("llama-3"); });
  EXPECT_TRUE(error.find("got \"llama-3\"") != std::string::npos && error.find("t5-small") != std::string::npos)
      << error;
}

TEST(HfConfigTest, WhatIsWrittenIsReadAsTheSame) {
  for (const auto& name : models::hf_preset_names()) {
    const auto text = models::hf_config_text(hf_preset(name), "bfloat16");
    const auto again = parse_hf_config(text);
    EXPECT_EQ(models::hf_config_text(again, "bfloat16"), text) << name;
    EXPECT_EQ(again.unknown, std::vector<std::string>()) << name;
    std::visit([](const auto& config) { config.validate(); }, again.config);
  }
}

TEST(HfConfigTest, KeysOfTransformers4AndTokensAreRead) {
  const auto llama = parse_hf_config(R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"],
      "num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 4096, "rope_theta": 500000.0,
      "rope_scaling": {"type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "beta_fast": 3},
      "eos_token_id": [5, 7], "bos_token_id": 1, "torch_dtype": "bfloat16", "some_new_key": 3})");
  const auto& config = std::get<models::LlamaConfig>(llama.config);
  EXPECT_EQ(config.kv_heads, 8);
  EXPECT_EQ(config.rope_theta, 500000);
  ASSERT_TRUE(config.rope_scaling);
  EXPECT_EQ(config.rope_scaling->original_sequence, 4096);
  EXPECT_EQ(llama.architecture, "LlamaForCausalLM");
  EXPECT_EQ(llama.eos_tokens, (std::vector<std::int64_t>{5, 7}));
  EXPECT_EQ(llama.bos_token, 1);
  EXPECT_EQ(llama.unknown, (std::vector<std::string>{"rope_scaling.beta_fast", "some_new_key"}));
  const auto bert = parse_hf_config(R"({"model_type": "bert", "id2label": {"1": "no", "0": "yes", "2": "maybe"}})");
  EXPECT_EQ(bert.labels, (std::vector<std::string>{"yes", "no", "maybe"}));
  EXPECT_EQ(std::get<models::BertConfig>(bert.config).labels, 3);
  EXPECT_EQ(std::get<models::BertConfig>(bert.config).pad_token, 0);
  const auto none = parse_hf_config(R"({"model_type": "bert", "pad_token_id": null})");
  EXPECT_EQ(std::get<models::BertConfig>(none.config).pad_token, -1);
}

TEST(HfConfigTest, TokensThatAFileDoesNotNameAreThoseOfTransformers) {
  for (const auto& [keys, end] : {std::pair{"", 1}, {R"(, "eos_token_id": null)", -1}, {R"(, "eos_token_id": 7)", 7}}) {
    const auto read = parse_hf_config(R"({"model_type": "t5")" + std::string(keys) + "}");
    const auto again = parse_hf_config(models::hf_config_text(read));
    for (const auto* config : {&read, &again}) {
      EXPECT_EQ(std::get<models::T5Config>(config->config).eos_token, end);
      EXPECT_EQ(config->eos_tokens, end < 0 ? std::vector<std::int64_t>() : std::vector<std::int64_t>{end});
      EXPECT_EQ(config->pad_token, 0);
    }
  }
  EXPECT_EQ(parse_hf_config(R"({"model_type": "bert"})").pad_token, 0);
  EXPECT_EQ(parse_hf_config(R"({"model_type": "gpt2"})").pad_token, -1);
}

TEST(HfConfigTest, DeviationsOfInitialWeightsAreKept) {
  for (const auto* type : {"gpt2", "llama", "bert", "vit"}) {
    const std::string text = std::string(R"({"model_type": ")") + type + "\"";
    const auto deviation = [](const models::HfConfig& config) {
      return std::visit(
          [](const auto& c) {
            if constexpr (requires { c.deviation; }) return c.deviation;
            return 0.0;
          },
          config.config);
    };
    EXPECT_EQ(deviation(parse_hf_config(text + "}")), 0.02) << type;
    const auto other = parse_hf_config(text + R"(, "initializer_range": 0.3})");
    EXPECT_EQ(deviation(other), 0.3) << type;
    EXPECT_EQ(deviation(parse_hf_config(models::hf_config_text(other))), 0.3) << type;
    for (const char* bad : {"0", "-0.02", "1e30", "\"small\""})
      EXPECT_NE(refusal(text + R"(, "initializer_range": )" + bad + "}"), "") << type << " " << bad;
  }
}

TEST(HfConfigTest, NamesOfClassesAreKept) {
  // Also of a model that has no head for them, and in the order of their numbers.
  const auto gpt = parse_hf_config(R"({"model_type": "gpt2", "id2label": {"1": "b", "0": "z", "2": "b"}})");
  const auto text = models::hf_config_text(gpt);
  EXPECT_EQ(parse_hf_config(text).labels, (std::vector<std::string>{"z", "b", "b"}));
  EXPECT_LT(text.find("\"0\": \"z\""), text.find("\"1\": \"b\"")) << text;
  // As many as may be, without a wait; and what is written is read.
  const auto many = parse_hf_config(R"({"model_type": "bert", "num_labels": 32768})");
  const zero::test::TempFolder folder;
  const auto path = (folder.path() / "config.json").string();
  std::ofstream(path) << models::hf_config_text(many);
  EXPECT_EQ(models::read_hf_config(path).labels, many.labels);
  EXPECT_NE(refusal(R"({"model_type": "bert", "num_labels": 32769})")
                .find("num_labels: got 32769, expected at most 32768 classes"),
            std::string::npos);
  std::string names;
  for (int i = 0; i < 32769; ++i) names += (i == 0 ? "\"" : ", \"") + std::to_string(i) + "\": \"\"";
  EXPECT_NE(refusal(R"({"model_type": "vit", "id2label": {)" + names + "}}").find("expected at most 32768 classes"),
            std::string::npos);
  std::filesystem::resize_file(path, (4 << 20) + 1);
  EXPECT_NE(error_of([&] { (void)models::read_hf_config(path); }).find("got 4194305 bytes"), std::string::npos);
}

TEST(HfConfigTest, WhatTheModelsDoNotHaveIsRefused) {
  const std::vector<std::pair<std::string, std::string>> bad{
      {R"("gpt2", "activation_function": "relu")", "activation_function: got \"relu\""},
      {R"("gpt2", "attn_pdrop": 0.2)", "attn_pdrop: got 0.2, expected the same as resid_pdrop"},
      {R"("gpt2", "n_inner": 1000)", "n_inner: got 1000"},
      {R"("gpt2", "scale_attn_by_inverse_layer_idx": true)", "scale_attn_by_inverse_layer_idx: got true"},
      {R"("gpt2", "layer_norm_epsilon": 1e-6)", "layer_norm_epsilon"},
      {R"("llama", "hidden_act": "gelu")", "hidden_act: got \"gelu\""},
      {R"("llama", "rope_parameters": {"rope_type": "yarn", "factor": 4})", "rope_parameters.rope_type: got \"yarn\""},
      {R"("llama", "rope_scaling": {"type": "dynamic", "factor": 4})", "rope_scaling.type: got \"dynamic\""},
      {R"("llama", "rope_parameters": {"partial_rotary_factor": 0.5})", "partial_rotary_factor: got 0.5"},
      {R"("llama", "sliding_window": 128)", "sliding_window: got 128"},
      {R"("llama", "pretraining_tp": 2)", "pretraining_tp: got 2"},
      {R"("llama", "quantization_config": {"bits": 4})", "quantization_config"},
      {R"("bert", "position_embedding_type": "relative_key")", "position_embedding_type: got \"relative_key\""},
      {R"("bert", "is_decoder": true)", "is_decoder: got true"},
      {R"("bert", "hidden_act": "silu")", "hidden_act: got \"silu\""},
      {R"("t5", "feed_forward_proj": "gated-silu")", "feed_forward_proj: got \"gated-silu\""},
      {R"("t5", "is_encoder_decoder": false)", "is_encoder_decoder: got false"},
      {R"("vit", "image_size": [224, 224])", "image_size: got [224,224], expected an integer"},
      {R"("bert", "num_labels": 3, "id2label": {"0": "a"})", "num_labels: got 3"},
      {R"("llama", "num_key_value_heads": 3)", "kv_heads: got 3, expected a divisor of heads = 32"},
      {R"("llama", "vocab_size": 1e3)", "vocab_size: got 1000.0, expected an integer"},
      {R"("llama", "hidden_size": -5)", "hidden_size: got -5"},
      {R"("llama", "hidden_size": 18446744073709551615)", "a smaller integer"},
      {R"("bert", "problem_type": "multi_label_classification")", "problem_type: got \"multi_label_classification\""},
      {R"("bert", "problem_type": "regression")", "problem_type: got \"regression\""},
      {R"("mamba")", "model_type: got \"mamba\""}};
  for (const auto& [keys, part] : bad) {
    const auto error = refusal("{\"model_type\": " + keys + "}");
    EXPECT_TRUE(error.find(part) != std::string::npos && error.find("folder/config.json") != std::string::npos)
        << keys << ": " << error;
  }
  // All at once.
  const auto error = refusal(R"({"model_type": "llama", "hidden_act": "gelu", "sliding_window": 1, "mlp_bias": 3})");
  for (const char* key : {"hidden_act", "sliding_window", "mlp_bias"}) EXPECT_NE(error.find(key), std::string::npos);
}

TEST(HfConfigTest, HostileFilesAreRefused) {
  std::string deep = "{\"model_type\": \"bert\", \"x\": ";
  for (int i = 0; i < 100000; ++i) deep += "[";
  EXPECT_NE(refusal(deep).find("nested deeper"), std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": "bert", "hidden_size": 8, "hidden_size": 16})").find("twice"), std::string::npos);
  EXPECT_NE(refusal(R"({"model_type": "bert", "a": {"\u0062": 1, "b": 2}})").find("twice"), std::string::npos);
  for (const char* text : {"", "[]", "3", "{", "{\"model_type\": }", "\xff\xfe", "{\"model_type\": \"\xff\"}"})
    EXPECT_NE(refusal(text), "") << text;
  EXPECT_EQ(refusal(R"({"model_type": "bert", "problem_type": "single_label_classification"})"), "");
  EXPECT_EQ(refusal(R"({"model_type": "bert", "problem_type": null})"), "");
  // Sizes and products that 64 bits would not hold.
  const std::vector<std::pair<std::string, std::string>> large{
      {R"("gpt2", "n_embd": 1099511627776, "n_head": 1)", "hidden 1099511627776, expected at most 2^31"},
      {R"("gpt2", "n_embd": 2147483648, "n_head": 1, "n_layer": 2147483648)", "got parameters"},
      {R"("llama", "hidden_size": 1099511627776)", "hidden: got 1099511627776, expected at most 2^31"},
      {R"("llama", "head_dim": 1099511627776)", "head_width: got 1099511627776, expected at most 2^31"},
      {R"("llama", "hidden_size": 2147483648, "num_hidden_layers": 2147483648)", "parameters: got"},
      {R"("llama", "vocab_size": 2147483648, "hidden_size": 2147483648)", "parameters: got"},
      {R"("bert", "intermediate_size": 2147483648, "hidden_size": 2147483648, "num_attention_heads": 1)",
       "parameters: got"},
      {R"("t5", "d_ff": 1099511627776)", "inner: got 1099511627776, expected at most 2^31"},
      {R"("t5", "num_heads": 2147483648, "d_kv": 2147483648)", "parameters: got"},
      {R"("vit", "image_size": 1099511627776, "patch_size": 1)", "image: got 1099511627776, expected at most 2^31"},
      {R"("vit", "image_size": 2147483648, "patch_size": 1)", "parameters: got"}};
  for (const auto& [keys, part] : large) {
    const auto error = refusal("{\"model_type\": " + keys + "}");
    EXPECT_NE(error.find(part), std::string::npos) << keys << ": " << error;
  }
  EXPECT_NE(error_of([] { (void)models::read_hf_config("/nowhere"); }).find("cannot be read"), std::string::npos);
}

}  // namespace
}  // namespace hf_config_test
