// Regions of a rank's offload file. This layer does not know what a region stores or when it is accessed.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <zero/work.h>

#include "storage/checksums.h"
#include "storage/swap_file.h"

namespace zero::engine {

// The file of one rank. All regions are reserved before the file is created with space for all of them.
class ShardFile {
 public:
  // Regions begin at multiples of this many bytes and are transferred in multiples of it.
  static constexpr std::int64_t kAlignment = 4096;

  // checked: every block that is read is compared with the checksum of its last write.
  ShardFile(std::string folder, const storage::IoSettings& settings, std::string who, bool checked)
      : folder_(std::move(folder)), settings_(settings), who_(std::move(who)), checked_(checked) {}

  // Returns the offset of a region of `bytes` bytes.
  std::int64_t reserve(std::int64_t bytes);
  // Throws IoError with the folder, the required and the free bytes if the space is insufficient.
  void make();
  storage::SwapFile& file() const { return *file_; }
  std::int64_t bytes() const { return bytes_; }
  const std::string& folder() const { return folder_; }
  bool checked() const { return checked_; }
  const std::string& who() const { return who_; }

 private:
  const std::string folder_;
  const storage::IoSettings settings_;
  const std::string who_;
  const bool checked_;
  std::int64_t bytes_ = 0;
  std::unique_ptr<storage::SwapFile> file_;
};

// A part of the file. Offsets are in bytes from its begin.
class FileRegion {
 public:
  FileRegion(std::shared_ptr<ShardFile> file, std::int64_t bytes);

  // Transfer whole blocks; `at` is a multiple of the block size. The memory must live until wait(), which throws
  // IoError, also if a block differs from what was last written.
  std::shared_ptr<Work> begin_read(std::int64_t at, void* to, std::int64_t bytes) const;
  std::shared_ptr<Work> begin_write(std::int64_t at, const void* from, std::int64_t bytes) const;

  // Any range of bytes; blocking.
  void read(std::int64_t at, void* to, std::int64_t bytes) const;
  void write(std::int64_t at, const void* from, std::int64_t bytes) const;

 private:
  std::shared_ptr<ShardFile> file_;
  std::shared_ptr<storage::Checksums> checksums_;  // null: not checked
  std::int64_t offset_;
};

}  // namespace zero::engine
