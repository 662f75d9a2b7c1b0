#include "activations/offload_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include <zero/work.h>

#include "base/check.h"
#include "base/log.h"

namespace zero::activations {

using step::Purpose;
using step::Tier;

// --- departures -------------------------------------------------------------------------------

std::shared_ptr<PendingCopies::One> PendingCopies::begin(const at::Tensor& bytes, const at::Tensor& host) {
  end();
  at::NoGradGuard no_grad;
  auto one = std::make_shared<One>();
  {
    gpu::SideStream::Scope scope(side_);
    at::Tensor(host).copy_(bytes, /*non_blocking=*/true);
    one->copied.set(side_.device());
  }
  if (side_.device().is_cpu()) return nullptr;
  one->bytes = bytes;
  return last_ = one;
}

void PendingCopies::end() {
  if (!last_) return;
  last_->copied.hold();
  last_->bytes.reset();
  last_.reset();
}

// --- host -------------------------------------------------------------------------------------

class HostBackend::Held final : public OffloadHandle {
 public:
  Held(HostBackend& backend, at::Tensor host, std::shared_ptr<PendingCopies::One> departure)
      : backend_(backend), host_(std::move(host)), departure_(std::move(departure)) {}
  ~Held() override {
    if (coming_.defined()) arrived_.hold();
    backend_.source_->give(host_);
  }
  void begin_fetch() override {
    if (coming_.defined() || (departure_ && departure_->bytes.defined())) return;
    const auto& side = backend_.departures_.side();
    if (!side.device().is_cpu()) copy_back(side);  // on a CPU this would copy at once and hold the memory longer
  }
  at::Tensor fetch() override {
    if (departure_ && departure_->bytes.defined()) return departure_->bytes;  // still on the device
    if (!coming_.defined()) copy_back(backend_.departures_.side());
    arrived_.hold();
    return std::exchange(coming_, at::Tensor());
  }

 private:
  void copy_back(const gpu::SideStream& side) {
    at::NoGradGuard no_grad;
    coming_ = at::empty({host_.numel()}, at::TensorOptions(at::kByte).device(side.device()));
    gpu::SideStream::Scope scope(side);
    coming_.copy_(host_, /*non_blocking=*/true);
    arrived_.set(side.device());
  }

  HostBackend& backend_;
  at::Tensor host_, coming_;
  std::shared_ptr<PendingCopies::One> departure_;
  gpu::Mark arrived_;
};

std::unique_ptr<OffloadHandle> HostBackend::offload(const at::Tensor& bytes) {
  auto host = source_->take(bytes.numel());
  auto departure = departures_.begin(bytes, host);
  return std::make_unique<Held>(*this, std::move(host), std::move(departure));
}

// --- slab -------------------------------------------------------------------------------------

class SlabBackend::Held final : public OffloadHandle {
 public:
  Held(SlabBackend& backend, at::Tensor slot) : backend_(backend), slot_(std::move(slot)) {}
  ~Held() override { backend_.slab_->give(slot_); }
  void begin_fetch() override {}
  at::Tensor fetch() override { return slot_; }

 private:
  SlabBackend& backend_;
  at::Tensor slot_;
};

std::unique_ptr<OffloadHandle> SlabBackend::offload(const at::Tensor& bytes) {
  at::NoGradGuard no_grad;
  auto slot = slab_->take(bytes.numel());
  slot.copy_(bytes);
  return std::make_unique<Held>(*this, std::move(slot));
}

// --- file -------------------------------------------------------------------------------------

namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Blocks of host memory contain an aligned range of the requested size.
at::Tensor aligned(const at::Tensor& block, std::int64_t alignment) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(block.const_data_ptr()));
  return block.narrow(0, round_up(address, alignment) - address, block.numel() - alignment);
}

}  // namespace

class FileBackend::Held final : public OffloadHandle {
 public:
  Held(FileBackend& backend, const at::Tensor& bytes)
      : backend_(backend), bytes_(bytes.numel()), range_(backend.take(bytes_)) {
    try {
      take_staging();
      departure_ = backend_.departures_.begin(bytes, at_hand_.narrow(0, 0, bytes_));
    } catch (...) {
      drop_staging();
      backend_.give(range_);
      throw;
    }
  }
  ~Held() override {
    std::erase(backend_.outgoing_, this);
    try {
      if (work_) work_->wait();
    } catch (const std::exception& error) {
      base::log(LogLevel::Warning, error.what());  // of data that is no longer needed
    }
    if (departure_) departure_->copied.wait();
    drop_staging();
    backend_.give(range_);
  }

  // While offloading: starts the write after the copy has completed. Returns whether nothing is left to do.
  bool advance(bool wait) {
    if (!writing_) {
      if (departure_) {
        if (!wait && !departure_->copied.reached()) return false;
        departure_->copied.wait();
      }
      work_ = range_.file->begin_write(range_.offset, at_hand_.const_data_ptr(), range_.bytes);
      writing_ = true;
    }
    if (!wait && work_ && !work_->done()) return false;
    if (work_) work_->wait();  // an error is kept and thrown again
    work_.reset();
    drop_staging();
    return true;
  }

