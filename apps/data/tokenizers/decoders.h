// Steps from the spelled tokens to the text. Each is tokenizers' decoder of the same name.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "apps/data/tokenizers/pattern.h"
#include "apps/data/tokenizers/pieces.h"

namespace data {

Decoder decode_byte_level();
Decoder decode_wordpiece(const std::string& prefix, bool cleanup);
Decoder decode_metaspace(const std::string& replacement, bool first_loses_it);
Decoder decode_bpe(const std::string& suffix);
Decoder decode_byte_fallback();
Decoder decode_fused();
Decoder decode_stripped(const std::string& content, std::int64_t start, std::int64_t stop);
Decoder decode_replaced(const Pattern& pattern, const std::string& content);

// With U+FFFD for every longest part that begins a character and does not end it, and for every other wrong byte.
std::string repaired_utf8(std::string_view bytes);

}  // namespace data
