// The buffers of a rank: purpose, reuse and release. Every byte is booked in the ledger before the backend allocates
// it, so an engine and a dry run of it agree, and a booking that a budget refuses has no effect. Does not access the
// contents of buffers. Thread-safe.
#pragma once
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "step/backend.h"
#include "step/memory_ledger.h"

namespace zero::step {

class Memory {
 public:
  // checksums: files have checksums, in host memory. `buffers` and `ledger` must outlive this.
  Memory(BufferOps& buffers, step::MemoryLedger& ledger, bool checksums);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  struct Request {
    Place place = Place::Device;
    Tier tier = Tier::Device;
    Purpose purpose = Purpose::Other;
    Role role = Role::Transfer;
    int group = -1, axis = 0;
  };
  struct Resting {
    Tier tier;
    Purpose purpose;
    Role role;
    int group;
    std::int64_t numel;
    Dtype dtype;
    std::int64_t bytes;  // files and I/O buffers in whole blocks
  };

  // A persistent buffer, until give() or close().
  View rest(const Request& request, std::int64_t numel, Dtype dtype);
  // Host memory to read a shard into.
  View take_io(std::int64_t numel, Dtype dtype);
  // Frees either; `view` becomes none. No effect if it is none.
  void give(View& view);
  // All non-empty persistent buffers, in order of allocation.
  std::vector<Resting> resting() const;

  // Temporary device memory: the smallest idle buffer that is large enough; otherwise a smaller idle one is freed
  // before a new one is allocated.
  enum Pool { kUnshard, kReduce };
  View take(Pool pool, std::int64_t numel, Dtype dtype);
  void put(Pool pool, View& view);  // `view` becomes none

  // Blocks of memory that peers can read. While they are open, tensors of a served size are allocated in blocks.
  void serve_blocks(Purpose purpose);
  void serve(std::int64_t bytes);
  void open_blocks(bool open);
  bool serves(std::int64_t bytes) const;
  int take_block(std::int64_t bytes);  // of any size, open or not
  void give_block(int buffer);
  // A number for memory that was allocated elsewhere.
  int register_foreign() { return ++last_; }

  // Frees idle pooled buffers and blocks.
  void trim();
  // Frees everything except blocks that are still referenced. Only give_block() may follow.
  void close();
  step::MemoryLedger& ledger() { return ledger_; }

 private:
  struct Pooled {
    int id;
    std::int64_t bytes;
    bool in_use;
  };
  template <class Book>
  int make(const Allocation& allocation, const Book& book);
  void book(const Resting& resting, int sign);
  void drop(const Pooled& pooled, Pool pool);
  void drop_block(int buffer, std::int64_t bytes);
  void trim_locked();

  BufferOps& buffers_;
  step::MemoryLedger& ledger_;
  const bool checksums_;
  std::atomic<int> last_ = 0;

  mutable std::mutex mutex_;  // guards the members below
  std::map<int, Resting> resting_;
  std::vector<Pooled> pools_[2];
  Purpose block_purpose_ = Purpose::ReduceBuffers;
  bool open_ = false;
  std::set<std::int64_t> served_;
  std::map<std::int64_t, std::vector<int>> idle_blocks_;  // by size
  std::unordered_map<int, std::int64_t> block_bytes_;
};

}  // namespace zero::step
