// A tokenizer made of parts, whichever files describe them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "apps/data/tokenizers/added_tokens.h"
#include "apps/data/tokenizers/model.h"
#include "apps/data/tokenizers/pieces.h"
#include "apps/data/tokenizers/tokenizer.h"

namespace data {

// What a sequence is made of: the texts, and tokens that are added.
struct TemplateItem {
  int text = -1;                       // 0, 1; -1: tokens
  std::vector<std::int32_t> ids = {};  // of tokens
  std::uint8_t type = 0;
};

struct PipelineParts {
  std::vector<Normalizer> normalizers;
  std::vector<PreTokenizer> pre_tokenizers;
  std::unique_ptr<Model> model;
  std::vector<AddedToken> added;
  std::vector<TemplateItem> single{{.text = 0}}, pair{{.text = 0}, {.text = 1, .type = 1}};
  // Spaces at the ends of a token are left out of its offsets, but for one at the beginning of the text if
  // space_was_added.
  bool trim_offsets = false, space_was_added = false;
  std::vector<Decoder> decoders;
  bool decodes = false;  // else tokens are joined with spaces
  SpecialTokens special;
  std::string kind;  // "byte-level BPE"
  std::uint64_t digest = 0;
};

// Throws std::invalid_argument if an added token has another id than in the vocabulary, or that of another token.
std::unique_ptr<Tokenizer> make_tokenizer(PipelineParts parts);

}  // namespace data
