// Ways to split a text into the pieces that a model reads one by one. Each is tokenizers' pre-tokenizer of the same
// name.
#pragma once
#include <string>

#include "apps/data/tokenizers/pattern.h"
#include "apps/data/tokenizers/pieces.h"

namespace data {

PreTokenizer split_by(const Pattern& pattern, SplitBehavior behavior, bool invert);
PreTokenizer split_characters(std::function<bool(std::int32_t)> is, SplitBehavior behavior);
PreTokenizer split_words();  // Whitespace: \w+|[^\w\s]+
PreTokenizer split_bert();   // white space is removed, every punctuation mark stands alone
// Bytes stay bytes: the model's vocabulary is of bytes too.
PreTokenizer split_byte_level(bool add_prefix_space, bool use_pattern);

enum class PrependScheme { Always, First, Never };
PreTokenizer split_metaspace(const std::string& replacement, PrependScheme scheme, bool split_text);

}  // namespace data
