// See json_write.h.
#include "base/json_write.h"

#include <cstdio>

#include "base/printable.h"
#include "base/utf8.h"

namespace zero::base {

std::string json_quote(std::string_view text, NotUtf8 bytes) {
  std::string out = "\"";
  while (!text.empty()) {
    const Character c = first_character(text);
    if (c.code == '"' || c.code == '\\') {
      (out += '\\') += text[0];
    } else if (c.code == '\n') {
      out += "\\n";
    } else if (c.code == '\t') {
      out += "\\t";
    } else if (commands_terminal(c.code)) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c.code) & 0xffffu);
      out += escape;
    } else if (c.code < 0 && bytes == NotUtf8::Replace) {
      out += "\ufffd";
    } else {
      out.append(text.substr(0, c.bytes));
    }
    text.remove_prefix(c.bytes);
  }
  return out += '"';
}

}  // namespace zero::base
