// See shard_store.h.
#include "engine/file_regions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::engine {
namespace {

// Of transfers that are waited for: large enough for the disk, small beside a shard.
constexpr std::int64_t kBounceBytes = std::int64_t{8} << 20;

std::int64_t down(std::int64_t bytes) { return bytes / ShardFile::kAlignment * ShardFile::kAlignment; }
std::int64_t up(std::int64_t bytes) { return down(bytes + ShardFile::kAlignment - 1); }

// A read that is complete when its blocks have been compared with what was written.
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
        "[ShardStore::read] got other bytes in the ", storage::Checksums::kBlock, " at offset ", region_ + different_,
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

ShardStore::ShardStore(step::Tier tier, at::Tensor vector)
    : tier_(tier), vector_(std::move(vector)), numel_(vector_.numel()), dtype_(vector_.scalar_type()) {}

ShardStore::ShardStore(ShardFile* file, std::int64_t numel, at::ScalarType dtype)
    : tier_(step::Tier::File), file_(file), numel_(numel), dtype_(dtype) {
  offset_ = file_->reserve(numel_ * width());
  if (file_->checked()) checksums_ = std::make_shared<storage::Checksums>(bytes());
}

std::int64_t ShardStore::bytes() const { return in_file() ? up(numel_ * width()) : numel_ * width(); }

std::int64_t ShardStore::transfer_bytes(std::int64_t numel) const { return up(numel * width()); }

std::shared_ptr<Work> ShardStore::begin_read(std::int64_t begin, std::int64_t numel, void* to) const {
  return begin_read_bytes(begin * width(), to, transfer_bytes(numel));
}

std::shared_ptr<Work> ShardStore::begin_write(std::int64_t begin, std::int64_t numel, const void* from) const {
  return begin_write_bytes(begin * width(), from, transfer_bytes(numel));
}

std::shared_ptr<Work> ShardStore::begin_read_bytes(std::int64_t at, void* to, std::int64_t bytes) const {
  auto read = file_->file().begin_read(offset_ + at, to, bytes);
  if (!checksums_) return read;
  return std::make_shared<CheckedRead>(std::move(read), checksums_, *file_, offset_, at, to, bytes);
}

std::shared_ptr<Work> ShardStore::begin_write_bytes(std::int64_t at, const void* from, std::int64_t bytes) const {
  if (checksums_) checksums_->set(at, from, bytes);
  return file_->file().begin_write(offset_ + at, from, bytes);
}

at::Tensor ShardStore::read(std::int64_t begin, std::int64_t numel) const {
  if (!in_file()) return vector_.narrow(0, begin, numel);
  auto values = at::empty({numel}, at::TensorOptions().dtype(dtype_));
  if (numel == 0) return values;
  auto& file = file_->file();
  auto* const to = static_cast<char*>(values.mutable_data_ptr());
  const auto first = begin * width(), last = first + numel * width();
  const auto bounce = file.buffer(std::min(kBounceBytes, up(last) - down(first)));
  for (auto at = down(first); at < last; at += bounce.bytes()) {
    const auto bytes = std::min(bounce.bytes(), up(last) - at);
    begin_read_bytes(at, bounce.data(), bytes)->wait();
    const auto from = std::max(at, first), until = std::min(at + bytes, last);
    std::memcpy(to + (from - first), static_cast<const char*>(bounce.data()) + (from - at),
                static_cast<std::size_t>(until - from));
  }
  return values;
}

void ShardStore::write(std::int64_t begin, const at::Tensor& values) {
  if (!in_file()) {
    vector_.narrow(0, begin, values.numel()).copy_(values);
    return;
  }
  if (values.numel() == 0) return;
  const auto here = values.to(at::kCPU, dtype_).contiguous();
  auto& file = file_->file();
  const auto* const from = static_cast<const char*>(here.const_data_ptr());
  const auto first = begin * width(), last = first + here.numel() * width();
  const auto bounce = file.buffer(std::min(kBounceBytes, up(last) - down(first)));
  for (auto at = down(first); at < last; at += bounce.bytes()) {
    const auto bytes = std::min(bounce.bytes(), up(last) - at);
    const auto put = std::max(at, first), until = std::min(at + bytes, last);
    // The neighbours' elements in the first and the last block stay.
    constexpr auto kBlock = ShardFile::kAlignment;
    auto* const held = static_cast<char*>(bounce.data());
    if (put != at) begin_read_bytes(at, held, kBlock)->wait();
    if (until != at + bytes && (put == at || bytes > kBlock))
      begin_read_bytes(at + bytes - kBlock, held + bytes - kBlock, kBlock)->wait();
    std::memcpy(held + (put - at), from + (put - first), static_cast<std::size_t>(until - put));
    begin_write_bytes(at, bounce.data(), bytes)->wait();
  }
}

}  // namespace zero::engine
