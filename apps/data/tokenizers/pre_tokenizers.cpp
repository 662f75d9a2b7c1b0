// See pre_tokenizers.h.
#include "apps/data/tokenizers/pre_tokenizers.h"

namespace data {
namespace {

// Calls take(piece, out) for every piece that is no added token.
template <class Take>
void each_piece(std::vector<Piece>& pieces, const Take& take) {
  std::vector<Piece> out;
  out.reserve(pieces.size());
  for (const auto& piece : pieces) {
    if (piece.token >= 0)
      out.push_back(piece);
    else
      take(piece, out);
  }
  pieces = std::move(out);
}

Piece with_prefix(const Piece& piece, const std::string& prefix, Arena& arena) {
  if (piece.text.empty() || piece.text.starts_with(prefix)) return piece;
  Rewriter rewriter(piece, arena);
  rewriter.append(prefix, piece.source(0, first_code_point(piece.text.substr(0, 4)).bytes));
  rewriter.keep(0, piece.text.size());
  return rewriter.finish();
}

// White space, words and other runs: characters of one kind follow each other.
TextParts word_parts(std::string_view text) {
  TextParts parts;
  int before = -1;
  each_character(text, [&](std::int32_t code, std::size_t first, std::size_t last) {
    const int kind = is_word(code) ? 1 : is_white_space(code) ? 0 : 2;
    if (kind == before)
      parts.back().end = last;
    else
      parts.push_back({first, last, kind == 0});
    before = kind;
  });
  return parts;
}

}  // namespace

PreTokenizer split_by(const Pattern& pattern, SplitBehavior behavior, bool invert) {
  return [=](std::vector<Piece>& pieces, Arena&) {
    each_piece(pieces, [&](const Piece& piece, std::vector<Piece>& out) {
      auto parts = pattern.parts(piece.text);
      if (invert)
        for (auto& part : parts) part.match = !part.match;
      split(piece, std::move(parts), behavior, out);
    });
  };
}

PreTokenizer split_characters(std::function<bool(std::int32_t)> is, SplitBehavior behavior) {
  return [=](std::vector<Piece>& pieces, Arena&) {
    each_piece(pieces, [&](const Piece& piece, std::vector<Piece>& out) {
      split(piece, parts_by_character(piece.text, is), behavior, out);
    });
  };
}

PreTokenizer split_words() {
  return [](std::vector<Piece>& pieces, Arena&) {
    each_piece(pieces, [&](const Piece& piece, std::vector<Piece>& out) {
      split(piece, word_parts(piece.text), SplitBehavior::Removed, out);
    });
  };
}

PreTokenizer split_bert() {
  return [spaces = split_characters(is_white_space, SplitBehavior::Removed),
          marks = split_characters(is_punctuation, SplitBehavior::Isolated)](std::vector<Piece>& pieces, Arena& arena) {
    spaces(pieces, arena);
    marks(pieces, arena);
  };
}

PreTokenizer split_byte_level(bool add_prefix_space, bool use_pattern) {
  return [=](std::vector<Piece>& pieces, Arena& arena) {
    each_piece(pieces, [&](const Piece& piece, std::vector<Piece>& out) {
      const auto whole = add_prefix_space ? with_prefix(piece, " ", arena) : piece;
      if (use_pattern)
        split(whole, gpt2_pattern().parts(whole.text), SplitBehavior::Isolated, out);
      else
        out.push_back(whole);
    });
  };
}

PreTokenizer split_metaspace(const std::string& replacement, PrependScheme scheme, bool split_text) {
  return [=, mark = Pattern::literal(replacement)](std::vector<Piece>& pieces, Arena& arena) {
    each_piece(pieces, [&](const Piece& piece, std::vector<Piece>& out) {
      Rewriter rewriter(piece, arena);
      std::size_t kept = 0;
      for (std::size_t at = piece.text.find(' '); at != std::string_view::npos; at = piece.text.find(' ', at + 1)) {
        rewriter.keep(kept, at);
        rewriter.append(replacement, piece.source(at, at + 1));
        kept = at + 1;
      }
      rewriter.keep(kept, piece.text.size());
      auto whole = rewriter.finish();
      const bool first = !whole.text.empty() && whole.source(0, 1).begin == 0;
      if (scheme == PrependScheme::Always || (scheme == PrependScheme::First && first))
        whole = with_prefix(whole, replacement, arena);
      if (split_text)
        split(whole, mark.parts(whole.text), SplitBehavior::MergedWithNext, out);
      else
        out.push_back(whole);
    });
  };
}

}  // namespace data
