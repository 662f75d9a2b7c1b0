// See unicode.h.
#include "data/tokenizers/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

namespace data {
namespace {

utf8proc_category_t category_of(std::int32_t code) { return utf8proc_category(code); }

// UnicodeData has no Alphabetic property; \w adds what is alphabetic without being a letter: circled letters and
// others.
bool other_alphabetic(std::int32_t code) {
  return category_of(code) == UTF8PROC_CATEGORY_NL || (code >= 0x24b6 && code <= 0x24e9) ||
         (code >= 0x1f130 && code <= 0x1f149) || (code >= 0x1f150 && code <= 0x1f169) ||
         (code >= 0x1f170 && code <= 0x1f189);
}

}  // namespace

CodePoint first_code_point(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<std::int32_t>(static_cast<unsigned char>(text[i])) : 0;
  };
  const auto lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {(lead & 0x1f) << 6 | (byte(1) & 0x3f), 2};
  if (lead < 0xf0) return {(lead & 0xf) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f), 3};
  return {(lead & 7) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f), 4};
}

void append_utf8(std::string& out, std::int32_t code) {
  const auto put = [&](std::int32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | code >> 6);
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3f));
    put(0x80 | (code >> 6 & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

std::size_t invalid_utf8(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const std::size_t n = lead >= 0xf0 && lead < 0xf5   ? 4
                          : lead >= 0xe0 && lead < 0xf0 ? 3
                          : lead >= 0xc2 && lead < 0xe0 ? 2
                                                        : 0;
    if (n == 0 || text.size() - at < n) return at;
    for (std::size_t i = 1; i < n; ++i)
      if ((static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) return at;
    const auto code = first_code_point(text.substr(at)).code;
    static constexpr std::array<std::int32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
    if (code < kLeast[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return at;
    at += n;
  }
  return at;
}

void append_lower(std::string& out, std::int32_t code) {
  append_utf8(out, code == 0x130 ? 'i' : utf8proc_tolower(code));
  if (code == 0x130) append_utf8(out, 0x307);
}

bool is_python_space(std::int32_t code) { return is_white_space(code) || (code >= 0x1c && code <= 0x1f); }

bool is_white_space(std::int32_t code) {
  if (code < 0x80) return code == ' ' || (code >= 9 && code <= 13);
  return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 ||
         code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

bool is_punctuation(std::int32_t code) {
  if (code < 0x80)
    return (code >= 33 && code <= 47) || (code >= 58 && code <= 64) || (code >= 91 && code <= 96) ||
           (code >= 123 && code <= 126);
  const auto category = category_of(code);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_control(std::int32_t code) {
  if (code < 0x80) return code < 32 || code == 127;
  const auto category = category_of(code);
  return category == UTF8PROC_CATEGORY_CN || category >= UTF8PROC_CATEGORY_CC;
}

bool is_nonspacing_mark(std::int32_t code) { return code >= 0x80 && category_of(code) == UTF8PROC_CATEGORY_MN; }

bool is_mark(std::int32_t code) {
  return code >= 0x80 && category_of(code) >= UTF8PROC_CATEGORY_MN && category_of(code) <= UTF8PROC_CATEGORY_ME;
}

bool is_numeric(std::int32_t code) {
  if (code < 0x80) return code >= '0' && code <= '9';
  return category_of(code) >= UTF8PROC_CATEGORY_ND && category_of(code) <= UTF8PROC_CATEGORY_NO;
}

bool is_word(std::int32_t code) {
  if (code < 0x80)
    return (code >= '0' && code <= '9') || (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z') || code == '_';
  const auto category = category_of(code);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_ND) || category == UTF8PROC_CATEGORY_PC ||
         code == 0x200c || code == 0x200d || other_alphabetic(code);
}

bool is_cjk(std::int32_t code) {
  return (code >= 0x4e00 && code <= 0x9fff) || (code >= 0x3400 && code <= 0x4dbf) ||
         (code >= 0x20000 && code <= 0x2a6df) || (code >= 0x2a700 && code <= 0x2b73f) ||
         (code >= 0x2b740 && code <= 0x2b81f) || (code >= 0x2b920 && code <= 0x2ceaf) ||
         (code >= 0xf900 && code <= 0xfaff) || (code >= 0x2f800 && code <= 0x2fa1f);
}

}  // namespace data
