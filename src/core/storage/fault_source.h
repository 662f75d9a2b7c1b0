// The seam through which tests make I/O fail: asked before each system call of this layer, it may
// say that the call is not made and how it is to look to the caller. Always compiled; without a
// source it costs one comparison with null.
#pragma once
#include <cstdint>
#include <memory>

namespace zero::storage {

// What happens to one request instead of being sent whole.
struct Fault {
  int error = 0;              // errno: the request is not sent and comes back with it
  std::int64_t at_most = -1;  // >= 0: this many bytes are reported; only whole multiples of the alignment are moved
};

class FaultSource {
 public:
  virtual ~FaultSource() = default;
  // One request that is about to be sent (again), from any I/O thread. Offsets are those in the file.
  virtual Fault request(bool /*write*/, std::int64_t /*offset*/, std::int64_t /*bytes*/) { return {}; }
  // errno with which a submission to the ring fails, 0: it is made, -1: it takes nothing and says so.
  virtual int submission() { return 0; }
  // errno of setting up a ring, of registering memory, of opening a file without a name, of
  // unlinking a file after it was opened, of fallocate. 0: the call is made.
  virtual int ring_setup() { return 0; }
  virtual int registration() { return 0; }
  virtual int open_unnamed() { return 0; }
  virtual int unlink() { return 0; }
  virtual int reserve() { return 0; }
};

// Asked by every SwapFile that is made from now on and was given no source; null: none. For tests of what lies above.
void set_faults_of_new_files(std::shared_ptr<FaultSource> faults);

}  // namespace zero::storage
