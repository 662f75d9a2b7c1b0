// See file_regions.h.
#include "engine/file_regions.h"

#include <algorithm>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::engine {
namespace {

// For blocking transfers: large enough for the disk, small compared to a shard.
constexpr std::int64_t kBounceBytes = std::int64_t{8} << 20;

std::int64_t down(std::int64_t bytes) { return bytes / ShardFile::kAlignment * ShardFile::kAlignment; }
std::int64_t up(std::int64_t bytes) { return down(bytes + ShardFile::kAlignment - 1); }

// A read that also compares its blocks with their checksums.
class CheckedRead final : public Work {
 public:
  CheckedRead(std::shared_ptr<Work> read, std::shared_ptr<storage::Checksums> checksums, const ShardFile& file,
              std::int64_t region, std::int64_t at, const void* data, std::int64_t bytes)
      : read_(std::move(read)),
        checksums_(std::move(checksums)),
        file_(file),
        region_(region),
        at_(at),
        data_(data),
        bytes_(bytes) {}
  void wait() override {
    read_->wait();
    if (!compared_) different_ = checksums_->first_difference(at_, data_, bytes_);
    compared_ = true;
    if (different_ < 0) return;
    throw IoError(base::join(
        "[FileRegion::read] got other bytes in the ", storage::Checksums::kBlock, " at offset ", region_ + different_,
        " of ", file_.file().path(), " than were written there, expected them back (", file_.who(),
        "). Hint: the disk or its driver loses or mixes up writes; move nvme_path elsewhere and go "
        "on from the last checkpoint. libzero.tier_checksums turns the comparison off."));
  }
  bool done() override { return read_->done(); }

 private:
  const std::shared_ptr<Work> read_;
  const std::shared_ptr<storage::Checksums> checksums_;
  const ShardFile& file_;
  const std::int64_t region_, at_;
  const void* const data_;
  const std::int64_t bytes_;
  std::int64_t different_ = -1;
  bool compared_ = false;
};

}  // namespace

std::int64_t ShardFile::reserve(std::int64_t bytes) {
  ZERO_CHECK(file_ == nullptr, "[ShardFile::reserve] the file is made already");
  const auto begin = bytes_;
  bytes_ += up(bytes);
  return begin;
}

void ShardFile::make() { file_ = storage::SwapFile::create(folder_, std::max(bytes_, kAlignment), settings_, who_); }

FileRegion::FileRegion(std::shared_ptr<ShardFile> file, std::int64_t bytes)
    : file_(std::move(file)), offset_(file_->reserve(bytes)) {
  if (file_->checked()) checksums_ = std::make_shared<storage::Checksums>(up(bytes));
}

std::shared_ptr<Work> FileRegion::begin_read(std::int64_t at, void* to, std::int64_t bytes) const {
  auto read = file_->file().begin_read(offset_ + at, to, bytes);
  if (!checksums_) return read;
  return std::make_shared<CheckedRead>(std::move(read), checksums_, *file_, offset_, at, to, bytes);
}

std::shared_ptr<Work> FileRegion::begin_write(std::int64_t at, const void* from, std::int64_t bytes) const {
  if (checksums_) checksums_->set(at, from, bytes);
  return file_->file().begin_write(offset_ + at, from, bytes);
}

void FileRegion::read(std::int64_t at, void* to, std::int64_t bytes) const {
  if (bytes == 0) return;
  const auto last = at + bytes;
  const auto bounce = file_->file().buffer(std::min(kBounceBytes, up(last) - down(at)));
  for (auto begin = down(at); begin < last; begin += bounce.bytes()) {
    const auto count = std::min(bounce.bytes(), up(last) - begin);
    begin_read(begin, bounce.data(), count)->wait();
    const auto from = std::max(begin, at), until = std::min(begin + count, last);
    std::memcpy(static_cast<char*>(to) + (from - at), static_cast<const char*>(bounce.data()) + (from - begin),
                static_cast<std::size_t>(until - from));
  }
}

void FileRegion::write(std::int64_t at, const void* from, std::int64_t bytes) const {
  if (bytes == 0) return;
  const auto last = at + bytes;
  const auto bounce = file_->file().buffer(std::min(kBounceBytes, up(last) - down(at)));
  for (auto begin = down(at); begin < last; begin += bounce.bytes()) {
    const auto count = std::min(bounce.bytes(), up(last) - begin);
    const auto put = std::max(begin, at), until = std::min(begin + count, last);
    // Preserve the other bytes of the first and last block.
    constexpr auto kBlock = ShardFile::kAlignment;
    auto* const held = static_cast<char*>(bounce.data());
    if (put != begin) begin_read(begin, held, kBlock)->wait();
    if (until != begin + count && (put == begin || count > kBlock))
      begin_read(begin + count - kBlock, held + count - kBlock, kBlock)->wait();
    std::memcpy(held + (put - begin), static_cast<const char*>(from) + (put - at),
                static_cast<std::size_t>(until - put));
    begin_write(begin, bounce.data(), count)->wait();
  }
}

}  // namespace zero::engine
