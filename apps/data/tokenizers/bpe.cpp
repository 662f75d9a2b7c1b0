// Byte pair encoding. See model.h.
#include <algorithm>
#include <queue>
#include <stdexcept>

#include "apps/data/mix.h"
#include "apps/data/tokenizers/model.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

// Pairs of ids to the rank of their merge and its result: open addressing, as it is asked for every pair of a text.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = UINT32_MAX;
    std::int32_t id = -1;
  };

  explicit MergeTable(std::size_t count) {
    std::size_t size = 16;
    while (size < 2 * count + 1) size *= 2;
    slots_.resize(size);
  }
  // A later merge of the same pair replaces an earlier one.
  void set(std::int32_t left, std::int32_t right, Merge merge) {
    auto at = slot(key_of(left, right));
    slots_[at] = {key_of(left, right), merge};
  }
  Merge find(std::int32_t left, std::int32_t right) const { return slots_[slot(key_of(left, right))].merge; }

 private:
  struct Slot {
    std::uint64_t key = UINT64_MAX;
    Merge merge;
  };
  static std::uint64_t key_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
  }
  std::size_t slot(std::uint64_t key) const {
    std::size_t at = mix(key) & (slots_.size() - 1);
    while (slots_[at].key != key && slots_[at].key != UINT64_MAX) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  std::vector<Slot> slots_;
};

class Bpe : public Model {
 public:
  Bpe(Vocabulary vocabulary, const std::vector<std::pair<std::string, std::string>>& merges, BpeOptions options)
      : Model(std::move(vocabulary)), options_(std::move(options)), merges_(merges.size()) {
    const auto& all = this->vocabulary();
    if (options_.unknown) {
      unknown_ = all.id(*options_.unknown);
      if (!unknown_)
        throw std::invalid_argument("a BPE model without its unknown token \"" + options_.unknown->substr(0, 80) +
                                    "\"");
    }
    std::uint32_t rank = 0;
    for (const auto& [left, right] : merges) {
      const auto skip = right.starts_with(options_.continuing_prefix) ? options_.continuing_prefix.size() : 0;
      const auto a = all.id(left), b = all.id(right), joined = all.id(left + right.substr(skip));
      if (!a || !b || !joined)
        throw std::invalid_argument("the merge \"" + left.substr(0, 80) + " " + right.substr(0, 80) + "\", of which " +
                                    (!a   ? "the first part"
                                     : !b ? "the second part"
                                          : "the result") +
                                    " is no token");
      merges_.set(*a, *b, {options_.ranks.empty() ? rank : options_.ranks[rank], *joined});
      ++rank;
    }
    index();
  }

  std::unique_ptr<Scratch> scratch() const override { return std::make_unique<Kept>(); }
  std::optional<std::int32_t> unknown() const override { return unknown_; }

  void tokenize(std::string_view piece, Scratch& scratch, std::vector<ModelToken>& out) const override {
    auto& kept = static_cast<Kept&>(scratch);
    if (options_.ignore_merges) {
      if (const auto id = whole(piece)) {
        out.push_back({*id, 0, static_cast<std::uint32_t>(piece.size())});
        return;
      }
    }
    if (piece.size() > kKeptBytes) {
      begin_symbols(piece, kept);
      merge(kept);
      for (const auto& symbol : kept.symbols)
        if (symbol.bytes > 0) out.push_back({symbol.id, symbol.begin, symbol.begin + symbol.bytes});
      return;
    }
    auto& entry = kept.words[std::hash<std::string_view>{}(piece) & (kKeptWords - 1)];
    if (entry.text != piece) {
      begin_symbols(piece, kept);
      merge(kept);
      entry.text = piece;
      entry.tokens.clear();
      for (const auto& symbol : kept.symbols)
        if (symbol.bytes > 0) entry.tokens.push_back({symbol.id, symbol.begin, symbol.begin + symbol.bytes});
    }
    out.insert(out.end(), entry.tokens.begin(), entry.tokens.end());
  }

 private:
  static constexpr std::size_t kKeptBytes = 48, kKeptWords = 1 << 15;

  struct Symbol {
    std::int32_t id;
    std::uint32_t begin, bytes;  // 0: joined to the one before it
    std::int32_t before, after;
  };
  struct Candidate {
    std::uint32_t rank;
    std::int32_t at;
    std::int32_t id;  // of the result
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  struct Word {
    std::string text;
    std::vector<ModelToken> tokens;
  };
  struct Kept : Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> queue;
    std::vector<Word> words = std::vector<Word>(kKeptWords);
  };

