// Tokens that are found in a text before anything else is done with it: special tokens, and others that were added to a
// vocabulary.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/tokenizers/pieces.h"
#include "apps/data/tokenizers/trie.h"

namespace data {

struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool special = false;
  bool single_word = false;  // only where no word continues before or behind it
  bool left_strip = false;   // takes the white space before it
  bool right_strip = false;  // and behind it
  bool normalized = false;   // is looked for in the normalised text
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // `normalize` is applied to the texts of tokens that are normalised.
  AddedTokens(std::vector<AddedToken> tokens, const std::vector<Normalizer>& normalizers);

  // The text as pieces: added tokens, and normalised texts between them.
  std::vector<Piece> split(const Piece& text, const std::vector<Normalizer>& normalizers, Arena& arena) const;
  const std::vector<AddedToken>& all() const { return tokens_; }

 private:
  void find(const Piece& piece, const Trie& trie, std::vector<Piece>& out) const;

  std::vector<AddedToken> tokens_;
  Trie plain_, normalized_;  // values: places in tokens_
  bool any_plain_ = false, any_normalized_ = false;
};

}  // namespace data
