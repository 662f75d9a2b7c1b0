// The buffers of the step program as what they are: tensors, memory for transfers, regions of files. Safe for several
// threads.
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
    std::shared_ptr<comm::Group> comm, node;  // node: who keep secondary shards, or null
    at::Device device = at::kCPU;
    bool pin_states = false;                              // optimizer states in host memory
    std::shared_ptr<ShardFile> params_file, states_file;  // null: nothing rests in them
  };
  explicit TorchBuffers(Setup setup) : setup_(std::move(setup)) {}

  void allocate(int buffer, const step::Allocation& allocation) override;
  void free(int buffer) override;
  // After all regions have been reserved: the files are made, with room for them. IoError.
  void make_files();
  const Setup& setup() const { return setup_; }

  // `tensor`, which somebody else made, is known by a number of Memory::register_foreign() until drop().
  void adopt(int buffer, at::Tensor tensor);
  // False: the number is not of such a tensor.
  bool drop(int buffer);
  // All of them, the files and the ranks are let go. Only free() may follow.
  void close();

  // Flat, of the view's dtype; shares memory with the buffer.
  at::Tensor tensor(const step::View& view) const;
  // As it was adopted, or flat.
  at::Tensor shaped(const step::View& view) const;
  Stretch stretch(const step::View& view) const;
  void* data(const step::View& view) const { return stretch(view).data; }
  bool is_pinned(int buffer) const { return find(buffer).pinned; }
  bool is_file(int buffer) const { return find(buffer).region.has_value(); }
  FileRegion& region(int buffer) const { return *find(buffer).region; }
  comm::SymmetricBuffer& symmetric(int buffer) const { return *find(buffer).symmetric; }
  // A block with this address; 0: none.
  int block_at(const void* data) const;

  // A copy from pinned host memory to the device has been put on the current stream.
  void mark_read(int buffer);
  // The host waits for such copies: the buffer may be written.
  void wait_read(int buffer) const;

 private:
  struct Entry {
    at::Tensor memory;  // flat, kByte; of symmetric memory this rank's shard; as it came if it was adopted
    bool adopted = false, pinned = false;
    std::shared_ptr<comm::SymmetricBuffer> symmetric;
    std::int64_t own_begin = 0;                   // of symmetric memory: byte of the whole
    std::shared_ptr<ShardFile> io_file;           // of memory for transfers
    mutable std::optional<storage::IoBuffer> io;  // made when the file has been
    std::int64_t io_bytes = 0;
    mutable std::optional<FileRegion> region;
    gpu::Mark read;
  };
  const Entry& find(int buffer) const;
  Entry make(const step::Allocation& allocation) const;

  Setup setup_;
  mutable std::mutex mutex_;  // around the tables; entries stay where they are
  std::unordered_map<int, std::unique_ptr<Entry>> entries_;
  std::unordered_map<const void*, int> blocks_;
};

// A rank's memory: shared with blocks that outlive their Engine. The ledger has its own owners, tensors that it counts.
struct EngineMemory {
  EngineMemory(TorchBuffers::Setup setup, bool checksums)
      : buffers(std::move(setup)), memory(buffers, *ledger, checksums) {}
  // The Engine has ended: only blocks that somebody still has are left.
  void close() {
    memory.close();
    buffers.close();
  }
  const std::shared_ptr<step::MemoryLedger> ledger = std::make_shared<step::MemoryLedger>();
  TorchBuffers buffers;
  step::Memory memory;
};

}  // namespace zero::engine
