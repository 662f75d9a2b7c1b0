// Sends the queue's requests: through a ring (io_ring.h) or with threads and system calls (io_threads.h).
#pragma once
#include <cstdint>
#include <string>

namespace zero::storage {

class IoPath {
 public:
  // Blocks until every accepted request has ended. The queue is closed before.
  virtual ~IoPath() = default;
  // A transfer was added to the queue.
  virtual void wake() = 0;
  virtual bool add_memory(void* data, std::int64_t bytes) = 0;
  // "io_uring" or similar, and a description of the memory.
  virtual std::string name() const = 0;
  virtual std::string memory_name() const = 0;
};

}  // namespace zero::storage
