// Pieces of a text on their way through a tokenizer, with the bytes of the original text that they come from.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/tokenizers/tokenizer.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {

struct Piece {
  std::string_view text;            // in the original text, or in an Arena
  const ByteRange* from = nullptr;  // of each byte of `text`; null: `text` is the original from byte `begin` on
  std::uint32_t begin = 0;
  std::int32_t token = -1;  // of an added token; the other pieces go to the model

  // The original bytes of [first, last) of `text`, widened to whole characters. An empty range has an empty source.
  ByteRange source(std::size_t first, std::size_t last) const;
  Piece slice(std::size_t first, std::size_t last) const;
};

// Owns rewritten texts for as long as one call to encode.
class Arena {
 public:
  struct Text {
    std::string text;
    std::vector<ByteRange> from;
  };
  Text& add() { return texts_.emplace_back(); }

 private:
  std::deque<Text> texts_;
};

// A new text for a piece, character by character.
class Rewriter {
 public:
  Rewriter(const Piece& piece, Arena& arena) : piece_(piece), text_(arena.add()) {}
  void append(std::string_view characters, ByteRange from) {
    text_.text += characters;
    text_.from.resize(text_.text.size(), from);
  }
  void append_code(std::int32_t code, ByteRange from);
  // Bytes [first, last) of the piece as they are.
  void keep(std::size_t first, std::size_t last);
  std::string_view text() const { return text_.text; }
  void remove_suffix(std::size_t bytes) {
    text_.text.resize(text_.text.size() - bytes);
    text_.from.resize(text_.text.size());
  }
  Piece finish() const { return {text_.text, text_.from.data(), piece_.begin, piece_.token}; }

 private:
  const Piece& piece_;
  Arena::Text& text_;
};

// Calls take(code, first, last) for every character and its bytes.
template <class Take>
void each_character(std::string_view text, const Take& take) {
  for (std::size_t at = 0; at < text.size();) {
    const auto [code, bytes] = first_code_point(text.substr(at, 4));
    take(code, at, at + bytes);
    at += bytes;
  }
}

// What becomes of the matches of a pattern, which lie between other parts of the text.
enum class SplitBehavior { Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous };

// Parts of a text: [begin, end) and whether it is a match. They cover the text, in order.
struct TextPart {
  std::size_t begin, end;
  bool match;
};
using TextParts = std::vector<TextPart>;

// Appends what `behavior` makes of `parts` of a piece; empty pieces are left out.
void split(const Piece& piece, TextParts parts, SplitBehavior behavior, std::vector<Piece>& out);
// Parts whose characters `is` holds for are matches: one for each character.
TextParts parts_by_character(std::string_view text, const std::function<bool(std::int32_t)>& is);

using Normalizer = std::function<Piece(const Piece&, Arena&)>;
// Replaces the pieces by parts of them. Added tokens are left alone.
using PreTokenizer = std::function<void(std::vector<Piece>&, Arena&)>;
// A step from the spelled tokens to text.
using Decoder = std::function<void(std::vector<std::string>&)>;

}  // namespace data
