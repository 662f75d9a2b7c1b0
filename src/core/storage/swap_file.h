// The offload file of one rank, with asynchronous transfers over io_uring or threads. The engine decides what is stored
// and when, and keeps checksums; io_ring.h and io_threads.h send requests. No torch.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <zero/work.h>

namespace zero::storage {

inline constexpr std::int64_t kPage = 4096;  // bytes: memory, files and blocks are multiples of it

class IoBuffers;
class FaultSource;

// DeepSpeed's `aio`.
struct IoSettings {
  std::int64_t block_size = 1 << 20;  // bytes of a request, a multiple of 4096
  int queue_depth = 8;                // requests in flight per I/O thread
  int threads = 1;                    // aio.intra_op_parallelism
  bool single_submit = false;         // one submission call per request
  bool overlap_events = true;         // false: each batch completes before the next is sent
  enum class Path { Probe, Ring, Threads } path = Path::Probe;
};

// Page-aligned host memory for transfers, from its file's pool. Touched when first mapped, and registered with the ring
// if the locked-memory limit permits. It may outlive the file.
class IoBuffer {
 public:
  IoBuffer() = default;
  IoBuffer(std::shared_ptr<IoBuffers> pool, void* data, std::int64_t bytes);
  IoBuffer(IoBuffer&& other) noexcept;
  IoBuffer& operator=(IoBuffer&& other) noexcept;
  ~IoBuffer();  // returns the memory to the pool
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<IoBuffers> pool_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Thread-safe, but two transfers of overlapping ranges must not be in flight together if one of them is a write. Do not
// use in a forked child.
class SwapFile {
 public:
  // Reserves `bytes` in `folder`, in an unnamed file if the file system supports it, and tests one write and one read.
  // `who` ("rank 2/4") is for messages. Throws IoError (folder, needed and free bytes, the system's text) and
  // ConfigError for settings out of range.
  static std::unique_ptr<SwapFile> create(const std::string& folder, std::int64_t bytes, const IoSettings& settings,
                                          const std::string& who, std::shared_ptr<FaultSource> faults = nullptr);
  // Waits for requests that were sent; transfers that have not started fail.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  std::int64_t bytes() const;
  // Offsets, sizes and addresses are multiples of this (STATX_DIOALIGN, else 4096).
  std::int64_t alignment() const;
  // Throws IoError if out of memory.
  IoBuffer buffer(std::int64_t bytes);

  // Start a transfer and return at once. The memory (an IoBuffer or other aligned memory) must live until the Work has
  // been waited for or is done. Destroying the Work does not cancel the transfer. wait() throws IoError: path, offset,
  // needed and free bytes, the system's text.
  std::shared_ptr<Work> begin_read(std::int64_t offset, void* data, std::int64_t bytes);
  std::shared_ptr<Work> begin_write(std::int64_t offset, const void* data, std::int64_t bytes);

  struct Stats {
    std::int64_t bytes_read = 0, bytes_written = 0;
    std::int64_t reads = 0, writes = 0;  // successful requests
    std::int64_t retries = 0;            // requests sent again: short, interrupted, refused, moved to another file
    double seconds_busy = 0;             // with at least one request in flight
  };
  Stats stats() const;

  // "io_uring, O_DIRECT, registered buffers", "8 threads, pread/pwrite, page cache".
  std::string description() const;
  // The file's name for messages: "/mnt/nvme/(unnamed)".
  std::string path() const;

 private:
  struct State;
  explicit SwapFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace zero::storage
