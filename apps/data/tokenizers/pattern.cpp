// See pattern.h. The expression is rewritten: PCRE2's \s counts U+180E, its \w leaves marks out.
#include "apps/data/tokenizers/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>
#include <cstdio>
#include <stdexcept>

namespace data {
namespace {

constexpr std::size_t kExpressionBytes = 64 << 10;
constexpr const char* kSpace = "\\p{Z}\\t-\\r\\x{85}";
constexpr const char* kWord =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}"
    "\\x{1f170}-\\x{1f189}";

class Translator {
 public:
  explicit Translator(std::string_view text) : text_(text) {}

  std::string translate() {
    if (text_.size() > kExpressionBytes) refuse("an expression of " + std::to_string(text_.size()) + " bytes");
    if (text_.find('\0') != std::string_view::npos) refuse("a byte of 0");
    while (at_ < text_.size()) step();
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::invalid_argument(what + " at byte " + std::to_string(at_) + " of the regular expression \"" +
                                std::string(text_.substr(0, 80)) + "\"");
  }
  bool next_is(std::string_view what) const { return text_.substr(at_, what.size()) == what; }
  void copy(std::size_t bytes) {
    out_ += text_.substr(at_, bytes);
    at_ += bytes;
  }

  void step() {
    switch (text_[at_]) {
      case '\\':
        escape(false);
        break;
      case '[':
        character_class();
        break;
      case '(':
        group();
        break;
      case '{':
        repetition();
        break;
      case '^':
      case '$':
        refuse(std::string("the anchor ") + text_[at_]);
      default:
        copy(1);
    }
  }

  void escape(bool in_class) {
    if (at_ + 1 == text_.size()) refuse("a backslash at the end");
    const char c = text_[at_ + 1];
    switch (c) {
      case 's':
        add_class(kSpace, in_class, false);
        break;
      case 'w':
        add_class(kWord, in_class, false);
        break;
      case 'd':
        add_class("\\p{Nd}", in_class, false);
        break;
      case 'S':
      case 'W':
      case 'D':
        if (in_class) refuse(std::string("\\") + c + " in a class");
        add_class(c == 'S' ? kSpace : c == 'W' ? kWord : "\\p{Nd}", false, true);
        break;
      case 'p':
      case 'P':
        property();
        break;
      case 'x':
        hexadecimal();
        break;
      case 'u':
        out_ += "\\x{" + digits(at_ + 2, 4) + "}";
        at_ += 6;
        break;
      case 'r':
      case 'n':
      case 't':
      case 'f':
        copy(2);
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x80 || std::isalnum(static_cast<unsigned char>(c)) != 0)
          refuse(std::string("\\") + c);
        copy(2);
    }
  }

  void add_class(const char* members, bool in_class, bool negated) {
    out_ += in_class ? members : std::string(negated ? "[^" : "[") + members + "]";
    at_ += 2;
  }
  void property() {
    const auto end = text_.find('}', at_);
    if (text_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos || end - at_ > 40)
      refuse("\\p without {name}");
    copy(end + 1 - at_);
  }
  std::string digits(std::size_t from, std::size_t count) const {
    const auto found = text_.substr(from, count);
    if (found.empty() || found.size() != count ||
        found.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos)
      refuse("digits that are not hexadecimal");
    return std::string(found);
  }
  void hexadecimal() {
    if (text_.substr(at_ + 2, 1) == "{") {
      const auto end = text_.find('}', at_);
      if (end == std::string_view::npos || end - at_ > 10) refuse("\\x{ without its end");
      (void)digits(at_ + 3, end - at_ - 3);
      copy(end + 1 - at_);
    } else {
      out_ += "\\x{" + digits(at_ + 2, 2) + "}";
      at_ += 4;
    }
  }

