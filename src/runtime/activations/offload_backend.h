// Storage for offloaded bytes: host memory, slots of a slab, or a file. A backend copies out asynchronously and back
// ahead of use. Its caller (activation_store.h) decides which bytes are copied and when.
//
// [Note: streams] Copies of a GPU run on one side stream. The device memory is kept until the stream that is current at
// the next offload has been ordered after the copy, so that the memory can be reused without blocking the host. A block
// of host memory is reused only by copies of the same side stream, in order.
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

// Offloaded bytes. The backend must outlive the handle.
class OffloadHandle {
 public:
  virtual ~OffloadHandle() = default;
  // Starts a copy back unless one is pending.
  virtual void begin_fetch() = 0;
  // Returns the bytes (kByte, 1-d, on the device) for use on the current stream.
  virtual at::Tensor fetch() = 0;
};

// Not thread-safe; the owner synchronizes. Throws errors of memory and files (IoError).
class OffloadBackend {
 public:
  virtual ~OffloadBackend() = default;
  // bytes: kByte, 1-d, contiguous, not empty, on the device.
  virtual std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) = 0;
  // Whether bytes come back by a collective, which all ranks must call whatever memory is still there on one of them.
  virtual bool is_collective() const { return false; }
  // Ends a pass: releases all device memory that pending copies keep.
  virtual void wait_idle() {}
};

// Copies from the device that are in flight.
class PendingCopies {
 public:
  struct One {
    at::Tensor bytes;  // on the device; undefined once released
    gpu::Mark copied;
  };
  explicit PendingCopies(at::Device device) : side_(device, /*high_priority=*/false) {}
  // nullptr if the copy is already complete, as on the CPU.
  std::shared_ptr<One> begin(const at::Tensor& bytes, const at::Tensor& host);
  void end();
  const gpu::SideStream& side() const { return side_; }

 private:
  gpu::SideStream side_;
  std::shared_ptr<One> last_;
};

// Stores bytes in host memory.
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

// Stores bytes on the device, in one slab.
class SlabBackend final : public OffloadBackend {
 public:
  explicit SlabBackend(std::unique_ptr<Slab> slab) : slab_(std::move(slab)) {}
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;

 private:
  class Held;
  std::unique_ptr<Slab> slab_;
};

// Stores bytes in an unnamed file in `folder`, through blocks of host memory; the file's size is booked under the tier
// File. Grows by adding files; once all are empty, one file of their total size replaces them.
class FileBackend final : public OffloadBackend {
 public:
  // The first file is created by the first offload. `who`: as for SwapFile::create.
  FileBackend(at::Device device, std::shared_ptr<HostBlocks> staging, std::shared_ptr<step::MemoryLedger> ledger,
              std::string folder, const storage::IoSettings& settings, std::string who);
  ~FileBackend() override;
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;
  void wait_idle() override;

 private:
  static constexpr std::int64_t kFirstBytes = std::int64_t{16} << 20;
  static constexpr std::size_t kMostWrites = 2;  // blocks of host memory being written

  struct Extent {
    std::unique_ptr<storage::SwapFile> file;
    std::int64_t end = 0;                                    // of the space handed out
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
  std::deque<Held*> outgoing_;  // not yet written, oldest first
};

}  // namespace zero::activations
