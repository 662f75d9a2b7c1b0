// UTF-8, one character at a time. Strict: overlong forms, surrogates and codes beyond U+10FFFF are malformed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zero::base {

struct Character {
  std::int32_t code = -1;  // -1: the byte is not part of a character
  std::size_t bytes = 1;
};
// Of a text that is not empty.
Character first_character(std::string_view text);

}  // namespace zero::base
