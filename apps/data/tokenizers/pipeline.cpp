// See pipeline.h.
#include "apps/data/tokenizers/pipeline.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

class Pipeline : public Tokenizer {
 public:
  explicit Pipeline(PipelineParts parts) : parts_(std::move(parts)) {
    const auto& vocabulary = parts_.model->vocabulary();
    std::int64_t size = vocabulary.size();
    for (const auto& token : parts_.added) {
      const auto own = vocabulary.id(token.content);
      if (own ? *own != token.id : token.id < vocabulary.size() && !vocabulary.token(token.id).empty())
        throw std::invalid_argument("the added token \"" + token.content.substr(0, 80) + "\" with id " +
                                    std::to_string(token.id) + ", which is not its own in the vocabulary");
      if (!added_ids_.emplace(token.content, token.id).second || !added_.emplace(token.id, token).second)
        throw std::invalid_argument("the added token \"" + token.content.substr(0, 80) + "\" twice");
      size = std::max<std::int64_t>(size, token.id + 1);
    }
    if (size > 2 * (vocabulary.size() + static_cast<std::int64_t>(parts_.added.size())) + 1000)
      throw std::invalid_argument("an added token with id " + std::to_string(size - 1));
    for (const auto* items : {&parts_.single, &parts_.pair})
      for (const auto& item : *items)
        for (const auto id : item.ids)
          if (id < 0 || id >= size)
            throw std::invalid_argument("a template with id " + std::to_string(id) + " of " + std::to_string(size) +
                                        " tokens");
    size_ = size;
    tokens_ = AddedTokens(parts_.added, parts_.normalizers);
    special_ = parts_.special;
    if (!special_.unknown) special_.unknown = parts_.model->unknown();
    digest_ = parts_.digest;
  }

