// Regular expressions as tokenizer.json writes them (Oniguruma's syntax), through PCRE2.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "apps/data/tokenizers/pieces.h"

namespace data {

class Pattern {
 public:
  // Accepts what means the same in both: characters, classes, \p{..}, \s \S \d \w, groups, look-around, (?i:..),
  // alternatives, repetitions. Throws std::invalid_argument that names what else there is.
  explicit Pattern(const std::string& expression);
  // The text as a pattern.
  static Pattern literal(std::string_view text);

  // All matches from left to right, with what is between them. Thread-safe. Throws std::runtime_error if the expression
  // takes too many steps on the text.
  TextParts parts(std::string_view text) const;

 private:
  struct Code;
  explicit Pattern(std::shared_ptr<const Code> code) : code_(std::move(code)) {}

  std::shared_ptr<const Code> code_;
};

// GPT-2's pattern: contractions, words, numbers and other runs with a space before them, white space.
const Pattern& gpt2_pattern();

}  // namespace data
