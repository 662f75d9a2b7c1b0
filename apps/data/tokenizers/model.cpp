// See model.h: the vocabulary, characters for bytes, WordPiece.
#include "apps/data/tokenizers/model.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "apps/data/tokenizers/trie.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

constexpr std::int64_t kMostTokens = 1 << 24;

class WordPiece : public Model {
 public:
  WordPiece(Vocabulary vocabulary, const std::string& unknown, const std::string& prefix, std::int64_t most)
      : Model(std::move(vocabulary)), most_(static_cast<std::size_t>(most)) {
    const auto id = this->vocabulary().id(unknown);
    if (!id)
      throw std::invalid_argument("a WordPiece model without its unknown token \"" + unknown.substr(0, 80) + "\"");
    unknown_ = *id;
    std::vector<std::pair<std::string, std::int32_t>> first, later;
    for (std::int32_t i = 0; i < this->vocabulary().size(); ++i) {
      const auto& token = this->vocabulary().token(i);
      first.emplace_back(token, i);
      if (token.starts_with(prefix)) later.emplace_back(token.substr(prefix.size()), i);
    }
    first_ = Trie(std::move(first));
    later_ = Trie(std::move(later));
  }

  std::unique_ptr<Scratch> scratch() const override { return std::make_unique<Scratch>(); }
  std::optional<std::int32_t> unknown() const override { return unknown_; }

  void tokenize(std::string_view piece, Scratch&, std::vector<ModelToken>& out) const override {
    const auto size = static_cast<std::uint32_t>(piece.size()), before = static_cast<std::uint32_t>(out.size());
    std::size_t characters = piece.size();
    if (characters > most_)
      characters = static_cast<std::size_t>(std::count_if(
          piece.begin(), piece.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
    bool known = characters <= most_;
    for (std::uint32_t at = 0; known && at < size;) {
      const auto found = (at == 0 ? first_ : later_).longest(piece.substr(at));
      known = found.bytes > 0;
      out.push_back({found.value, at, at + static_cast<std::uint32_t>(found.bytes)});
      at += static_cast<std::uint32_t>(found.bytes);
    }
    if (known) return;
    out.resize(before);
    out.push_back({unknown_, 0, size});
  }

 private:
  Trie first_, later_;
  std::int32_t unknown_ = 0;
  std::size_t most_;
};

}  // namespace

Vocabulary::Vocabulary(std::vector<std::pair<std::string, std::int64_t>> tokens) {
  std::int64_t largest = -1;
  for (const auto& [token, id] : tokens) {
    if (id < 0 || id >= kMostTokens)
      throw std::invalid_argument("the id " + std::to_string(id) + " for \"" + token.substr(0, 80) + "\"");
    largest = std::max(largest, id);
  }
  if (largest >= 2 * static_cast<std::int64_t>(tokens.size()) + 1000)
    throw std::invalid_argument("ids up to " + std::to_string(largest) + " for " + std::to_string(tokens.size()) +
                                " tokens");
  tokens_.resize(static_cast<std::size_t>(largest + 1));
  ids_.reserve(tokens.size());
  std::vector<bool> taken(tokens_.size());
  for (auto& [token, id] : tokens) {
    const auto at = static_cast<std::size_t>(id);
    if (taken[at]) throw std::invalid_argument("the id " + std::to_string(id) + " twice");
    taken[at] = true;
    tokens_[at] = std::move(token);
    if (!ids_.emplace(tokens_[at], static_cast<std::int32_t>(id)).second)
      throw std::invalid_argument("the token \"" + tokens_[at].substr(0, 80) + "\" twice");
  }
}

std::optional<std::int32_t> Vocabulary::id(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::unique_ptr<Model> wordpiece_model(Vocabulary vocabulary, const std::string& unknown, const std::string& prefix,
                                       std::int64_t most_characters) {
  return std::make_unique<WordPiece>(std::move(vocabulary), unknown, prefix, most_characters);
}

const std::array<std::string, 256>& byte_characters() {
  static const auto table = [] {
    std::array<std::string, 256> characters;
    std::int32_t next = 256;
    for (std::int32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      append_utf8(characters[static_cast<std::size_t>(byte)], printable ? byte : next++);
    }
    return characters;
  }();
  return table;
}

std::optional<std::string> bytes_of_characters(std::string_view token) {
  static const auto bytes = [] {
    std::array<std::int16_t, 512> table{};
    table.fill(-1);
    for (std::size_t byte = 0; byte < 256; ++byte)
      table[static_cast<std::size_t>(first_code_point(byte_characters()[byte]).code)] = static_cast<std::int16_t>(byte);
    return table;
  }();
  std::string result;
  for (std::size_t at = 0; at < token.size();) {
    const auto [code, length] = first_code_point(token.substr(at, 4));
    at += length;
    if (code >= 512 || bytes[static_cast<std::size_t>(code)] < 0) return std::nullopt;
    result.push_back(static_cast<char>(bytes[static_cast<std::size_t>(code)]));
  }
  return result;
}

std::string byte_token(unsigned char byte) {
  char text[8];
  std::snprintf(text, sizeof text, "<0x%02X>", byte);
  return text;
}

}  // namespace data
