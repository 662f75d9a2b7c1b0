// Tokens that are bytes, and what all tokenizers share.
#include <xxhash.h>

#include <stdexcept>

#include "apps/data/tokenizers/tokenizer.h"
#include "apps/data/tokenizers/unicode.h"

namespace data {
namespace {

constexpr std::int32_t kEnd = 256;

class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer() {
    special_.end = special_.padding = kEnd;
    digest_ = XXH3_64bits("bytes", 5);
  }

  Encoding encode_with_offsets(std::string_view text, bool) const override {
    Encoding result;
    append(text, 0, result);
    return result;
  }
  Encoding encode_pair(std::string_view first, std::string_view second, bool) const override {
    Encoding result;
    append(first, 0, result);
    append(second, 1, result);
    return result;
  }
  Encoding with_special(const Encoding& first, const Encoding* second) const override {
    Encoding result = first;
    if (second == nullptr) return result;
    const auto add = [](auto& all, const auto& more) { all.insert(all.end(), more.begin(), more.end()); };
    add(result.ids, second->ids);
    add(result.offsets, second->offsets);
    result.types.resize(result.ids.size(), 1);
    result.texts.resize(result.ids.size(), 1);
    return result;
  }
  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::string bytes;
    for (const auto id : ids) {
      if (id < 0 || id > kEnd) refuse(id);
      if (id < kEnd) bytes.push_back(static_cast<char>(id));
      if (id == kEnd && !skip_special) bytes += kEndName;
    }
    return bytes;
  }
  std::int64_t vocabulary() const override { return kEnd + 1; }
  std::optional<std::int32_t> id_of(std::string_view token) const override {
    if (token == kEndName) return kEnd;
    if (token.size() != 1) return std::nullopt;
    return static_cast<unsigned char>(token[0]);
  }
  std::string token_of(std::int32_t id) const override {
    if (id < 0 || id > kEnd) refuse(id);
    return id == kEnd ? kEndName : std::string(1, static_cast<char>(id));
  }
  bool is_special(std::int32_t id) const override { return id == kEnd; }
  std::string description() const override { return "bytes, 257 tokens"; }

 private:
  static constexpr const char* kEndName = "<|endoftext|>";

  [[noreturn]] static void refuse(std::int32_t id) {
    throw std::out_of_range("[Tokenizer] got id " + std::to_string(id) + ", expected 0 to 256");
  }
  static void append(std::string_view text, std::uint8_t which, Encoding& result) {
    for (std::uint32_t i = 0; i < text.size(); ++i) {
      result.ids.push_back(static_cast<unsigned char>(text[i]));
      result.offsets.push_back({i, i + 1});
    }
    result.types.resize(result.ids.size(), which);
    result.texts.resize(result.ids.size(), which);
  }
  void encode_into(std::string_view text, bool, std::vector<std::int32_t>& ids) const override {
    ids.reserve(text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  }
};

}  // namespace

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special) const {
  std::vector<std::int32_t> ids;
  encode_into(text, add_special, ids);
  return ids;
}

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

}  // namespace data
