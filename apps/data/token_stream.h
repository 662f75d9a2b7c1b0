// The tokens of many documents, one after the other, as a mapped file: made once, then shared by the ranks of a host.
// Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "apps/data/mapped_file.h"
#include "apps/data/records.h"
#include "apps/data/tokenizers/tokenizer.h"

namespace data {

// A file is named tokens-KEY.bin after what it was made from (contents of the text files, tokenizer, separator), and is
// made again where another or a damaged one lies under its name, or one that somebody else can have written than this
// user, root and the owner of the folder. Layout, little-endian: the magic number "ZTOKENS2",
// the key, the bytes of a token (2 or 4), the number of tokens and XXH3 of their bytes, 8 bytes each; then the tokens.
class TokenStream {
 public:
  // `separator` ends every document. cache: an existing folder, which threads, processes and hosts may use at once, and
  // where one of them makes the file for all (tokens.lock); empty: a temporary file without a name.
  // Throws std::runtime_error if the file cannot be written, or for a document of more than 64 MiB.
  TokenStream(const Records& records, const Tokenizer& tokenizer, std::int32_t separator, const std::string& cache);

  std::int64_t size() const { return size_; }
  // Tokens [begin, begin + count); both in range.
  std::vector<std::int32_t> tokens(std::int64_t begin, std::int64_t count) const;

 private:
  bool open(const std::string& path, std::uint64_t key, std::int64_t vocabulary);

  std::unique_ptr<MappedFile> file_;
  std::int64_t size_ = 0, width_ = 2;
};

}  // namespace data
