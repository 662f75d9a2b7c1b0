// Text to the numbers of tokens and back, as the tokenizers of pretrained models do: byte-level BPE (GPT-2, Llama 3),
// BPE with byte fallback (Llama 2), WordPiece (BERT), Unigram (T5). Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace data {

// Bytes [begin, end) of a text.
struct ByteRange {
  std::uint32_t begin = 0, end = 0;
  bool operator==(const ByteRange&) const = default;
};

struct Encoding {
  std::vector<std::int32_t> ids;
  std::vector<ByteRange> offsets;   // of each token in its text; empty ranges for tokens that were added
  std::vector<std::uint8_t> types;  // the token type: 0, or 1 for the second text of a pair with most models
  std::vector<std::uint8_t> texts;  // which text a token comes from: 0, 1, or kAdded
  static constexpr std::uint8_t kAdded = 255;
};

// Ids of tokens with a role; no value where the tokenizer has none.
struct SpecialTokens {
  std::optional<std::int32_t> unknown, begin, end, padding, separator, classifier, mask;
};

// Immutable: any number of threads may use one. Texts must be UTF-8 of less than 2 GiB: encode throws
// std::invalid_argument with the offset of the first byte that is not; the tokenizer of bytes takes any.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // add_special: as the model was trained, e.g. with [CLS] and [SEP], if the tokenizer's files say so.
  std::vector<std::int32_t> encode(std::string_view text, bool add_special = true) const;
  virtual Encoding encode_with_offsets(std::string_view text, bool add_special = true) const = 0;
  // Two texts as one sequence, such as a question and its context.
  virtual Encoding encode_pair(std::string_view first, std::string_view second, bool add_special = true) const = 0;
  // Added around one encoded text, or around two: how a caller that cuts texts itself builds the sequence. Both are
  // encodings without special tokens.
  virtual Encoding with_special(const Encoding& first, const Encoding* second = nullptr) const = 0;
  // Throws std::out_of_range for an id that is none. Bytes that are not UTF-8 become U+FFFD.
  virtual std::string decode(std::span<const std::int32_t> ids, bool skip_special = false) const = 0;

  // One more than the largest id: the least number of rows of an embedding.
  virtual std::int64_t vocabulary() const = 0;
  virtual std::optional<std::int32_t> id_of(std::string_view token) const = 0;
  // As the vocabulary spells it; empty for an id that no token has. Throws std::out_of_range from vocabulary() on.
  virtual std::string token_of(std::int32_t id) const = 0;
  virtual bool is_special(std::int32_t id) const = 0;
  const SpecialTokens& special() const { return special_; }
  // Tokenizers with the same digest encode in the same way.
  std::uint64_t digest() const { return digest_; }
  // "byte-level BPE, 50257 tokens": for messages.
  virtual std::string description() const = 0;

 protected:
  SpecialTokens special_;
  std::uint64_t digest_ = 0;

 private:
  virtual void encode_into(std::string_view text, bool add_special, std::vector<std::int32_t>& ids) const = 0;
};

// From a folder as Hugging Face's models have it: tokenizer.json; without it vocab.json with merges.txt, vocab.txt,
// spiece.model or tokenizer.model. tokenizer_config.json, special_tokens_map.json and added_tokens.json next to
// them tell special tokens and options. Throws std::runtime_error that names the file, the place in it, what was found
// and what can be read: what is unsupported is refused, never left out.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

// Ids 0 to 255 are bytes; 256 is the end of a text (end and padding).
std::unique_ptr<Tokenizer> byte_tokenizer();

}  // namespace data
