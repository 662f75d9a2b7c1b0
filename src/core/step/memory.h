// The buffers of a rank: what one counts as, when it is used again, when it goes. Every byte is booked in the ledger
// before the backend allocates it, so an engine and a forecast of it agree, and a booking that a budget refuses changes
// nothing. What lies in a buffer is not known here. Safe for several threads.
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
  // `checksums`: files have some, in host memory. Both outlive this.
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
    std::int64_t bytes;  // of files and I/O buffers whole blocks
  };

  // A buffer that stays until it is given back, or the end.
  View rest(const Request& request, std::int64_t numel, Dtype dtype);
  // Host memory that a shard is read into.
  View take_io(std::int64_t numel, Dtype dtype);
  // Of either: `view` becomes none; nothing if it is.
  void give(View& view);
  // Of all of them that are not empty, in the order in which they were made.
  std::vector<Resting> resting() const;

  // Device memory that comes and goes every step: the smallest idle buffer that is large enough; else one that is too
  // small is freed before another is made.
  enum Pool { kUnshard, kReduce };
  View take(Pool pool, std::int64_t numel, Dtype dtype);
  void put(Pool pool, View& view);  // `view` becomes none

  // Memory that peers read, in blocks. While they are open, whoever allocates tensors makes those of a served size in
  // blocks.
  void serve_blocks(Purpose purpose);
  void serve(std::int64_t bytes);
  void open_blocks(bool open);
  bool serves(std::int64_t bytes) const;
  int take_block(std::int64_t bytes);  // of any size, open or not
  void give_block(int buffer);
  // A number for memory that somebody else made.
  int register_foreign() { return ++last_; }

  // Frees pooled buffers and blocks that are idle.
  void trim();
  // Frees everything but blocks that somebody still has. Only give_block() may follow.
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

  mutable std::mutex mutex_;  // around all that is below
  std::map<int, Resting> resting_;
  std::vector<Pooled> pools_[2];
  Purpose block_purpose_ = Purpose::ReduceBuffers;
  bool open_ = false;
  std::set<std::int64_t> served_;
  std::map<std::int64_t, std::vector<int>> idle_blocks_;  // by size
  std::unordered_map<int, std::int64_t> block_bytes_;
};

}  // namespace zero::step
