// How a text becomes a string of a JSON document. The one home of that rule for documents that are written by hand;
// nlohmann's library quotes what it writes itself. No numbers and no objects here.
#pragma once
#include <string>
#include <string_view>

namespace zero::base {

enum class NotUtf8 {
  Replace,  // by U+FFFD: the document is JSON whatever the text holds
  Keep,     // for a configuration, whose reader refuses such a text instead of using another one
};

// `text` in quotes. Control characters and all that could command a terminal (printable.h) become \u001b, as a JSON
// document may be printed; new lines and tabs become \n and \t.
std::string json_quote(std::string_view text, NotUtf8 bytes = NotUtf8::Replace);

}  // namespace zero::base