  void character_class() {
    copy(1);
    if (next_is("^")) copy(1);
    if (next_is("]")) refuse("an empty class");
    while (!next_is("]")) {
      if (at_ == text_.size()) refuse("a class without its end");
      if (next_is("[")) refuse("a class in a class");
      if (next_is("&&")) refuse("&& in a class");
      if (text_[at_] == '\\')
        escape(true);
      else
        copy(1);
    }
    copy(1);
  }

  void group() {
    for (const char* known : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?i:"})
      if (next_is(known)) return copy(std::string_view(known).size());
    if (next_is("(?") || next_is("(*")) refuse("the group " + std::string(text_.substr(at_, 4)));
    copy(1);
  }

  // Oniguruma takes {n,m}+ for a repeated repetition and {,m} for {0,m}; PCRE2 does not.
  void repetition() {
    const auto end = text_.find('}', at_);
    const auto inside = text_.substr(at_ + 1, end == std::string_view::npos ? 0 : end - at_ - 1);
    if (inside.empty() || inside.size() > 11 || inside[0] == ',' ||
        inside.find_first_not_of("0123456789,") != std::string_view::npos)
      refuse("the repetition {" + std::string(inside) + "}");
    copy(end + 1 - at_);
    if (next_is("+")) refuse("}+");
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string out_;
};

}  // namespace

struct Pattern::Code {
  explicit Code(const std::string& expression) {
    int error = 0;
    PCRE2_SIZE at = 0;
    auto* compiling = pcre2_compile_context_create(nullptr);
    pcre2_set_newline(compiling, PCRE2_NEWLINE_LF);
    pcre2_set_parens_nest_limit(compiling, 50);
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(), PCRE2_UTF | PCRE2_UCP,
                         &error, &at, compiling);
    pcre2_compile_context_free(compiling);
    if (code == nullptr) {
      PCRE2_UCHAR text[200];
      pcre2_get_error_message(error, text, sizeof text);
      throw std::invalid_argument(std::string(reinterpret_cast<const char*>(text)) + " at byte " + std::to_string(at) +
                                  " of the regular expression \"" + expression.substr(0, 80) + "\"");
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    limits = pcre2_match_context_create(nullptr);
    pcre2_set_match_limit(limits, 20'000'000);
    pcre2_set_heap_limit(limits, 64 << 10);
  }
  ~Code() {
    pcre2_match_context_free(limits);
    pcre2_code_free(code);
  }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  pcre2_code* code = nullptr;
  pcre2_match_context* limits = nullptr;
};

Pattern::Pattern(const std::string& expression) : code_(std::make_shared<Code>(Translator(expression).translate())) {}

Pattern Pattern::literal(std::string_view text) {
  std::string expression;
  char code[16];
  each_character(text, [&](std::int32_t c, std::size_t, std::size_t) {
    std::snprintf(code, sizeof code, "\\x{%x}", static_cast<unsigned>(c));
    expression += code;
  });
  return Pattern(std::make_shared<const Code>(expression));
}

TextParts Pattern::parts(std::string_view text) const {
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create_from_pattern(code_->code, nullptr), &pcre2_match_data_free);
  TextParts parts;
  parts.reserve(text.size() / 4);
  std::size_t at = 0, before = 0;
  while (at < text.size()) {
    const int found = pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  PCRE2_NO_UTF_CHECK, data.get(), code_->limits);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) throw std::runtime_error("[tokenizer] a regular expression takes too many steps on this text");
    const auto* range = pcre2_get_ovector_pointer(data.get());
    if (range[1] <= range[0]) {  // an empty match
      at = range[0] >= text.size() ? text.size() : range[0] + first_code_point(text.substr(range[0], 4)).bytes;
      continue;
    }
    if (range[0] > before) parts.push_back({before, range[0], false});
    parts.push_back({range[0], range[1], true});
    at = before = range[1];
  }
  if (before < text.size()) parts.push_back({before, text.size(), false});
  return parts;
}

const Pattern& gpt2_pattern() {
  static const Pattern pattern(R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)");
  return pattern;
}

}  // namespace data
