// Hashes of a checkpoint's files by block, so that a reader checks what it reads and nothing else. One row of 16 bytes
// (XXH3-128, canonical) per kBlockBytes of a file, from its first byte on. The rows of all files are in one file.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/files.h"
#include "formats/hash.h"
#include "formats/manifest.h"

namespace zero::formats {

inline constexpr std::uint64_t kBlockBytes = std::uint64_t{256} << 10;
inline constexpr std::uint64_t kRowBytes = 16;
inline constexpr const char* kBlocksName = "blocks-00000.safetensors";

inline std::uint64_t num_blocks(std::uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

// Hashes a file by block and as a whole.
class BlockHasher {
 public:
  void add(const char* data, std::size_t bytes);  // in the order of the file
  // Call once, at the end: all rows, one after the other.
  std::string rows();
  std::string file_hash() const { return whole_.hex(); }

 private:
  Hasher block_, whole_;
  std::uint64_t filled_ = 0;  // bytes of the current block
  std::string rows_;
};

// Writes the file of rows: a safetensors file with one U8 tensor [blocks, 16] per file, named after it.
Manifest::FileEntry write_blocks(const Folder& folder, const std::vector<std::pair<std::string, std::string>>& rows);

// Reads rows, and finds out whether they or the data were damaged.
class BlockRows {
 public:
  BlockRows(const Folder& folder, const Manifest& manifest) : folder_(folder), manifest_(manifest) {}
  // Rows [first, first + count) of a file.
  std::string read(std::uint32_t file, std::uint64_t first, std::uint64_t count);
  // Compares bytes of a file, from the block `first` on, with the rows of their blocks. Throws IoError (kCheckpoint).
  void check(std::uint32_t file, std::uint64_t first, std::string_view rows, const char* data,
             std::uint64_t bytes) const;

 private:
  [[noreturn]] void fail(std::uint32_t file, std::uint64_t block, std::string_view row, std::string_view got) const;
  void open();

  const Folder& folder_;
  const Manifest& manifest_;
  std::optional<File> file_;
  std::vector<std::uint64_t> begins_;  // offset of each file's rows
};

// Reads a whole file: its entry and rows.
struct HashedFile {
  Manifest::FileEntry entry;
  std::string rows;
};
HashedFile hash_file(const Folder& folder, const std::string& name, std::optional<std::uint64_t> bytes = std::nullopt);
// Checks the hash of a whole file and returns its rows. Throws IoError (kCheckpoint).
std::string require_hash(const Folder& folder, const Manifest::FileEntry& entry);

// Checks every byte of a checkpoint's files against its hashes, `of` readers sharing the work: each the
// same number of blocks, or, of format 1, files in turn. Throws IoError (kCheckpoint) with file, offset and both
// hashes.
void verify_share(const Folder& folder, const Manifest& manifest, int reader, int of);

}  // namespace zero::formats
