// The buffers of the step program: tensors, I/O buffers, and regions of files. Thread-safe.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "engine/file_regions.h"
#include "engine/tensor_arithmetic.h"
#include "gpu/streams.h"
#include "step/backend.h"
#include "step/memory.h"

namespace zero::engine {

class TorchBuffers final : public step::BufferOps {
 public:
  struct Setup {
    std::vector<std::shared_ptr<comm::Group>> axes;  // that share the states, by axis
    std::shared_ptr<comm::Group> node;               // that hold secondary shards of axis 0, or null
    int tensor_rank = 0;                             // coordinate in the tensor-parallel group
    at::Device device = at::kCPU;
    bool pin_states = false;                              // optimizer states in host memory
    std::shared_ptr<ShardFile> params_file, states_file;  // null: not used
  };
  explicit TorchBuffers(Setup setup) : setup_(std::move(setup)) {}

  void allocate(int buffer, const step::Allocation& allocation) override;
  void free(int buffer) override;
  // Creates the files, after all regions were reserved. IoError.
  void make_files();
  const Setup& setup() const { return setup_; }
  // Whether the data is in memory that the ranks of an axis can read.
  bool holds(int axis, const at::Tensor& tensor) const { return group(axis).holds(tensor); }

  // Registers an existing tensor under a number from Memory::register_foreign() until drop().
  void adopt(int buffer, at::Tensor tensor);
  // Returns false if the number is not of such a tensor.
  bool drop(int buffer);
  // Releases all buffers, files and groups. Only free() may follow.
  void close();

  // Flat, of the view's dtype; shares memory with the buffer. This and the next three first block the host until copies
  // to the buffer are complete (mark_written).
  at::Tensor tensor(const step::View& view) const;
  // With its original shape if adopted, else flat.
  at::Tensor shaped(const step::View& view) const;
  Stretch stretch(const step::View& view) const;
  void* data(const step::View& view) const { return stretch(view).data; }
  bool is_adopted(int buffer) const { return find(buffer).adopted; }
  bool is_pinned(int buffer) const { return find(buffer).pinned; }
  bool is_file(int buffer) const { return find(buffer).region.has_value(); }
  FileRegion& region(int buffer) const { return *find(buffer).region; }
  comm::SymmetricBuffer& symmetric(int buffer) const { return *find(buffer).symmetric; }
  // The block at this address; 0: none.
  int block_at(const void* data) const;

  // Marks that a copy from this pinned buffer to the device is on the current stream.
  void mark_read(int buffer);
  // Blocks the host until such copies are complete and the buffer may be written.
  void wait_read(int buffer) const;
  // Marks that a copy from the device to this pinned buffer is on the current stream.
  void mark_written(int buffer);
  // tensor() without the wait, for such copies.
  at::Tensor target(const step::View& view) const { return tensor_of(find(view.buffer), view); }

 private:
  struct Entry {
    at::Tensor memory;  // flat kByte; this rank's shard of symmetric memory; the original tensor if adopted
    bool adopted = false, pinned = false;
    std::shared_ptr<comm::SymmetricBuffer> symmetric;
    std::int64_t own_begin = 0;                   // of symmetric memory: byte offset of this rank's shard
    std::shared_ptr<ShardFile> io_file;           // of I/O buffers
    mutable std::optional<storage::IoBuffer> io;  // created after the file
    std::int64_t io_bytes = 0;
    mutable std::optional<FileRegion> region;
    gpu::Mark read, written;
  };
  at::Tensor tensor_of(const Entry& entry, const step::View& view) const;
  comm::Group& group(int axis) const { return *setup_.axes[static_cast<std::size_t>(axis)]; }
  comm::Group& peer_readable() const;
  const Entry& find(int buffer) const;
  Entry make(const step::Allocation& allocation) const;

  Setup setup_;
  mutable std::mutex mutex_;  // guards the tables; addresses of entries are stable
  std::unordered_map<int, std::unique_ptr<Entry>> entries_;
  std::unordered_map<const void*, int> blocks_;
};

// A rank's memory, shared with blocks that outlive their Engine. The ledger is shared separately, with tensors that it
// counts.
struct EngineMemory {
  EngineMemory(TorchBuffers::Setup setup, bool checksums)
      : buffers(std::move(setup)), memory(buffers, *ledger, checksums) {}
  // The Engine has ended: only blocks that are still referenced remain.
  void close() {
    memory.close();
    buffers.close();
  }
  const std::shared_ptr<step::MemoryLedger> ledger = std::make_shared<step::MemoryLedger>();
  TorchBuffers buffers;
  step::Memory memory;
};

}  // namespace zero::engine
