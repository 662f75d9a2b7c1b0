// The files next to a vocabulary: which tokens have a role, which were added, and options.
#include <algorithm>
#include <array>

#include "apps/data/tokenizers/readers.h"

namespace data {
namespace {

using Name = std::optional<std::string>;

// "[SEP]" or {"content": "[SEP]", ...}; no value for null.
void take_name(const JsonNode& root, const char* key, Name& name) {
  const auto node = root.find(key);
  if (!node) return;
  name = node->is(Json::Kind::Object) ? node->at("content").text() : node->text();
}

void take_names(const JsonNode& root, TokenizerConfig& config) {
  take_name(root, "unk_token", config.unknown);
  take_name(root, "bos_token", config.begin);
  take_name(root, "eos_token", config.end);
  take_name(root, "pad_token", config.padding);
  take_name(root, "sep_token", config.separator);
  take_name(root, "cls_token", config.classifier);
  take_name(root, "mask_token", config.mask);
}

void take_flag(const JsonNode& root, const char* key, std::optional<bool>& flag) {
  if (const auto node = root.find(key)) flag = node->boolean();
}

std::int32_t id_of_key(const JsonNode& node, const std::string& key) {
  if (key.empty() || key.size() > 9 || key.find_first_not_of("0123456789") != std::string::npos)
    node.fail("\"" + key.substr(0, 40) + "\"", "an id");
  return static_cast<std::int32_t>(std::stol(key));
}

}  // namespace

TokenizerConfig read_tokenizer_config(const std::string& file, std::string_view text) {
  const auto root = JsonNode::read(file, text);
  if (!root.is(Json::Kind::Object)) root.fail(root.json().kind_name(), "an object");
  TokenizerConfig config;
  config.tokenizer_class = root.text_or("tokenizer_class", "");
  if (config.tokenizer_class.ends_with("Fast")) config.tokenizer_class.resize(config.tokenizer_class.size() - 4);
  take_names(root, config);
  take_flag(root, "do_lower_case", config.lower_case);
  take_flag(root, "strip_accents", config.strip_accents);
  take_flag(root, "tokenize_chinese_chars", config.chinese_characters);
  take_flag(root, "add_prefix_space", config.prefix_space);
  take_flag(root, "add_bos_token", config.add_begin);
  take_flag(root, "add_eos_token", config.add_end);
  if (const auto node = root.find("extra_ids")) config.extra_ids = node->integer(0, 1 << 16);
  if (const auto node = root.find("added_tokens_decoder")) {
    if (!node->is(Json::Kind::Object)) node->fail(node->json().kind_name(), "an object of ids with their tokens");
    config.any_added = true;
    for (const auto& [key, value] : node->json().fields) {
      const auto token = node->at(key);
      token.only({"content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      const auto& content = token.at("content").text();
      if (content.empty()) token.at("content").fail("an empty text", "a token");
      config.added.push_back({content, id_of_key(*node, key), token.boolean_or("special", false),
                              token.boolean_or("single_word", false), token.boolean_or("lstrip", false),
                              token.boolean_or("rstrip", false), token.boolean_or("normalized", false)});
    }
  }
  return config;
}

void read_special_tokens_map(const std::string& file, std::string_view text, TokenizerConfig& config) {
  const auto root = JsonNode::read(file, text);
  if (!root.is(Json::Kind::Object)) root.fail(root.json().kind_name(), "an object");
  take_names(root, config);
}

void read_added_tokens(const std::string& file, std::string_view text, TokenizerConfig& config) {
  const auto root = JsonNode::read(file, text);
  if (!root.is(Json::Kind::Object)) root.fail(root.json().kind_name(), "an object of tokens with their ids");
  if (config.any_added) return;  // tokenizer_config.json says the same, and more
  for (const auto& [token, value] : root.json().fields) {
    if (token.empty()) root.fail("an empty token", "a token");
    config.added.push_back(
        {token, static_cast<std::int32_t>(root.at(token).integer(0, INT32_MAX)), false, false, false, false, true});
  }
}

void resolve_special(const std::string& file, const TokenizerConfig& config, bool guess, PipelineParts& parts) {
  const auto id_of = [&](const std::string& name) -> std::optional<std::int32_t> {
    for (const auto& token : parts.added)
      if (token.content == name) return token.id;
    return parts.model->vocabulary().id(name);
  };
  const auto resolve = [&](const char* key, const Name& name, std::optional<std::int32_t>& id,
                           std::initializer_list<const char*> known) {
    if (name) {
      id = id_of(*name);
      if (!id)
        throw std::runtime_error("[tokenizer " + file + "] " + key + ": got \"" + name->substr(0, 80) +
                                 "\", expected a token of the vocabulary");
      return;
    }
    if (id || !guess) return;
    for (const auto* candidate : known)
      for (const auto& token : parts.added)
        if (!id && token.special && token.content == candidate) id = token.id;
  };
  auto& special = parts.special;
  resolve("unk_token", config.unknown, special.unknown, {"[UNK]", "<unk>"});
  resolve("bos_token", config.begin, special.begin, {"<s>", "<|begin_of_text|>", "<|endoftext|>"});
  resolve("eos_token", config.end, special.end, {"</s>", "<|end_of_text|>", "<|endoftext|>"});
  resolve("pad_token", config.padding, special.padding, {"[PAD]", "<pad>"});
  resolve("sep_token", config.separator, special.separator, {"[SEP]", "</s>"});
  resolve("cls_token", config.classifier, special.classifier, {"[CLS]", "<s>"});
  resolve("mask_token", config.mask, special.mask, {"[MASK]", "<mask>"});
}

}  // namespace data
