// Changes of a text before it is split. Each is tokenizers' normalizer of the same name.
#pragma once
#include <string>
#include <string_view>

#include "apps/data/tokenizers/charsmap.h"
#include "apps/data/tokenizers/pattern.h"
#include "apps/data/tokenizers/pieces.h"

namespace data {

enum class NormalForm { Nfc, Nfd, Nfkc, Nfkd };
// Characters that a form joins or cuts come from the whole sequence that it changes.
Normalizer to_normal_form(NormalForm form);
Normalizer to_lower_case();
Normalizer without_accents(bool all_marks);  // or, as BERT, those of the category Mn alone
Normalizer stripped(bool left, bool right);
Normalizer prepended(const std::string& text);  // not to an empty text
Normalizer replaced(const Pattern& pattern, const std::string& content);
Normalizer nmt();
Normalizer precompiled(std::shared_ptr<const Charsmap> map);

struct BertOptions {
  bool clean_text = true, chinese_characters = true, strip_accents = true, lower_case = true;
};
Normalizer bert(const BertOptions& options);

// SentencePiece's own, as its library does it (NormalizerSpec).
struct SentencePieceOptions {
  std::shared_ptr<const Charsmap> map;  // null: characters stay
  bool dummy_prefix = true, remove_extra_spaces = true, escape_spaces = true, space_is_suffix = false;
};
Normalizer sentence_piece(const SentencePieceOptions& options);

}  // namespace data
