// What lies between a caller's transfers and the I/O threads: transfers are cut into requests, reads
// and writes take turns, and every result of every request is judged in one place, whoever sent it.
// Sending is io_ring.h's and io_threads.h's.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include <zero/work.h>

#include "storage/fault_source.h"
#include "storage/swap_file.h"
#include "storage/swap_space.h"

namespace zero::storage {

// One begin_read or begin_write.
class Transfer final : public Work {
 public:
  Transfer(bool write, std::int64_t offset, char* data, std::int64_t bytes);
  void wait() override;
  bool done() override;
  // Nothing of it is under way any more.
  void finish();

 private:
  friend class RequestQueue;
  const bool write_;
  const std::int64_t offset_, bytes_;
  char* const data_;
  // Of the queue, under its mutex.
  std::int64_t taken_ = 0;
  int under_way_ = 0;
  std::string error_;
  // Of those who wait.
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
};

// A part of a transfer that is sent as one system call or ring entry, and what is left of it.
struct Request {
  std::shared_ptr<Transfer> transfer;
  bool write = false;
  std::int64_t offset = 0;  // in the swap file
  std::int64_t bytes = 0;
  char* data = nullptr;
  Place place;
  std::int64_t moved = 0;   // bytes already read or written
  int tries = 0;            // interrupted or refused in a row
  int stalls = 0;           // results without progress in a row
  bool relocated = false;   // on its way to a second place
  bool undirected = false;  // sent again since the page cache is used
  std::int64_t left() const { return bytes - moved; }
};

class RequestQueue {
 public:
  // `together`: requests of one batch, 0 = no batches. Every request of a batch has ended before
  // the next one's first is given.
  RequestQueue(SwapSpace& space, const IoSettings& settings, int together);

  // Throws IoError after close().
  void add(std::shared_ptr<Transfer> transfer);
  // The next request. False: there is none now.
  bool take(Request& request);
  // Blocks for one. False: closed and empty.
  bool await(Request& request);
  bool closed() const { return closed_.load(); }

  // Ended: the request is over. Again: send what is left(). Pause: the same after pause(). Plainly:
  // the same, but not through the ring.
  enum class Next { Ended, Again, Pause, Plainly };
  // `result`: bytes, or -errno. With `over` (the ring's) a plain call is left as another way, and a
  // transfer that is over is handed back there: its finish(), which wakes who waits, is the caller's.
  Next judge(Request& request, std::int64_t result, std::shared_ptr<Transfer>* over = nullptr);
  // Sleeps: longer, the more often the request was refused in a row.
  static void pause(const Request& request);

  // Transfers that are not yet begun fail; threads that await() come back when all is done.
  void close();
  SwapFile::Stats stats() const;

 private:
  bool take_locked(Request& request);
  bool may_take() const;
  void end(Request& request, const std::string& error, std::shared_ptr<Transfer>* over);
  bool relocate(Request& request, std::string& why_not);
  std::string message(const Request& request, const std::string& got) const;
  SwapSpace& space_;
  const std::int64_t request_bytes_;
  const int together_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::shared_ptr<Transfer>> waiting_[2];  // reads, writes
  bool write_next_ = false;
  std::atomic<bool> closed_{false}, direct_proven_{false};
  int under_way_ = 0, taken_of_batch_ = 0;
  double busy_since_ = 0;
  SwapFile::Stats stats_;
};

// One pread or pwrite for what is left of the request: bytes or -errno. With a `faults` that may fail it.
std::int64_t send_plainly(const Request& request, std::int64_t alignment, FaultSource* faults);

}  // namespace zero::storage
