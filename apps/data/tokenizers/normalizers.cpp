// See normalizers.h.
#include "apps/data/tokenizers/normalizers.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

namespace data {
namespace {

constexpr std::string_view kSpaceMark = "\xe2\x96\x81";  // U+2581

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Keeps what `rewrite` does not change: it is called with (rewriter, code, first, last) for each character.
template <class Rewrite>
Piece by_character(const Piece& piece, Arena& arena, const Rewrite& rewrite) {
  Rewriter out(piece, arena);
  each_character(piece.text,
                 [&](std::int32_t code, std::size_t first, std::size_t last) { rewrite(out, code, first, last); });
  return out.finish();
}

utf8proc_option_t options_of(NormalForm form) {
  int options = form == NormalForm::Nfc || form == NormalForm::Nfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::Nfkc || form == NormalForm::Nfkd) options |= UTF8PROC_COMPAT;
  return static_cast<utf8proc_option_t>(UTF8PROC_STABLE | options);
}

// Whether a normal form may join the character to the one before it.
bool may_join(std::int32_t code, utf8proc_option_t options) {
  if (code < 0x300) return false;
  std::array<utf8proc_int32_t, 32> parts{};
  int boundary = 0;
  const auto count = utf8proc_decompose_char(
      code, parts.data(), parts.size(),
      static_cast<utf8proc_option_t>((options & ~UTF8PROC_COMPOSE) | UTF8PROC_DECOMPOSE), &boundary);
  const auto first = count > 0 ? parts[0] : code;
  const auto* property = utf8proc_get_property(first);
  const bool jamo = first >= 0x1160 && first <= 0x11ff;
  return jamo || property->combining_class != 0 ||
         (property->comb_index != UINT16_MAX && property->comb_index >= 0x8000);
}

std::string in_form(std::string_view text, utf8proc_option_t options) {
  std::vector<utf8proc_int32_t> codes(text.size() * 4 + 32);
  auto count = utf8proc_decompose(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                  static_cast<utf8proc_ssize_t>(text.size()), codes.data(),
                                  static_cast<utf8proc_ssize_t>(codes.size()), options);
  if (count > static_cast<utf8proc_ssize_t>(codes.size())) {
    codes.resize(static_cast<std::size_t>(count));
    count = utf8proc_decompose(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                               static_cast<utf8proc_ssize_t>(text.size()), codes.data(),
                               static_cast<utf8proc_ssize_t>(codes.size()), options);
  }
  if (count >= 0) count = utf8proc_normalize_utf32(codes.data(), count, options);
  std::string result;
  for (utf8proc_ssize_t i = 0; i < count; ++i) append_utf8(result, codes[static_cast<std::size_t>(i)]);
  return result;
}

Piece in_form(const Piece& piece, Arena& arena, utf8proc_option_t options) {
  if (is_ascii(piece.text)) return piece;
  Rewriter out(piece, arena);
  std::size_t begin = 0;
  const auto flush = [&](std::size_t end) {
    const auto segment = piece.text.substr(begin, end - begin);
    if (segment.empty()) return;
    if (const auto changed = is_ascii(segment) ? std::string(segment) : in_form(segment, options); changed == segment)
      out.keep(begin, end);
    else
      out.append(changed, piece.source(begin, end));
    begin = end;
  };
  each_character(piece.text, [&](std::int32_t code, std::size_t first, std::size_t) {
    if (!may_join(code, options)) flush(first);
  });
  flush(piece.text.size());
  return out.finish();
}

void replace(Rewriter& out, const Piece& piece, std::size_t first, std::size_t last, std::string_view replacement) {
  out.append(replacement, piece.source(first, last));
}

// The lengths of the user-perceived characters of a text.
template <class Take>
void each_grapheme(std::string_view text, const Take& take) {
  std::size_t begin = 0;
  std::int32_t before = -1, state = 0;
  each_character(text, [&](std::int32_t code, std::size_t first, std::size_t) {
    if (before >= 0 && utf8proc_grapheme_break_stateful(before, code, &state)) {
      take(begin, first);
      begin = first;
    }
    before = code;
  });
  if (begin < text.size()) take(begin, text.size());
}

}  // namespace

Normalizer to_normal_form(NormalForm form) {
  const auto options = options_of(form);
  return [=](const Piece& piece, Arena& arena) { return in_form(piece, arena, options); };
}

Normalizer to_lower_case() {
  return [](const Piece& piece, Arena& arena) {
    return by_character(piece, arena, [&](Rewriter& out, std::int32_t code, std::size_t first, std::size_t last) {
      std::string lower;
      append_lower(lower, code);
      out.append(lower, piece.source(first, last));
    });
  };
}

Normalizer without_accents(bool all_marks) {
  return [=](const Piece& piece, Arena& arena) {
    return by_character(piece, arena, [&](Rewriter& out, std::int32_t code, std::size_t first, std::size_t last) {
      if (!(all_marks ? is_mark(code) : is_nonspacing_mark(code))) out.keep(first, last);
    });
  };
}

Normalizer stripped(bool left, bool right) {
  return [=](const Piece& piece, Arena&) {
    std::size_t begin = 0, end = piece.text.size();
    std::size_t first_kept = end, last_kept = 0;
    each_character(piece.text, [&](std::int32_t code, std::size_t first, std::size_t last) {
      if (is_white_space(code)) return;
      first_kept = std::min(first_kept, first);
      last_kept = last;
    });
    if (left) begin = first_kept;
    if (right) end = std::max(begin, last_kept);
    return piece.slice(begin, end);
  };
}

