// The tokens with the largest sum of scores. See model.h.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "apps/data/tokenizers/model.h"
#include "apps/data/tokenizers/trie.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

constexpr double kUnknownPenalty = 10;

// Number: of the sums. SentencePiece's library has float, tokenizers double.
template <class Number>
class Unigram : public Model {
 public:
  Unigram(Vocabulary vocabulary, std::vector<double> scores, UnigramOptions options)
      : Model(std::move(vocabulary)), scores_(std::move(scores)), options_(std::move(options)) {
    const auto& all = this->vocabulary();
    if (scores_.size() != static_cast<std::size_t>(all.size()))
      throw std::invalid_argument(std::to_string(scores_.size()) + " scores for " + std::to_string(all.size()) +
                                  " tokens");
    if (options_.unknown && (*options_.unknown < 0 || *options_.unknown >= all.size()))
      throw std::invalid_argument("the unknown token " + std::to_string(*options_.unknown));
    std::vector<std::pair<std::string, std::int32_t>> tokens;
    // SentencePiece's library begins the search for the largest score here.
    double least = std::numeric_limits<double>::infinity(), most = std::numeric_limits<float>::min();
    for (std::int32_t id = 0; id < all.size(); ++id) {
      const auto at = static_cast<std::size_t>(id);
      const bool matched = options_.matched.empty() || options_.matched[at];
      if (matched) tokens.emplace_back(all.token(id), id);
      if (!matched || user_defined(id)) continue;
      least = std::min(least, scores_[at]);
      most = std::max(most, scores_[at]);
    }
    if (tokens.empty()) throw std::invalid_argument("a Unigram model without tokens");
    unknown_score_ = static_cast<Number>(least) - static_cast<Number>(kUnknownPenalty);
    most_score_ = static_cast<float>(most);
    trie_ = Trie(std::move(tokens));
    for (std::size_t byte = 0; byte < 256; ++byte)
      bytes_[byte] = all.id(byte_token(static_cast<unsigned char>(byte))).value_or(-1);
  }

  std::unique_ptr<Scratch> scratch() const override { return std::make_unique<Kept>(); }
  std::optional<std::int32_t> unknown() const override { return options_.unknown; }

  void tokenize(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const override {
    auto& ends = static_cast<Kept&>(scratch).ends;
    ends.assign(piece.size() + 1, {});
    for (std::size_t at = 0; at < piece.size();) {
      const std::size_t character = first_code_point(piece.substr(at, 4)).bytes;
      const Number so_far = ends[at].score;
      bool single = false;
      auto node = Trie::kRoot;
      for (std::size_t end = at; end < piece.size();) {
        node = trie_.child(node, static_cast<unsigned char>(piece[end++]));
        if (node == Trie::kNone) break;
        const auto id = trie_.value(node);
        if (id < 0) continue;
        offer(ends[end], at, id, score_of(id, end - at) + static_cast<double>(so_far));
        single |= end - at == character;
      }
      if (!single) offer(ends[at + character], at, kUnknown, static_cast<double>(unknown_score_ + so_far));
      at += character;
    }
    const auto before = out.size();
    for (auto end = piece.size(); end > 0; end = ends[end].begin)
      out.push_back({ends[end].id, static_cast<std::uint32_t>(ends[end].begin), static_cast<std::uint32_t>(end)});
    std::reverse(out.begin() + static_cast<std::ptrdiff_t>(before), out.end());
    settle_unknown(piece, before, out);
  }

 private:
  static constexpr std::int32_t kUnknown = -2;
  struct End {
    Number score = 0;
    std::int32_t id = -1;
    std::size_t begin = SIZE_MAX;
  };
  struct Kept : Scratch {
    std::vector<End> ends;
  };

  bool user_defined(std::int32_t id) const {
    return !options_.user_defined.empty() && options_.user_defined[static_cast<std::size_t>(id)];
  }
  double score_of(std::int32_t id, std::size_t bytes) const {
    if (user_defined(id)) return static_cast<double>(static_cast<float>(bytes) * most_score_) - 0.1;
    return static_cast<double>(static_cast<Number>(scores_[static_cast<std::size_t>(id)]));
  }
  static void offer(End& end, std::size_t begin, std::int32_t id, double score) {
    score = static_cast<double>(static_cast<Number>(score));  // compared as it is kept
    if (end.begin != SIZE_MAX && score <= static_cast<double>(end.score)) return;
    end = {static_cast<Number>(score), id, begin};
  }

  // Unknown neighbours are one token, or their bytes are tokens.
  void settle_unknown(std::string_view piece, std::size_t from, std::vector<ModelToken>& out) const {
    const auto unknown = [&](const ModelToken& token) {
      return token.id == kUnknown || (options_.unknown && token.id == *options_.unknown);
    };
    const auto first = std::find_if(out.begin() + static_cast<std::ptrdiff_t>(from), out.end(), unknown);
    if (first == out.end()) return;
    std::vector<ModelToken> tail(first, out.end());
    out.erase(first, out.end());
    for (std::size_t i = 0; i < tail.size(); ++i) {
      auto token = tail[i];
      if (!unknown(token)) {
        out.push_back(token);
        continue;
      }
      const auto bytes = [&] { return piece.substr(token.begin, token.end - token.begin); };
      while (options_.fuse_unknown && i + 1 < tail.size() && unknown(tail[i + 1])) token.end = tail[++i].end;
      const auto spelled = options_.single_precision ? std::nullopt : vocabulary().id(bytes());
      if (spelled) {
        out.push_back({*spelled, token.begin, token.end});
      } else if (options_.byte_fallback && has_bytes(bytes())) {
        for (std::uint32_t at = token.begin; at < token.end; ++at)
          out.push_back({bytes_[static_cast<unsigned char>(piece[at])], at, at + 1});
      } else if (options_.unknown) {
        out.push_back({*options_.unknown, token.begin, token.end});
      } else {
        throw std::runtime_error("[tokenizer] got \"" + std::string(bytes().substr(0, 40)) +
                                 "\", which the vocabulary cannot spell, expected a tokenizer with an unknown token");
      }
    }
  }
  bool has_bytes(std::string_view text) const {
    return std::all_of(text.begin(), text.end(), [&](char c) { return bytes_[static_cast<unsigned char>(c)] >= 0; });
  }

  std::vector<double> scores_;
  UnigramOptions options_;
  Trie trie_;
  Number unknown_score_ = 0;
  float most_score_ = 0;
  std::array<std::int32_t, 256> bytes_{};
};

}  // namespace

std::unique_ptr<Model> unigram_model(Vocabulary vocabulary, std::vector<double> scores, const UnigramOptions& options) {
  if (options.single_precision)
    return std::make_unique<Unigram<float>>(std::move(vocabulary), std::move(scores), options);
  return std::make_unique<Unigram<double>>(std::move(vocabulary), std::move(scores), options);
}

}  // namespace data
