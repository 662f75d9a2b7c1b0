// See added_tokens.h.
#include "apps/data/tokenizers/added_tokens.h"

#include <algorithm>

namespace data {
namespace {

Piece normalized(Piece piece, const std::vector<Normalizer>& normalizers, Arena& arena) {
  for (const auto& normalizer : normalizers) piece = normalizer(piece, arena);
  return piece;
}

// The beginning of the character before byte `at`.
std::size_t character_before(std::string_view text, std::size_t at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool word_ends(std::string_view text, std::size_t at) {
  return at > 0 && is_word(first_code_point(text.substr(character_before(text, at))).code);
}

bool word_begins(std::string_view text, std::size_t at) {
  return at < text.size() && is_word(first_code_point(text.substr(at)).code);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const std::vector<Normalizer>& normalizers)
    : tokens_(std::move(tokens)) {
  std::vector<std::pair<std::string, std::int32_t>> plain, changed;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const auto& token = tokens_[i];
    Arena arena;
    if (token.normalized)
      changed.emplace_back(normalized({token.content}, normalizers, arena).text, static_cast<std::int32_t>(i));
    else
      plain.emplace_back(token.content, static_cast<std::int32_t>(i));
  }
  any_plain_ = !plain.empty();
  any_normalized_ = !changed.empty();
  plain_ = Trie(std::move(plain));
  normalized_ = Trie(std::move(changed));
}

std::vector<Piece> AddedTokens::split(const Piece& text, const std::vector<Normalizer>& normalizers,
                                      Arena& arena) const {
  std::vector<Piece> first, all;
  if (any_plain_)
    find(text, plain_, first);
  else
    first.push_back(text);
  for (const auto& piece : first) {
    if (piece.token >= 0) {
      all.push_back(piece);
      continue;
    }
    const auto changed = normalized(piece, normalizers, arena);
    if (any_normalized_)
      find(changed, normalized_, all);
    else
      all.push_back(changed);
  }
  return all;
}

// From left to right, of several tokens that begin at a place the longest.
void AddedTokens::find(const Piece& piece, const Trie& trie, std::vector<Piece>& out) const {
  const auto text = piece.text;
  std::size_t done = 0, at = 0;
  while (at < text.size()) {
    const auto found = trie.longest(text.substr(at));
    if (found.bytes == 0) {
      ++at;
      continue;
    }
    const auto& token = tokens_[static_cast<std::size_t>(found.value)];
    std::size_t begin = at, end = at + found.bytes;
    at = end;
    if (token.single_word && (word_ends(text, begin) || word_begins(text, end))) continue;
    if (token.left_strip)
      while (begin > done) {
        const auto before = character_before(text, begin);
        if (!is_white_space(first_code_point(text.substr(before)).code)) break;
        begin = std::max(before, done);
      }
    if (token.right_strip)
      while (end < text.size()) {
        const auto [code, bytes] = first_code_point(text.substr(end));
        if (!is_white_space(code)) break;
        end += bytes;
      }
    begin = std::max(begin, done);  // the token before may have taken white space that this one begins with
    if (begin > done) out.push_back(piece.slice(done, begin));
    if (end > begin) {
      out.push_back(piece.slice(begin, end));
      out.back().token = token.id;
    }
    done = end;
    at = std::max(at, done);
  }
  if (done < text.size()) out.push_back(piece.slice(done, text.size()));
}

}  // namespace data
