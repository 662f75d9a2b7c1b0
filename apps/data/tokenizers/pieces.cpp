// See pieces.h.
#include "apps/data/tokenizers/pieces.h"

#include <algorithm>

namespace data {
namespace {

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

}  // namespace

ByteRange Piece::source(std::size_t first, std::size_t last) const {
  if (from != nullptr) {
    if (first == last) return {};
    return {from[first].begin, from[last - 1].end};
  }
  while (first > 0 && first < last && continues(text[first])) --first;
  while (last < text.size() && last > first && continues(text[last])) ++last;
  return {begin + static_cast<std::uint32_t>(first), begin + static_cast<std::uint32_t>(last)};
}

Piece Piece::slice(std::size_t first, std::size_t last) const {
  return {text.substr(first, last - first), from == nullptr ? nullptr : from + first,
          from == nullptr ? begin + static_cast<std::uint32_t>(first) : begin, token};
}

void Rewriter::append_code(std::int32_t code, ByteRange from) {
  append_utf8(text_.text, code);
  text_.from.resize(text_.text.size(), from);
}

void Rewriter::keep(std::size_t first, std::size_t last) {
  if (piece_.from != nullptr) {
    text_.text += piece_.text.substr(first, last - first);
    text_.from.insert(text_.from.end(), piece_.from + first, piece_.from + last);
    return;
  }
  while (first < last) {
    const auto bytes = first_code_point(piece_.text.substr(first, 4)).bytes;
    append(piece_.text.substr(first, bytes), piece_.source(first, first + bytes));
    first += bytes;
  }
}

void split(const Piece& piece, TextParts parts, SplitBehavior behavior, std::vector<Piece>& out) {
  TextParts joined;
  bool previous = false;
  if (behavior == SplitBehavior::MergedWithNext) std::reverse(parts.begin(), parts.end());
  for (const auto& part : parts) {
    const bool join =
        !joined.empty() && (behavior == SplitBehavior::Contiguous ? part.match == previous
                            : behavior == SplitBehavior::MergedWithPrevious || behavior == SplitBehavior::MergedWithNext
                                ? part.match && !previous
                                : false);
    previous = part.match;
    if (join && behavior == SplitBehavior::MergedWithNext)
      joined.back().begin = part.begin;
    else if (join)
      joined.back().end = part.end;
    else if (behavior != SplitBehavior::Removed || !part.match)
      joined.push_back(part);
  }
  if (behavior == SplitBehavior::MergedWithNext) std::reverse(joined.begin(), joined.end());
  for (const auto& part : joined)
    if (part.end > part.begin) out.push_back(piece.slice(part.begin, part.end));
}

TextParts parts_by_character(std::string_view text, const std::function<bool(std::int32_t)>& is) {
  TextParts parts;
  each_character(text, [&](std::int32_t code, std::size_t first, std::size_t last) {
    const bool match = is(code);
    if (!match && !parts.empty() && !parts.back().match)
      parts.back().end = last;
    else
      parts.push_back({first, last, match});
  });
  return parts;
}

}  // namespace data
