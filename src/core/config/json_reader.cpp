// A recursive-descent reader that reports every fault with its location.
#include "config/json_reader.h"

#include <map>

#include "base/utf8.h"

namespace zero::config {
namespace {

struct Stop {};  // thrown after a fatal fault

class Reader {
 public:
  Reader(std::shared_ptr<const Source> source, Faults& faults)
      : source_(std::move(source)), text_(source_->text), faults_(faults) {}

  Value document() {
    if (text_.size() > kMaxFileBytes)
      fail("too-large", 0, 1, "got a text of " + std::to_string(text_.size()) + " bytes, expected at most 1048576");
    check_utf8();
    if (text_.compare(0, 3, "\xEF\xBB\xBF") == 0) at_ = 3;
    skip();
    if (at_ == text_.size()) fail("syntax", at_, 1, "got an empty text, expected a JSON object");
    Value value = read(0);
    skip();
    if (at_ < text_.size()) fail("trailing", at_, 1, "got more text after the top-level value, expected the end");
    return value;
  }

 private:
  Place place(std::size_t from, std::size_t length) const { return {source_, from, length}; }

  [[noreturn]] void fail(const char* id, std::size_t from, std::size_t length, const std::string& message,
                         const std::string& hint = {}) {
    faults_.error(id, place(from, length), pointer_, message, hint);
    throw Stop{};
  }

  void check_utf8() {
    for (std::size_t i = 0; i < text_.size();) {
      const auto character = base::first_character(std::string_view(text_).substr(i));
      if (character.code == 0) fail("bad-utf8", i, 1, "got a NUL at byte " + std::to_string(i));
      if (character.code < 0)
        fail("bad-utf8", i, 1, "got a broken, overlong or forbidden UTF-8 sequence at byte " + std::to_string(i));
      i += character.bytes;
    }
  }