  Encoding encode_with_offsets(std::string_view text, bool add_special) const override {
    const auto one = encode_text(text, 0);
    return add_special ? with_special(one, nullptr) : joined({&one}, nullptr);
  }
  Encoding encode_pair(std::string_view first, std::string_view second, bool add_special) const override {
    const auto one = encode_text(first, 0), two = encode_text(second, 1);
    return add_special ? with_special(one, &two) : joined({&one, &two}, &parts_.pair);
  }
  Encoding with_special(const Encoding& first, const Encoding* second) const override {
    const auto& items = second == nullptr ? parts_.single : parts_.pair;
    Encoding result;
    for (const auto& item : items) {
      if (item.text >= 0) {
        append(item.text == 0 || second == nullptr ? first : *second, item.text, item.type, result);
      } else {
        for (const auto id : item.ids) {
          result.ids.push_back(id);
          result.offsets.push_back({});
          result.types.push_back(item.type);
          result.texts.push_back(Encoding::kAdded);
        }
      }
    }
    return result;
  }

  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::vector<std::string> tokens;
    tokens.reserve(ids.size());
    for (const auto id : ids)
      if (auto token = token_of(id); !token.empty() && !(skip_special && is_special(id)))
        tokens.push_back(std::move(token));
    for (const auto& decoder : parts_.decoders) decoder(tokens);
    std::string text;
    for (std::size_t i = 0; i < tokens.size(); ++i) text += (i > 0 && !parts_.decodes ? " " : "") + tokens[i];
    return text;
  }

  std::int64_t vocabulary() const override { return size_; }
  std::optional<std::int32_t> id_of(std::string_view token) const override {
    if (const auto found = added_ids_.find(std::string(token)); found != added_ids_.end()) return found->second;
    return parts_.model->vocabulary().id(token);
  }
  std::string token_of(std::int32_t id) const override {
    if (id < 0 || id >= size_)
      throw std::out_of_range("[Tokenizer] got id " + std::to_string(id) + ", expected 0 to " +
                              std::to_string(size_ - 1));
    if (const auto found = added_.find(id); found != added_.end()) return found->second.content;
    const auto& all = parts_.model->vocabulary();
    return id < all.size() ? all.token(id) : "";
  }
  bool is_special(std::int32_t id) const override {
    const auto found = added_.find(id);
    return found != added_.end() && found->second.special;
  }
  std::string description() const override { return parts_.kind + ", " + std::to_string(size_) + " tokens"; }

 private:
  // Calls take(id, piece, first, last) for every token.
  template <class Take>
  void each_token(std::string_view text, const Take& take) const {
    if (text.size() >= INT32_MAX)
      throw std::invalid_argument("[Tokenizer::encode] got a text of " + std::to_string(text.size()) +
                                  " bytes, expected less than 2 GiB");
    if (const auto at = invalid_utf8(text); at < text.size())
      throw std::invalid_argument("[Tokenizer::encode] got bytes that are not UTF-8 at offset " + std::to_string(at) +
                                  ", expected UTF-8");
    Arena arena;
    auto pieces = tokens_.split({text}, parts_.normalizers, arena);
    for (const auto& pre_tokenizer : parts_.pre_tokenizers) pre_tokenizer(pieces, arena);
    auto scratch = borrow();
    std::vector<ModelToken> tokens;
    for (const auto& piece : pieces) {
      if (piece.token >= 0) {
        take(piece.token, piece, 0, piece.text.size());
        continue;
      }
      if (piece.text.empty()) continue;
      tokens.clear();
      parts_.model->tokenize(piece.text, *scratch, tokens);
      for (const auto& token : tokens) take(token.id, piece, token.begin, token.end);
    }
    const std::lock_guard lock(mutex_);
    scratches_.push_back(std::move(scratch));
  }

  std::unique_ptr<Model::Scratch> borrow() const {
    const std::lock_guard lock(mutex_);
    if (scratches_.empty()) return parts_.model->scratch();
    auto scratch = std::move(scratches_.back());
    scratches_.pop_back();
    return scratch;
  }

  Encoding encode_text(std::string_view text, std::uint8_t which) const {
    Encoding result;
    each_token(text, [&](std::int32_t id, const Piece& piece, std::size_t first, std::size_t last) {
      result.ids.push_back(id);
      auto range = piece.source(first, last);
      if (parts_.trim_offsets) trim(piece.text.substr(first, last - first), result.offsets.empty(), range);
      result.offsets.push_back(range);
    });
    result.types.resize(result.ids.size(), which);
    result.texts.resize(result.ids.size(), which);
    return result;
  }

  void trim(std::string_view token, bool first, ByteRange& range) const {
    auto leading = static_cast<std::uint32_t>(std::min(token.find_first_not_of(' '), token.size()));
    const auto trailing = static_cast<std::uint32_t>(token.size() - (token.find_last_not_of(' ') + 1));
    if (leading == 1 && parts_.space_was_added && (first || range.begin == 0)) leading = 0;
    range.begin = std::min(range.begin + leading, range.end);
    if (trailing == token.size() && leading == 0)
      range.end = range.begin;  // the space that was added has no place in the text
    else if (range.end >= trailing)
      range.end = std::max(range.end - trailing, range.begin);
  }

  void encode_into(std::string_view text, bool add_special, std::vector<std::int32_t>& ids) const override {
    const auto add = [&] {
      each_token(text, [&](std::int32_t id, const Piece&, std::size_t, std::size_t) { ids.push_back(id); });
    };
    if (!add_special) return add();
    for (const auto& item : parts_.single) {
      if (item.text >= 0)
        add();
      else
        ids.insert(ids.end(), item.ids.begin(), item.ids.end());
    }
  }

  static void append(const Encoding& part, int text, std::uint8_t type, Encoding& result) {
    result.ids.insert(result.ids.end(), part.ids.begin(), part.ids.end());
    result.offsets.insert(result.offsets.end(), part.offsets.begin(), part.offsets.end());
    result.types.resize(result.ids.size(), type);
    result.texts.resize(result.ids.size(), static_cast<std::uint8_t>(text));
  }
  // The texts alone, with the types that the template gives them.
  static Encoding joined(const std::vector<const Encoding*>& texts, const std::vector<TemplateItem>* items) {
    Encoding result;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      std::uint8_t type = 0;
      if (items != nullptr)
        for (const auto& item : *items)
          if (item.text == static_cast<int>(i)) type = item.type;
      append(*texts[i], static_cast<int>(i), type, result);
    }
    return result;
  }

  PipelineParts parts_;
  AddedTokens tokens_;
  std::unordered_map<std::string, std::int32_t> added_ids_;
  std::unordered_map<std::int32_t, AddedToken> added_;
  std::int64_t size_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Model::Scratch>> scratches_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(PipelineParts parts) { return std::make_unique<Pipeline>(std::move(parts)); }

}  // namespace data
