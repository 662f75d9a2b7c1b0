// Fault injection for I/O, for tests. It is queried before each system call of this layer and may replace the call by a
// result. Always compiled; without a source it costs one null check.
#pragma once
#include <cstdint>
#include <memory>

namespace zero::storage {

// The replacement for one request.
struct Fault {
  int error = 0;              // errno: the request is not sent and fails with it
  std::int64_t at_most = -1;  // >= 0: reports this many bytes; only whole multiples of the alignment are transferred
};

class FaultSource {
 public:
  virtual ~FaultSource() = default;
  // Called for a request that is about to be sent or resent, from any I/O thread. Offsets are file offsets.
  virtual Fault request(bool /*write*/, std::int64_t /*offset*/, std::int64_t /*bytes*/) { return {}; }
  // errno of a submission to the ring; 0: it is made; -1: it accepts no requests.
  virtual int submission() { return 0; }
  // errno of setting up a ring, registering memory, opening an unnamed file, unlinking an opened file, and fallocate.
  // 0: the call is made.
  virtual int ring_setup() { return 0; }
  virtual int registration() { return 0; }
  virtual int open_unnamed() { return 0; }
  virtual int unlink() { return 0; }
  virtual int reserve() { return 0; }
};

// Used by every SwapFile created from now on without its own source; null: none. For tests of higher layers.
void set_faults_of_new_files(std::shared_ptr<FaultSource> faults);

}  // namespace zero::storage