  // White space and comments.
  void skip() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        ++at_;
      } else if (c == '#' || text_.compare(at_, 2, "//") == 0) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.compare(at_, 2, "/*") == 0) {
        const auto end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) fail("syntax", at_, 2, "got a comment without its end, expected */");
        at_ = end + 2;
      } else {
        return;
      }
    }
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  std::string found() const {
    if (at_ >= text_.size()) return "the end of the text";
    const char c = text_[at_];
    std::size_t end = at_;
    while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) || text_[end] == '_')) ++end;
    return "`" + (end > at_ ? text_.substr(at_, std::min<std::size_t>(end - at_, 40)) : std::string(1, c)) + "`";
  }

  std::size_t word_length() const {
    std::size_t end = at_;
    while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) ||
                                  std::string_view("_+-.").find(text_[end]) != std::string_view::npos))
      ++end;
    return std::max<std::size_t>(1, end - at_);
  }

  Value read(int depth) {
    if (depth > kMaxDepth) fail("too-deep", at_, 1, "got more than " + std::to_string(kMaxDepth) + " levels");
    Value value;
    const std::size_t from = at_;
    const char c = peek();
    if (c == '{') {
      value.kind = Value::Kind::Object;
      read_object(value, depth);
    } else if (c == '[') {
      value.kind = Value::Kind::Array;
      read_array(value, depth);
    } else if (c == '"') {
      value.kind = Value::Kind::String;
      value.text = read_string();
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      read_number(value);
    } else {
      read_word(value);
    }
    value.place = place(from, std::max<std::size_t>(1, at_ - from));
    return value;
  }

  void read_word(Value& value) {
    const std::size_t length = word_length();
    const std::string word = text_.substr(at_, length);
    if (word == "true" || word == "false") {
      value.kind = Value::Kind::Bool;
      value.boolean = word == "true";
    } else if (word == "null") {
      value.kind = Value::Kind::Null;
    } else if (word == "NaN" || word == "nan" || word == "Infinity" || word == "inf") {
      not_a_number(value, length);
    } else {
      std::string hint;
      if (word == "True" || word == "False" || word == "None")
        hint = "this is Python; JSON writes " + std::string(word == "True"    ? "true"
                                                            : word == "False" ? "false"
                                                                              : "null");
      else if (peek() == '\'')
        hint = "strings take double quotes";
      else if (std::isalpha(static_cast<unsigned char>(peek())))
        hint = "strings need double quotes, as in \"" + word + "\"; this is JSON, not HJSON";
      fail("syntax", at_, length, "got " + found() + ", expected a value", hint);
    }
    at_ += length;
  }

  void not_a_number(Value& value, std::size_t length) {
    faults_.error("not-a-number", place(at_, length), pointer_,
                  "got " + text_.substr(at_, length) + ", expected a finite number");
    value.kind = Value::Kind::Number;
    value.text.clear();  // avoids further faults for it
  }

  void read_number(Value& value) {
    const std::size_t from = at_;
    value.kind = Value::Kind::Number;
    if (peek() == '-') ++at_;
    if (text_.compare(at_, 8, "Infinity") == 0) {
      at_ = from;
      not_a_number(value, 9);
      at_ = from + 9;
      return;
    }
    const auto digits = [&] {
      const std::size_t begin = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
      return at_ - begin;
    };
    const std::size_t first = at_;
    const std::size_t whole = digits();
    if (whole == 0) fail("syntax", from, word_length(), "got " + found() + " after -, expected a digit");
    if (whole > 1 && text_[first] == '0') {
      const auto begin = std::min(text_.find_first_not_of('0', first), at_ - 1);  // a zero of "00" stays
      fail("syntax", from, at_ - from, "got a number with leading zeros",
           "write " + text_.substr(begin, std::min<std::size_t>(at_ - begin, 8)));
    }
    if (peek() == '.') {
      ++at_;
      if (digits() == 0)
        fail("syntax", from, at_ - from, "got a number that ends in its point, expected a digit behind it");
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (digits() == 0) fail("syntax", from, at_ - from, "got an exponent without digits");
    }
    if (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_' || peek() == '.')
      fail("syntax", from, at_ - from + word_length(),
           "got " + text_.substr(from, at_ - from + word_length()) + ", expected a number");
    value.text = text_.substr(from, at_ - from);
    bool too_large = false;
    const auto as_whole = whole_number(value.text, &too_large);
    const bool integer = value.text.find_first_of(".eE") == std::string::npos;
    if ((integer && too_large) || (!as_whole && !finite_number(value.text))) {
      faults_.error("number-too-large", place(from, at_ - from), pointer_,
                    "got " + value.text.substr(0, 60) +
                        (integer ? ", expected a 64-bit integer" : ", expected a number that a double can hold"));
      value.text.clear();  // avoids further faults for it
    }
  }

  unsigned hex4() {
    unsigned code = 0;
    for (int k = 0; k < 4; ++k, ++at_) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("syntax", at_, 1, "got " + found() + ", expected four hexadecimal digits after \\u");
      code = code * 16 + static_cast<unsigned>(digit);
    }
    return code;
  }

  void append_utf8(std::string& out, unsigned code) {
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xC0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 63));
    } else if (code < 0x10000) {
      out += static_cast<char>(0xE0 | code >> 12);
      out += static_cast<char>(0x80 | (code >> 6 & 63));
      out += static_cast<char>(0x80 | (code & 63));
    } else {
      out += static_cast<char>(0xF0 | code >> 18);
      out += static_cast<char>(0x80 | (code >> 12 & 63));
      out += static_cast<char>(0x80 | (code >> 6 & 63));
      out += static_cast<char>(0x80 | (code & 63));
    }
  }

  void read_escape(std::string& out, std::size_t from) {
    const std::size_t begin = at_ - 1;
    const char c = peek();
    ++at_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out += c;
        return;
      case 'b':
        out += '\b';
        return;
      case 'f':
        out += '\f';
        return;
      case 'n':
        out += '\n';
        return;
      case 'r':
        out += '\r';
        return;
      case 't':
        out += '\t';
        return;
      case 'u': {
        unsigned code = hex4();
        if (code >= 0xD800 && code < 0xDC00 && text_.compare(at_, 2, "\\u") == 0) {
          at_ += 2;
          const unsigned low = hex4();
          if (low < 0xDC00 || low > 0xDFFF)
            fail("bad-utf8", begin, 6, "got a lone surrogate at byte " + std::to_string(begin));
          code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
        }
        if (code >= 0xD800 && code < 0xE000)
          fail("bad-utf8", begin, 6, "got a lone surrogate at byte " + std::to_string(begin));
        if (code == 0) fail("bad-utf8", begin, 6, "got a NUL at byte " + std::to_string(begin));
        append_utf8(out, code);
        return;
      }
      default:
        at_ = begin;
        fail("syntax", begin, 2,
             "got the escape \\" + (c ? std::string(1, c) : "") + " in the string that starts at byte " +
                 std::to_string(from) + ", expected one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\u");
    }
  }

  std::string read_string() {
    const std::size_t from = at_++;
    std::string out;
    while (true) {
      if (at_ >= text_.size() || text_[at_] == '\n')
        fail("syntax", from, 1, "got a string without its end, expected a closing \"");
      const char c = text_[at_];
      if (c == '"') break;
      if (static_cast<unsigned char>(c) < 0x20)
        fail("syntax", at_, 1, "got a control character in a string, expected an escape such as \\t");
      ++at_;
      if (c == '\\')
        read_escape(out, from);
      else
        out += c;
      if (out.size() > kMaxStringBytes)
        fail("too-large", from, 1, "got a string of more than " + std::to_string(kMaxStringBytes) + " bytes");
    }
    ++at_;
    return out;
  }

  void read_object(Value& value, int depth) {
    const std::size_t open = at_++;
    std::map<std::string, Place> seen;
    while (true) {
      skip();
      if (peek() == '}') break;
      if (at_ >= text_.size()) fail("syntax", open, 1, "got the end of the text inside an object, expected }");
      const std::size_t from = at_;
      if (peek() != '"') {
        const bool word = std::isalpha(static_cast<unsigned char>(peek())) || peek() == '_';
        fail("syntax", at_, word_length(),
             "got " + found() + ", expected a key in double quotes" + (value.members.empty() ? " or }" : ""),
             word             ? "write \"" + text_.substr(at_, word_length()) + "\"; this is JSON, not HJSON"
             : peek() == '\'' ? "keys take double quotes"
                              : "");
      }
      Member member;
      member.key = read_string();
      member.key_place = place(from, at_ - from);
      const std::string outer = pointer_;
      pointer_ += "/" + member.key;
      skip();
      if (peek() != ':') fail("syntax", at_, word_length(), "got " + found() + ", expected : after the key");
      ++at_;
      skip();
      member.value = read(depth + 1);
      const auto [first, fresh] = seen.emplace(member.key, member.key_place);
      if (!fresh)
        faults_.error("duplicate-key", member.key_place, pointer_,
                      "got the key twice in one object, first at " + first->second.text(), "keep one of the two",
                      {first->second});
      else
        value.members.push_back(std::move(member));
      if (seen.size() > kMaxListItems)
        fail("too-large", open, 1, "got an object of more than " + std::to_string(kMaxListItems) + " keys");
      pointer_ = outer;
      skip();
      if (peek() == ',') {
        ++at_;
      } else if (peek() != '}') {
        if (at_ >= text_.size()) fail("syntax", open, 1, "got the end of the text inside an object, expected }");
        fail("syntax", at_, word_length(), "got " + found() + ", expected , or }",
             peek() == '"' ? "a comma is missing before this key" : "");
      }
    }
    ++at_;
  }

  void read_array(Value& value, int depth) {
    const std::size_t open = at_++;
    while (true) {
      skip();
      if (peek() == ']') break;
      if (at_ >= text_.size()) fail("syntax", open, 1, "got the end of the text inside a list, expected ]");
      value.items.push_back(read(depth + 1));
      if (value.items.size() > kMaxListItems)
        fail("too-large", open, 1, "got a list of more than " + std::to_string(kMaxListItems) + " elements");
      skip();
      if (peek() == ',')
        ++at_;
      else if (peek() != ']')
        fail("syntax", at_, word_length(), "got " + found() + ", expected , or ]");
    }
    ++at_;
  }

  std::shared_ptr<const Source> source_;
  const std::string& text_;
  Faults& faults_;
  std::size_t at_ = 0;
  std::string pointer_;
};

}  // namespace

std::optional<Value> read_json(const std::shared_ptr<const Source>& source, Faults& faults) {
  try {
    return Reader(source, faults).document();
  } catch (const Stop&) {
    return {};
  }
}

}  // namespace zero::config
