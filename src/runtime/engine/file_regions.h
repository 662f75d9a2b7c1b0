// A flat vector of one rank at rest on a tier: in memory (of the device or the host) as a tensor, or as a region of the
// rank's file. Who reads it when, and what it holds, is the engine's.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include <zero/work.h>

#include "step/memory_ledger.h"
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

class ShardStore {
 public:
  ShardStore() = default;
  // In memory; tier is Device or Host.
  ShardStore(step::Tier tier, at::Tensor vector);
  // In a region of `file` (which must outlive this), zero at first.
  ShardStore(ShardFile* file, std::int64_t numel, at::ScalarType dtype);

  bool defined() const { return file_ != nullptr || vector_.defined(); }
  bool in_file() const { return file_ != nullptr; }
  step::Tier tier() const { return tier_; }
  std::int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  // What it occupies: of a file with the padding to whole blocks.
  std::int64_t bytes() const;
  // In memory: the vector itself.
  const at::Tensor& vector() const { return vector_; }

  // Elements [begin, begin + numel), 1-d: of memory a view, of a file a copy in host memory. Waits for the file.
  at::Tensor read(std::int64_t begin, std::int64_t numel) const;
  at::Tensor read() const { return read(0, numel_); }
  // Puts `values` (1-d, any floating dtype) at `begin`. Waits for the file.
  void write(std::int64_t begin, const at::Tensor& values);

  // --- in a file ---
  // Memory that a transfer of `numel` elements takes: whole blocks. `begin` lies at a block's border.
  std::int64_t transfer_bytes(std::int64_t numel) const;
  // The Work's wait() throws IoError, too, when a block is not what was written last.
  std::shared_ptr<Work> begin_read(std::int64_t begin, std::int64_t numel, void* to) const;
  // Bytes of `from` between the elements and the end of the last block are written, too.
  std::shared_ptr<Work> begin_write(std::int64_t begin, std::int64_t numel, const void* from) const;
  ShardFile& shard_file() const { return *file_; }

 private:
  std::int64_t width() const { return static_cast<std::int64_t>(at::elementSize(dtype_)); }
  // Whole blocks from byte `at` of the region on.
  std::shared_ptr<Work> begin_read_bytes(std::int64_t at, void* to, std::int64_t bytes) const;
  std::shared_ptr<Work> begin_write_bytes(std::int64_t at, const void* from, std::int64_t bytes) const;

  step::Tier tier_ = step::Tier::Device;
  at::Tensor vector_;
  ShardFile* file_ = nullptr;
  std::shared_ptr<storage::Checksums> checksums_;  // of the region; null: not checked
  std::int64_t offset_ = 0, numel_ = 0;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace zero::engine
