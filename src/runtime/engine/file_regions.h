// Regions of the file of one rank, in which states rest. Who reads one when, and what it holds, is not known here.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <zero/work.h>

#include "storage/checksums.h"
#include "storage/swap_file.h"

namespace zero::engine {

// The file of one rank: regions are reserved first, then it is made with room for all of them, before anything runs.
class ShardFile {
 public:
  // Every region begins at a multiple of this many bytes and may be transferred in multiples of it.
  static constexpr std::int64_t kAlignment = 4096;

  // checked: what is read is compared with what was written, block by block.
  ShardFile(std::string folder, const storage::IoSettings& settings, std::string who, bool checked)
      : folder_(std::move(folder)), settings_(settings), who_(std::move(who)), checked_(checked) {}

  // Where a region of `bytes` begins.
  std::int64_t reserve(std::int64_t bytes);
  // Throws IoError with folder, needed and free bytes when they do not fit.
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

// A part of the file, in bytes from its begin. What it holds is not known here.
class FileRegion {
 public:
  FileRegion(std::shared_ptr<ShardFile> file, std::int64_t bytes);

  // Whole blocks from byte `at`, a multiple of a block, on. The Work's wait() throws IoError, too, when a block is not
  // what was written last. The memory must live until then.
  std::shared_ptr<Work> begin_read(std::int64_t at, void* to, std::int64_t bytes) const;
  std::shared_ptr<Work> begin_write(std::int64_t at, const void* from, std::int64_t bytes) const;

  // Any bytes; wait for the file.
  void read(std::int64_t at, void* to, std::int64_t bytes) const;
  void write(std::int64_t at, const void* from, std::int64_t bytes) const;

 private:
  std::shared_ptr<ShardFile> file_;
  std::shared_ptr<storage::Checksums> checksums_;  // null: not checked
  std::int64_t offset_;
};

}  // namespace zero::engine
