// A handle of one asynchronous operation.
#pragma once
#include <zero/export.h>

namespace zero {

class ZERO_API Work {
 public:
  virtual ~Work() = default;
  // Blocks until the operation is complete on this rank: outputs may then be read and inputs overwritten. Throws the
  // operation's error (CommError, IoError), on every call.
  virtual void wait() = 0;
  // Whether wait() would return without blocking.
  virtual bool done() = 0;
};

}  // namespace zero
