// Characters: UTF-8 and the properties that tokenizers ask for. utf8proc has the tables (Unicode 15.0).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace data {

struct CodePoint {
  std::int32_t code = 0;
  std::uint32_t bytes = 1;
};

// The first character of a text that is valid UTF-8 and not empty.
CodePoint first_code_point(std::string_view text);
void append_utf8(std::string& out, std::int32_t code);
// The first byte that is not part of a character; the size of the text if all are. Overlong forms, surrogates and codes
// beyond U+10FFFF are no characters.
std::size_t invalid_utf8(std::string_view text);

// Appends the lower-case form of a character: one character, but for U+0130.
void append_lower(std::string& out, std::int32_t code);
// Python's str.lower() of valid UTF-8: a capital sigma that ends a word (Unicode's Final_Sigma) becomes U+03C2.
std::string python_lower(std::string_view text);

bool is_white_space(std::int32_t code);      // the property White_Space
bool is_python_space(std::int32_t code);     // what Python's str.split() takes for white space: also U+001C to U+001F
bool is_punctuation(std::int32_t code);      // ASCII's and the categories P*
bool is_control(std::int32_t code);          // the categories Cc, Cf, Co, Cs
bool is_nonspacing_mark(std::int32_t code);  // the category Mn
bool is_mark(std::int32_t code);             // the categories M*
bool is_numeric(std::int32_t code);          // the categories N*
bool is_word(std::int32_t code);  // \w of regular expressions: alphabetic, marks, decimal digits, connectors, joiners
bool is_python_word(std::int32_t code);  // \w of Python's re: letters, the categories N*, the underscore
bool is_cjk(std::int32_t code);          // the blocks that BERT's tokenizer puts spaces around

}  // namespace data
