// The queue between callers' transfers and the I/O threads. Divides transfers into requests, alternates reads and
// writes, and handles the result of every request. io_ring.h and io_threads.h send requests.
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
  // Waits until no request of the transfer is in flight.
  void finish();

 private:
  friend class RequestQueue;
  const bool write_;
  const std::int64_t offset_, bytes_;
  char* const data_;
  // Guarded by the queue's mutex.
  std::int64_t taken_ = 0;
  int under_way_ = 0;
  std::string error_;
  // For threads that wait.
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
};

// A part of a transfer that is sent as one system call or ring entry, with its remaining bytes.
struct Request {
  std::shared_ptr<Transfer> transfer;
  bool write = false;
  std::int64_t offset = 0;  // in the swap file
  std::int64_t bytes = 0;
  char* data = nullptr;
  Place place;
  std::int64_t moved = 0;   // bytes already read or written
  int tries = 0;            // consecutive interruptions or refusals
  int stalls = 0;           // consecutive results without progress
  bool relocated = false;   // being moved to a second location
  bool undirected = false;  // resent since the file uses the page cache
  std::int64_t left() const { return bytes - moved; }
};

class RequestQueue {
 public:
  // together: requests per batch, 0 = no batches. All requests of a batch end before the next batch starts.
  RequestQueue(SwapSpace& space, const IoSettings& settings, int together);

  // Throws IoError after close().
  void add(std::shared_ptr<Transfer> transfer);
  // Takes the next request. False: none available.
  bool take(Request& request);
  // Blocks for a request. False: closed and empty.
  bool await(Request& request);
  bool closed() const { return closed_.load(); }

  // Ended: the request is complete. Again: send what is left(). Pause: the same after pause(). Plainly: the same with a
  // system call instead of the ring.
  enum class Next { Ended, Again, Pause, Plainly };
  // result: bytes, or -errno. `over` is set by the ring: plain system calls are then an alternative, and a complete
  // transfer is returned there, whose finish() the caller calls.
  Next judge(Request& request, std::int64_t result, std::shared_ptr<Transfer>* over = nullptr);
  // Sleeps, longer after more consecutive refusals.
  static void pause(const Request& request);

  // Fails transfers that have not started. await() returns in all threads when all requests are complete.
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

// One pread or pwrite of the rest of the request: bytes or -errno. `faults`, if given, may fail it.
std::int64_t send_plainly(const Request& request, std::int64_t alignment, FaultSource* faults);

}  // namespace zero::storage
