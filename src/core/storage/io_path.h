// What sends the queue's requests: a ring (io_ring.h) or threads with plain calls (io_threads.h).
#pragma once
#include <cstdint>
#include <string>

namespace zero::storage {

class IoPath {
 public:
  // Returns when every request that was taken has ended. The queue is closed by then.
  virtual ~IoPath() = default;
  // The queue has got a transfer.
  virtual void wake() = 0;
  virtual bool add_memory(void* data, std::int64_t bytes) = 0;
  // "io_uring" and the like, and what is to be said of the memory.
  virtual std::string name() const = 0;
  virtual std::string memory_name() const = 0;
};

}  // namespace zero::storage