  void begin_fetch() override {
    if (at_hand_.defined()) return;  // present or being read
    take_staging();
    work_ = range_.file->begin_read(range_.offset, at_hand_.mutable_data_ptr(), range_.bytes);
  }
  at::Tensor fetch() override {
    if (departure_ && departure_->bytes.defined()) return departure_->bytes;
    begin_fetch();
    if (departure_) departure_->copied.wait();
    const bool outgoing =
        std::find(backend_.outgoing_.begin(), backend_.outgoing_.end(), this) != backend_.outgoing_.end();
    if (work_ && !outgoing) {
      work_->wait();
      work_.reset();
    }
    at::NoGradGuard no_grad;
    auto result = at::empty({bytes_}, at::TensorOptions(at::kByte).device(backend_.device_));
    result.copy_(at_hand_.narrow(0, 0, bytes_));
    if (!outgoing) drop_staging();
    return result;
  }

 private:
  void take_staging() {
    const auto alignment = range_.file->alignment();
    staging_ = backend_.staging_->take(range_.bytes + alignment);
    at_hand_ = aligned(staging_, alignment);
  }
  void drop_staging() {
    if (!staging_.defined()) return;
    at_hand_.reset();
    backend_.staging_->give(std::exchange(staging_, at::Tensor()));
  }

  FileBackend& backend_;
  const std::int64_t bytes_;
  const Range range_;
  at::Tensor staging_, at_hand_;  // a block, and the aligned part of it used for transfers
  std::shared_ptr<PendingCopies::One> departure_;
  std::shared_ptr<Work> work_;
  bool writing_ = false;
};

FileBackend::FileBackend(at::Device device, std::shared_ptr<HostBlocks> staging,
                         std::shared_ptr<step::MemoryLedger> ledger, std::string folder,
                         const storage::IoSettings& settings, std::string who)
    : device_(device),
      staging_(std::move(staging)),
      ledger_(std::move(ledger)),
      folder_(std::move(folder)),
      who_(std::move(who)),
      settings_(settings),
      departures_(device) {}

FileBackend::~FileBackend() {
  for (const auto& extent : extents_) ledger_->book(Tier::File, Purpose::Activations, -extent.file->bytes());
}

void FileBackend::add_extent(std::int64_t bytes) {
  Extent extent;
  extent.file = storage::SwapFile::create(folder_, bytes, settings_, who_);
  ledger_->book(Tier::File, Purpose::Activations, extent.file->bytes());
  extents_.push_back(std::move(extent));
}

FileBackend::Range FileBackend::take(std::int64_t bytes) {
  if (extents_.empty()) add_extent(std::max(kFirstBytes, round_up(bytes, kFirstBytes)));
  // Files in one folder have the same alignment.
  const auto whole = round_up(bytes, extents_.front().file->alignment());
  const auto from = [&](Extent& extent) -> Range {
    auto& idle = extent.idle[whole];
    std::int64_t offset = extent.end;
    if (!idle.empty()) {
      offset = idle.back();
      idle.pop_back();
    } else if (extent.end + whole <= extent.file->bytes()) {
      extent.end += whole;
    } else {
      return {};
    }
    ++in_use_;
    return {extent.file.get(), offset, whole};
  };
  std::int64_t total = 0;
  for (auto& extent : extents_) {
    if (const auto range = from(extent); range.file != nullptr) return range;
    total += extent.file->bytes();
  }
  add_extent(std::max(total, round_up(whole, kFirstBytes)));
  return from(extents_.back());
}

void FileBackend::give(const Range& range) {
  --in_use_;
  for (auto& extent : extents_) {
    if (extent.file.get() == range.file) extent.idle[range.bytes].push_back(range.offset);
    if (in_use_ > 0) continue;
    extent.end = 0;
    extent.idle.clear();
  }
}

void FileBackend::advance(std::size_t most_writes) {
  while (!outgoing_.empty()) {
    if (!outgoing_.front()->advance(outgoing_.size() > most_writes)) return;
    outgoing_.pop_front();
  }
}

std::unique_ptr<OffloadHandle> FileBackend::offload(const at::Tensor& bytes) {
  advance(kMostWrites - 1);
  auto held = std::make_unique<Held>(*this, bytes);
  outgoing_.push_back(held.get());
  advance(kMostWrites);
  return held;
}

void FileBackend::wait_idle() {
  departures_.end();
  advance(0);
  if (in_use_ > 0 || extents_.size() < 2) return;
  std::int64_t total = 0;
  for (const auto& extent : extents_) {
    total += extent.file->bytes();
    ledger_->book(Tier::File, Purpose::Activations, -extent.file->bytes());
  }
  extents_.clear();
  add_extent(total);
}

}  // namespace zero::activations
