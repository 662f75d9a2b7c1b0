// Where bytes of a device wait until they are asked for again: in host memory, in slots of a slab, in a file. A backend
// copies out while the device goes on, and back ahead of use; which bytes, and when, is its caller's
// (activation_store.h).
//
// [Note: streams] Copies of a GPU run on one side stream. The device's bytes stay until the stream that is current at
// the next departure has been told to wait for the copy, so that their memory can be used again without the host
// waiting. A block of host memory is used again by copies of the same side stream only, in order.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "activations/host_allocator.h"
#include "gpu/streams.h"
#include "step/memory_ledger.h"
#include "storage/swap_file.h"

namespace zero::activations {

// Bytes that left. Its backend must outlive it.
class OffloadHandle {
 public:
  virtual ~OffloadHandle() = default;
  // Begins to bring a copy back, unless that is under way.
  virtual void begin_fetch() = 0;
  // The bytes (kByte, 1-d, on the device); what the current stream is given from now on may read them.
  virtual at::Tensor fetch() = 0;
};

// Not thread-safe: its owner takes turns. Errors are those of memory and files (IoError).
class OffloadBackend {
 public:
  virtual ~OffloadBackend() = default;
  // bytes: kByte, 1-d, contiguous, not empty, on the device.
  virtual std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) = 0;
  // A pass has ended: nothing of the device is held any longer.
  virtual void wait_idle() {}
};

// What is copied out of the device at the moment.
class PendingCopies {
 public:
  struct One {
    at::Tensor bytes;  // on the device; undefined when they are gone
    gpu::Mark copied;
  };
  explicit PendingCopies(at::Device device) : side_(device, /*high_priority=*/false) {}
  // nullptr where the copy is complete, on the CPU.
  std::shared_ptr<One> begin(const at::Tensor& bytes, const at::Tensor& host);
  void end();
  const gpu::SideStream& side() const { return side_; }

 private:
  gpu::SideStream side_;
  std::shared_ptr<One> last_;
};

// In memory of the host.
class HostBackend final : public OffloadBackend {
 public:
  HostBackend(at::Device device, std::shared_ptr<HostAllocator> source)
      : source_(std::move(source)), departures_(device) {}
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;
  void wait_idle() override { departures_.end(); }

 private:
  class Held;
  std::shared_ptr<HostAllocator> source_;
  PendingCopies departures_;
};

// On the device itself, in one slab.
class SlabBackend final : public OffloadBackend {
 public:
  explicit SlabBackend(std::unique_ptr<Slab> slab) : slab_(std::move(slab)) {}
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;

 private:
  class Held;
  std::unique_ptr<Slab> slab_;
};

// In a file without a name in `folder`, through blocks of host memory; booked as owned under the tier File. The file
// grows by further ones; when nothing is in them, one file of their size takes their place.
class FileBackend final : public OffloadBackend {
 public:
  // The first file is made at the first departure. `who` as SwapFile::create takes it.
  FileBackend(at::Device device, std::shared_ptr<HostBlocks> staging, std::shared_ptr<step::MemoryLedger> ledger,
              std::string folder, const storage::IoSettings& settings, std::string who);
  ~FileBackend() override;
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;
  void wait_idle() override;

 private:
  static constexpr std::int64_t kFirstBytes = std::int64_t{16} << 20;
  static constexpr std::size_t kMostWrites = 2;  // blocks of host memory on their way into the file

  struct Extent {
    std::unique_ptr<storage::SwapFile> file;
    std::int64_t end = 0;                                    // of what has been handed out
    std::map<std::int64_t, std::vector<std::int64_t>> idle;  // offsets by size
  };
  struct Range {
    storage::SwapFile* file = nullptr;
    std::int64_t offset = 0, bytes = 0;  // bytes: whole blocks
  };
  class Held;

  Range take(std::int64_t bytes);
  void give(const Range& range);
  void add_extent(std::int64_t bytes);
  void advance(std::size_t most_writes);

  const at::Device device_;
  const std::shared_ptr<HostBlocks> staging_;
  const std::shared_ptr<step::MemoryLedger> ledger_;
  const std::string folder_, who_;
  const storage::IoSettings settings_;
  PendingCopies departures_;
  std::vector<Extent> extents_;
  std::int64_t in_use_ = 0;     // ranges
  std::deque<Held*> outgoing_;  // not yet in the file, oldest first
};

}  // namespace zero::activations
