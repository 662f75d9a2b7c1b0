// See printable.h.
#include "base/printable.h"

#include <algorithm>
#include <cstdio>

#include "base/utf8.h"

namespace zero::base {
namespace {

std::string escaped(const char* form, unsigned code) {
  char out[16];
  std::snprintf(out, sizeof out, form, code);
  return out;
}

}  // namespace

bool commands_terminal(std::int32_t code) {
  return (code >= 0 && code < 0x20) || (code >= 0x7F && code < 0xA0) ||             // C0, DEL, C1
         code == 0x61C || code == 0x200E || code == 0x200F ||                       // marks of direction
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);  // separators, embeddings, isolates
}

std::string printable(std::string_view text, Lines lines) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const Character c = first_character(text.substr(at));
    if (c.code < 0) {
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
    else if (commands_terminal(c.code))
      out += escaped("\\u%04x", static_cast<unsigned>(c.code));
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
