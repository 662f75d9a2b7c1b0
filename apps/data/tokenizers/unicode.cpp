// See unicode.h.
#include "apps/data/tokenizers/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace data {
namespace {

utf8proc_category_t category_of(std::int32_t code) { return utf8proc_category(code); }

// Marks, punctuation and format characters that Unicode has since version 9: the tables of tokenizers
// (unicode_categories 0.1.1, Unicode 8) do not have them, so they are none there, and vocabularies were made that way.
// Sorted ranges.
constexpr std::pair<std::int32_t, std::int32_t> kSinceUnicode9[] = {
    {0x61d, 0x61d},     {0x7fd, 0x7fd},     {0x890, 0x891},     {0x898, 0x89f},     {0x8ca, 0x8e2},
    {0x9fd, 0x9fe},     {0xa76, 0xa76},     {0xafa, 0xaff},     {0xb55, 0xb55},     {0xc04, 0xc04},
    {0xc3c, 0xc3c},     {0xc77, 0xc77},     {0xc84, 0xc84},     {0xd00, 0xd00},     {0xd3b, 0xd3c},
    {0xd81, 0xd81},     {0xeba, 0xeba},     {0xece, 0xece},     {0x180f, 0x180f},   {0x1885, 0x1886},
    {0x1abf, 0x1ace},   {0x1b7d, 0x1b7e},   {0x1df6, 0x1dfb},   {0x2e43, 0x2e4f},   {0x2e52, 0x2e5d},
    {0xa82c, 0xa82c},   {0xa8c5, 0xa8c5},   {0xa8ff, 0xa8ff},   {0xa9bd, 0xa9bd},   {0x10d24, 0x10d27},
    {0x10eab, 0x10ead}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f55, 0x10f59}, {0x10f82, 0x10f89},
    {0x11070, 0x11070}, {0x11073, 0x11074}, {0x110c2, 0x110c2}, {0x110cd, 0x110cd}, {0x111c9, 0x111c9},
    {0x111cf, 0x111cf}, {0x1123e, 0x1123e}, {0x11241, 0x11241}, {0x1133b, 0x1133b}, {0x11438, 0x1143f},
    {0x11442, 0x11444}, {0x11446, 0x11446}, {0x1144b, 0x1144f}, {0x1145a, 0x1145b}, {0x1145d, 0x1145e},
    {0x11660, 0x1166c}, {0x116b9, 0x116b9}, {0x1182f, 0x11837}, {0x11839, 0x1183b}, {0x1193b, 0x1193c},
    {0x1193e, 0x1193e}, {0x11943, 0x11946}, {0x119d4, 0x119d7}, {0x119da, 0x119db}, {0x119e0, 0x119e0},
    {0x119e2, 0x119e2}, {0x11a01, 0x11a0a}, {0x11a33, 0x11a38}, {0x11a3b, 0x11a47}, {0x11a51, 0x11a56},
    {0x11a59, 0x11a5b}, {0x11a8a, 0x11a96}, {0x11a98, 0x11a9c}, {0x11a9e, 0x11aa2}, {0x11b00, 0x11b09},
    {0x11c30, 0x11c36}, {0x11c38, 0x11c3d}, {0x11c3f, 0x11c3f}, {0x11c41, 0x11c45}, {0x11c70, 0x11c71},
    {0x11c92, 0x11ca7}, {0x11caa, 0x11cb0}, {0x11cb2, 0x11cb3}, {0x11cb5, 0x11cb6}, {0x11d31, 0x11d36},
    {0x11d3a, 0x11d3a}, {0x11d3c, 0x11d3d}, {0x11d3f, 0x11d45}, {0x11d47, 0x11d47}, {0x11d90, 0x11d91},
    {0x11d95, 0x11d95}, {0x11d97, 0x11d97}, {0x11ef3, 0x11ef4}, {0x11ef7, 0x11ef8}, {0x11f00, 0x11f01},
    {0x11f36, 0x11f3a}, {0x11f40, 0x11f40}, {0x11f42, 0x11f4f}, {0x11fff, 0x11fff}, {0x12ff1, 0x12ff2},
    {0x13430, 0x13440}, {0x13447, 0x13455}, {0x16e97, 0x16e9a}, {0x16f4f, 0x16f4f}, {0x16fe2, 0x16fe2},
    {0x16fe4, 0x16fe4}, {0x1cf00, 0x1cf2d}, {0x1cf30, 0x1cf46}, {0x1e000, 0x1e006}, {0x1e008, 0x1e018},
    {0x1e01b, 0x1e021}, {0x1e023, 0x1e024}, {0x1e026, 0x1e02a}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136},
    {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e944, 0x1e94a}, {0x1e95e, 0x1e95f}};

