// The parts of a tokenizer from its files. Texts are the files' contents; `file` names them in messages. All throw
// std::runtime_error that names file and place.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "apps/data/tokenizers/json_node.h"
#include "apps/data/tokenizers/pipeline.h"

namespace data {

// Hugging Face's tokenizers (version 0.23).
PipelineParts read_tokenizer_json(const std::string& file, std::string_view text);
// Its "model" alone. `bytes`: the vocabulary spells bytes.
std::unique_ptr<Model> read_model(const JsonNode& model, bool bytes);

// What tokenizer_config.json, special_tokens_map.json and added_tokens.json say, as far as a tokenizer depends on it.
struct TokenizerConfig {
  std::string tokenizer_class;
  std::optional<std::string> unknown, begin, end, padding, separator, classifier, mask;
  std::vector<AddedToken> added;
  bool any_added = false;  // `added` is told, be it empty
  std::optional<bool> lower_case, strip_accents, chinese_characters, prefix_space, add_begin, add_end;
  std::optional<std::int64_t> extra_ids;
};
TokenizerConfig read_tokenizer_config(const std::string& file, std::string_view text);
void read_special_tokens_map(const std::string& file, std::string_view text, TokenizerConfig& config);
void read_added_tokens(const std::string& file, std::string_view text, TokenizerConfig& config);
// Fills the ids of `parts` that `config` names; with `guess`, roles without a name from well-known special tokens.
void resolve_special(const std::string& file, const TokenizerConfig& config, bool guess, PipelineParts& parts);

// GPT-2's and RoBERTa's files. The merges' first line may be "#version: ...".
PipelineParts read_gpt2(const std::string& file, std::string_view vocabulary, std::string_view merges,
                        const TokenizerConfig& config);
// BERT's vocabulary: a token a line.
PipelineParts read_vocabulary_text(const std::string& file, std::string_view text, const TokenizerConfig& config);
// SentencePiece's model: a protocol buffer. Unigram (T5).
PipelineParts read_sentence_piece(const std::string& file, std::string_view bytes, const TokenizerConfig& config);

}  // namespace data
