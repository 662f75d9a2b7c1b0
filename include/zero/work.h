// A handle of one asynchronous operation.
#pragma once
#include <zero/export.h>

namespace zero {

class ZERO_API Work {
 public:
  virtual ~Work() = default;
  // Blocks until the operation is complete on this rank; for GPU tensors over "nccl" orders the current stream after
  // it, as c10d's Work. Outputs may then be read, inputs overwritten. Throws its error (CommError, IoError), on every
  // call.
  virtual void wait() = 0;
  // Whether wait() would return without blocking.
  virtual bool done() = 0;
};

}  // namespace zero