Normalizer prepended(const std::string& text) {
  return [=](const Piece& piece, Arena& arena) {
    if (piece.text.empty()) return piece;
    Rewriter out(piece, arena);
    out.append(text, piece.source(0, first_code_point(piece.text).bytes));
    out.keep(0, piece.text.size());
    return out.finish();
  };
}

Normalizer replaced(const Pattern& pattern, const std::string& content) {
  return [=](const Piece& piece, Arena& arena) {
    Rewriter out(piece, arena);
    for (const auto& part : pattern.parts(piece.text)) {
      if (part.match)
        replace(out, piece, part.begin, part.end, content);
      else
        out.keep(part.begin, part.end);
    }
    return out.finish();
  };
}

Normalizer nmt() {
  return [](const Piece& piece, Arena& arena) {
    return by_character(piece, arena, [&](Rewriter& out, std::int32_t code, std::size_t first, std::size_t last) {
      const bool removed = (code >= 0x1 && code <= 0x8) || code == 0xb || (code >= 0xe && code <= 0x1f) ||
                           code == 0x7f || code == 0x8f || code == 0x9f;
      const bool space = code == 0x9 || code == 0xa || code == 0xc || code == 0xd || code == 0x1680 ||
                         (code >= 0x200b && code <= 0x200f) || code == 0x2028 || code == 0x2029 || code == 0x2581 ||
                         code == 0xfeff || code == 0xfffd;
      if (removed) return;
      if (space)
        replace(out, piece, first, last, " ");
      else
        out.keep(first, last);
    });
  };
}

// tokenizers looks a whole grapheme of up to 5 bytes up and takes the shortest entry that begins it; characters of
// longer ones one by one. SentencePiece's own library does not: sentence_piece().
Normalizer precompiled(std::shared_ptr<const Charsmap> map) {
  return [=](const Piece& piece, Arena& arena) {
    Rewriter out(piece, arena);
    each_grapheme(piece.text, [&](std::size_t begin, std::size_t end) {
      const auto grapheme = piece.text.substr(begin, end - begin);
      if (grapheme.size() < 6)
        if (const auto found = map->shortest(grapheme); found.bytes > 0)
          return replace(out, piece, begin, end, found.replacement);
      each_character(grapheme, [&](std::int32_t, std::size_t first, std::size_t last) {
        const auto found = map->shortest(grapheme.substr(first, last - first));
        if (found.bytes > 0)
          replace(out, piece, begin + first, begin + last, found.replacement);
        else
          out.keep(begin + first, begin + last);
      });
    });
    return out.finish();
  };
}

Normalizer bert(const BertOptions& o) {
  return [=](const Piece& piece, Arena& arena) {
    auto cleaned =
        by_character(piece, arena, [&](Rewriter& out, std::int32_t code, std::size_t first, std::size_t last) {
          const bool line = code == '\t' || code == '\n' || code == '\r';
          if (o.clean_text && (code == 0 || code == 0xfffd || (!line && is_control(code)))) return;
          if (o.clean_text && is_white_space(code))
            replace(out, piece, first, last, " ");
          else if (o.chinese_characters && is_cjk(code))
            replace(out, piece, first, last, " " + std::string(piece.text.substr(first, last - first)) + " ");
          else
            out.keep(first, last);
        });
    if (o.strip_accents) cleaned = without_accents(false)(in_form(cleaned, arena, options_of(NormalForm::Nfd)), arena);
    return o.lower_case ? to_lower_case()(cleaned, arena) : cleaned;
  };
}

Normalizer sentence_piece(const SentencePieceOptions& o) {
  return [=](const Piece& piece, Arena& arena) {
    Rewriter out(piece, arena);
    const std::string space(o.escape_spaces ? kSpaceMark : " ");
    const auto prefix_at = [&](std::size_t at) {
      auto found = o.map ? o.map->longest(piece.text.substr(at)) : Charsmap::Found{};
      if (found.bytes > 0) return found;
      found.bytes = first_code_point(piece.text.substr(at, 4)).bytes;
      found.replacement = piece.text.substr(at, found.bytes);
      return found;
    };
    std::size_t at = 0;
    while (o.remove_extra_spaces && at < piece.text.size()) {
      const auto found = prefix_at(at);
      if (found.replacement != " ") break;
      at += found.bytes;
    }
    if (at == piece.text.size()) return out.finish();
    if (o.dummy_prefix && !o.space_is_suffix) out.append(space, piece.source(at, at + prefix_at(at).bytes));
    for (bool after_space = o.remove_extra_spaces; at < piece.text.size();) {
      const auto found = prefix_at(at);
      const auto from = piece.source(at, at + found.bytes);
      auto text = found.replacement;
      while (after_space && text.starts_with(' ')) text.remove_prefix(1);
      for (const char c : text) out.append(c == ' ' ? std::string_view(space) : std::string_view(&c, 1), from);
      if (!text.empty()) after_space = o.remove_extra_spaces && text.ends_with(' ');
      at += found.bytes;
    }
    while (o.remove_extra_spaces && out.text().ends_with(space)) out.remove_suffix(space.size());
    if (o.dummy_prefix && o.space_is_suffix) out.append(space, piece.source(piece.text.size() - 1, piece.text.size()));
    return out.finish();
  };
}

}  // namespace data
