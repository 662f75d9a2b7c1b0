// The vocabulary of a tokenizer, and how a piece of text becomes tokens of it.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace data {

// Tokens by id, each spelled as the files spell it. An id without a token has an empty text.
class Vocabulary {
 public:
  Vocabulary() = default;
  // Throws std::invalid_argument for an id that is negative or twice there, a token that is twice there, or ids that
  // leave out more than half of the numbers below the largest.
  explicit Vocabulary(std::vector<std::pair<std::string, std::int64_t>> tokens);
  Vocabulary(Vocabulary&&) = default;  // a copy's ids_ would look into the original
  Vocabulary& operator=(Vocabulary&&) = default;

  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }  // one more than the largest id
  std::int64_t count() const { return static_cast<std::int64_t>(ids_.size()); }
  const std::string& token(std::int32_t id) const { return tokens_[static_cast<std::size_t>(id)]; }
  std::optional<std::int32_t> id(std::string_view token) const;

 private:
  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, std::int32_t> ids_;
};

// A token of bytes [begin, end) of a piece.
struct ModelToken {
  std::int32_t id;
  std::uint32_t begin, end;
};

class Model {
 public:
  // What a thread needs while it tokenises; kept from one call to the next.
  struct Scratch {
    virtual ~Scratch() = default;
  };

  explicit Model(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const Vocabulary& vocabulary() const { return vocabulary_; }
  virtual std::unique_ptr<Scratch> scratch() const = 0;
  // Appends to `out`. The piece is valid UTF-8 and not empty.
  virtual void tokenize(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const = 0;
  virtual std::optional<std::int32_t> unknown() const = 0;

 private:
  Vocabulary vocabulary_;
};

struct BpeOptions {
  std::optional<std::string> unknown;
  std::string continuing_prefix, end_suffix;
  bool fuse_unknown = false, byte_fallback = false;
  bool ignore_merges = false;             // a piece that is a token is that token
  bool bytes = false;                     // the vocabulary spells bytes as byte_characters() does, and pieces are bytes
  std::vector<std::uint32_t> ranks = {};  // of the merges, from the first to be made on; empty: their places
};
// Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016: of all neighbours the pair that
// comes first in `merges` is joined, until none is left. Throws std::invalid_argument for merges of what are no tokens.
std::unique_ptr<Model> bpe_model(Vocabulary vocabulary, const std::vector<std::pair<std::string, std::string>>& merges,
                                 const BpeOptions& options);

// Wu et al., "Google's Neural Machine Translation System", 2016: the longest token first; a word with a part that is no
// token, or of too many characters, is unknown.
std::unique_ptr<Model> wordpiece_model(Vocabulary vocabulary, const std::string& unknown, const std::string& prefix,
                                       std::int64_t most_characters);

struct UnigramOptions {
  std::optional<std::int32_t> unknown;
  bool byte_fallback = false;
  bool fuse_unknown = true;        // neighbours that are unknown are one token
  bool single_precision = false;   // sums as SentencePiece's library has them; else double, as tokenizers
  std::vector<bool> matched;       // by id: in single precision, tokens that text can be; empty: all
  std::vector<bool> user_defined;  // by id: tokens that are chosen whatever they cost; empty: none
};
// Kudo, "Subword Regularization", 2018: the tokens with the largest sum of scores (Viterbi's algorithm).
std::unique_ptr<Model> unigram_model(Vocabulary vocabulary, std::vector<double> scores, const UnigramOptions& options);

// GPT-2's characters for bytes: printable ones stand for themselves, the others for U+0100 and what follows.
const std::array<std::string, 256>& byte_characters();
// The bytes that a token spells; no value if one of its characters stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view token);
// "<0x0A>"
std::string byte_token(unsigned char byte);

}  // namespace data