utf8proc_category_t category_before_9(std::int32_t code) {
  const auto* range = std::upper_bound(std::begin(kSinceUnicode9), std::end(kSinceUnicode9), code,
                                       [](std::int32_t c, const auto& one) { return c < one.first; });
  if (range != std::begin(kSinceUnicode9) && code <= range[-1].second) return UTF8PROC_CATEGORY_CN;
  return utf8proc_category(code);
}

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

namespace {

constexpr std::int32_t kCapitalSigma = 0x3a3, kFinalSigma = 0x3c2;

bool is_cased(std::int32_t code) {
  const auto category = utf8proc_category(code);
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT ||
         utf8proc_tolower(code) != code || utf8proc_toupper(code) != code || code == 0xaa || code == 0xba;
}

// Unicode's Case_Ignorable: some categories, and what stands inside words (Word_Break of middles and single quotes).
bool is_case_ignorable(std::int32_t code) {
  constexpr std::array<std::int32_t, 17> kInside{'\'',   '.',    ':',    0xb7,   0x387,  0x55f,  0x5f4,  0x2018, 0x2019,
                                                 0x2024, 0x2027, 0xfe13, 0xfe52, 0xfe55, 0xff07, 0xff0e, 0xff1a};
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return std::find(kInside.begin(), kInside.end(), code) != kInside.end();
  }
}

}  // namespace

std::string python_lower(std::string_view text) {
  std::string lower;
  bool after_cased = false;  // the last character that is not ignorable
  while (!text.empty()) {
    const auto [code, bytes] = first_code_point(text);
    text.remove_prefix(bytes);
    bool before_cased = false;
    if (code == kCapitalSigma && after_cased)
      for (auto rest = text; !rest.empty();) {
        const auto next = first_code_point(rest);
        rest.remove_prefix(next.bytes);
        if (is_case_ignorable(next.code)) continue;
        before_cased = is_cased(next.code);
        break;
      }
    if (code == kCapitalSigma && after_cased && !before_cased)
      append_utf8(lower, kFinalSigma);
    else
      append_lower(lower, code);
    if (!is_case_ignorable(code)) after_cased = is_cased(code);
  }
  return lower;
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
  const auto category = category_before_9(code);
  if (code == 0x166d || code == 0x111c9) return true;  // a symbol and a mark since
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_control(std::int32_t code) {
  if (code < 0x80) return code < 32 || code == 127;
  const auto category = category_before_9(code);
  return category >= UTF8PROC_CATEGORY_CC;
}

bool is_nonspacing_mark(std::int32_t code) { return code >= 0x80 && category_before_9(code) == UTF8PROC_CATEGORY_MN; }

bool is_mark(std::int32_t code) {
  return code >= 0x80 && category_before_9(code) >= UTF8PROC_CATEGORY_MN &&
         category_before_9(code) <= UTF8PROC_CATEGORY_ME;
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

bool is_python_word(std::int32_t code) {
  if (code < 0x80) return is_word(code);
  const auto category = utf8proc_category(code);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) || is_numeric(code);
}

bool is_cjk(std::int32_t code) {
  return (code >= 0x4e00 && code <= 0x9fff) || (code >= 0x3400 && code <= 0x4dbf) ||
         (code >= 0x20000 && code <= 0x2a6df) || (code >= 0x2a700 && code <= 0x2b73f) ||
         (code >= 0x2b740 && code <= 0x2b81f) || (code >= 0x2b920 && code <= 0x2ceaf) ||
         (code >= 0xf900 && code <= 0xfaff) || (code >= 0x2f800 && code <= 0x2fa1f);
}

}  // namespace data
