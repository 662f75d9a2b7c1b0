// Which files of a folder make a tokenizer.
#include <xxhash.h>

#include <filesystem>
#include <stdexcept>

#include "apps/data/mapped_file.h"
#include "apps/data/tokenizers/readers.h"

namespace data {
namespace {

// The files of a folder that were read, and a hash of all.
class Folder {
 public:
  explicit Folder(const std::string& path) : path_(path) {}

  bool has(const char* name) const { return std::filesystem::exists(path_ / name); }
  std::string file(const char* name) const { return (path_ / name).string(); }
  std::string read(const char* name) {
    auto text = read_tokenizer_file(file(name));
    digest_ = XXH3_64bits_withSeed(text.data(), text.size(), digest_ + 1);
    return text;
  }
  std::uint64_t digest() const { return digest_; }

 private:
  std::filesystem::path path_;
  std::uint64_t digest_ = 0;
};

constexpr const char *kTokenizer = "tokenizer.json", *kConfig = "tokenizer_config.json", *kVocabulary = "vocab.json",
                     *kMerges = "merges.txt", *kText = "vocab.txt", *kPieces = "spiece.model",
                     *kModel = "tokenizer.model", *kMap = "special_tokens_map.json", *kAdded = "added_tokens.json";

PipelineParts parts_of(Folder& folder, const std::string& path) {
  TokenizerConfig config;
  if (folder.has(kConfig)) config = read_tokenizer_config(folder.file(kConfig), folder.read(kConfig));
  if (folder.has(kMap)) read_special_tokens_map(folder.file(kMap), folder.read(kMap), config);
  if (folder.has(kTokenizer)) {
    auto parts = read_tokenizer_json(folder.file(kTokenizer), folder.read(kTokenizer));
    resolve_special(folder.file(folder.has(kConfig) ? kConfig : kMap), config, true, parts);
    return parts;
  }
  if (folder.has(kAdded)) read_added_tokens(folder.file(kAdded), folder.read(kAdded), config);
  if (folder.has(kVocabulary) && folder.has(kMerges))
    return read_gpt2(folder.file(kVocabulary), folder.read(kVocabulary), folder.read(kMerges), config);
  if (folder.has(kText)) return read_vocabulary_text(folder.file(kText), folder.read(kText), config);
  for (const auto* name : {kPieces, kModel})
    if (folder.has(name)) return read_sentence_piece(folder.file(name), folder.read(name), config);
  fail_file("tokenizer", path, "a folder without one",
            "tokenizer.json, vocab.json with merges.txt, vocab.txt or spiece.model in it");
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  if (!std::filesystem::is_directory(path)) fail_file("tokenizer", path, "no folder", "one with a tokenizer's files");
  Folder folder(path);
  auto parts = parts_of(folder, path);
  parts.digest = folder.digest();
  try {
    return make_tokenizer(std::move(parts));
  } catch (const std::invalid_argument& e) {
    fail_file("tokenizer", path, e.what(), "tokens with ids of their own");
  }
}

}  // namespace data