  void index() {
    const auto& all = vocabulary();
    if (options_.bytes) {
      for (std::int32_t id = 0; id < all.size(); ++id)
        if (const auto bytes = bytes_of_characters(all.token(id)); bytes && !bytes->empty()) by_bytes_[*bytes] = id;
      for (std::size_t byte = 0; byte < 256; ++byte) {
        const auto found = by_bytes_.find(std::string(1, static_cast<char>(byte)));
        single_[byte] = found == by_bytes_.end() ? -1 : found->second;
      }
    }
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const auto id = all.id(byte_token(static_cast<unsigned char>(byte)));
      fallback_[byte] = id ? *id : -1;
    }
  }

  std::optional<std::int32_t> whole(std::string_view piece) const {
    if (!options_.bytes) return vocabulary().id(piece);
    const auto found = by_bytes_.find(std::string(piece));
    return found == by_bytes_.end() ? std::nullopt : std::optional(found->second);
  }

  void add(Kept& kept, std::int32_t id, std::size_t begin, std::size_t bytes) const {
    const auto at = static_cast<std::int32_t>(kept.symbols.size());
    kept.symbols.push_back({id, static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(bytes), at - 1, at + 1});
  }

  // One symbol for each character. A run of unknown ones waits until it is known how long it is.
  void begin_symbols(std::string_view piece, Kept& kept) const {
    kept.symbols.clear();
    std::size_t unknown_begin = 0, unknown_bytes = 0;
    const auto flush = [&] {
      if (unknown_bytes > 0) add(kept, *unknown_, unknown_begin, unknown_bytes);
      unknown_bytes = 0;
    };
    for (std::size_t at = 0; at < piece.size();) {
      const std::size_t bytes = options_.bytes ? 1 : first_code_point(piece.substr(at, 4)).bytes;
      const auto id = symbol_of(piece, at, bytes);
      if (id >= 0) {
        flush();
        add(kept, id, at, bytes);
      } else if (options_.byte_fallback && has_fallback(piece.substr(at, bytes))) {
        for (std::size_t i = at; i < at + bytes; ++i) add(kept, fallback_[static_cast<unsigned char>(piece[i])], i, 1);
      } else if (unknown_) {
        if (!options_.fuse_unknown) flush();
        if (unknown_bytes == 0) unknown_begin = at;
        unknown_bytes += bytes;
      }
      at += bytes;
    }
    flush();
    if (!kept.symbols.empty()) kept.symbols.back().after = -1;
  }
  std::int32_t symbol_of(std::string_view piece, std::size_t at, std::size_t bytes) const {
    if (options_.bytes) return single_[static_cast<unsigned char>(piece[at])];
    std::string spelled(piece.substr(at, bytes));
    if (at > 0) spelled.insert(0, options_.continuing_prefix);
    if (at + bytes == piece.size()) spelled += options_.end_suffix;
    return vocabulary().id(spelled).value_or(-1);
  }
  bool has_fallback(std::string_view bytes) const {
    return std::all_of(bytes.begin(), bytes.end(),
                       [&](char c) { return fallback_[static_cast<unsigned char>(c)] >= 0; });
  }

  void merge(Kept& kept) const {
    auto& symbols = kept.symbols;
    auto& queue = kept.queue;
    queue.clear();
    const auto offer = [&](std::int32_t at) {
      const auto& left = symbols[static_cast<std::size_t>(at)];
      if (left.after < 0) return;
      const auto found = merges_.find(left.id, symbols[static_cast<std::size_t>(left.after)].id);
      if (found.id < 0) return;
      queue.push_back({found.rank, at, found.id});
      std::push_heap(queue.begin(), queue.end());
    };
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) offer(static_cast<std::int32_t>(i));
    while (!queue.empty()) {
      std::pop_heap(queue.begin(), queue.end());
      const auto best = queue.back();
      queue.pop_back();
      auto& left = symbols[static_cast<std::size_t>(best.at)];
      if (left.bytes == 0 || left.after < 0) continue;
      auto& right = symbols[static_cast<std::size_t>(left.after)];
      // The pair may have changed since it was offered.
      if (const auto now = merges_.find(left.id, right.id); now.id != best.id || now.id < 0) continue;
      left.id = best.id;
      left.bytes += right.bytes;
      left.after = right.after;
      right.bytes = 0;
      if (left.after >= 0) symbols[static_cast<std::size_t>(left.after)].before = best.at;
      if (left.before >= 0) offer(left.before);
      offer(best.at);
    }
  }

  BpeOptions options_;
  std::optional<std::int32_t> unknown_;
  MergeTable merges_;
  std::unordered_map<std::string, std::int32_t> by_bytes_;
  std::array<std::int32_t, 256> single_{}, fallback_{};
};

}  // namespace

std::unique_ptr<Model> bpe_model(Vocabulary vocabulary, const std::vector<std::pair<std::string, std::string>>& merges,
                                 const BpeOptions& options) {
  return std::make_unique<Bpe>(std::move(vocabulary), merges, options);
}

}  // namespace data
