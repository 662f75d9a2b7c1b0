// A strict UTF-8 decoder, one character at a time (printable.h).
#include "base/printable.h"

#include <algorithm>
#include <cstdio>

namespace zero::base {
namespace {

struct Character {
  unsigned code = 0;
  std::size_t bytes = 0;  // 0: not UTF-8
};

Character character_at(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(at);
  if (first < 0x80) return {first, 1};
  const std::size_t bytes = first >= 0xF0 && first < 0xF5 ? 4 : first >= 0xE0 ? 3 : first >= 0xC2 ? 2 : 0;
  if (bytes == 0 || first >= 0xF5 || at + bytes > text.size()) return {};
  unsigned code = first & (0xFFu >> (bytes + 1));
  for (std::size_t k = 1; k < bytes; ++k) {
    if ((byte(at + k) & 0xC0u) != 0x80u) return {};
    code = code << 6 | (byte(at + k) & 0x3Fu);
  }
  const unsigned least = bytes == 4 ? 0x10000 : bytes == 3 ? 0x800 : 0x80;
  if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {};
  return {code, bytes};
}

bool commands(unsigned code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) ||                            // C0, DEL, C1
         code == 0x61C || code == 0x200E || code == 0x200F ||                       // bidirectional marks
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);  // separators, embeddings, isolates
}

std::string escaped(const char* form, unsigned code) {
  char out[16];
  std::snprintf(out, sizeof out, form, code);
  return out;
}

}  // namespace

std::string printable(std::string_view text, Lines lines) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text, at);
    if (c.bytes == 0) {
      out += escaped("\\x%02x", static_cast<unsigned char>(text[at]));
      ++at;
      continue;
    }
    if ((c.code == '\n' || c.code == '\t') && lines == Lines::Keep)
      out += static_cast<char>(c.code);
    else if (c.code == '\n')
      out += "\\n";
    else if (c.code == '\t')
      out += "\\t";
    else if (commands(c.code))
      out += escaped("\\u%04x", c.code);
    else
      out += text.substr(at, c.bytes);
    at += c.bytes;
  }
  return out;
}

std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

}  // namespace zero::base
