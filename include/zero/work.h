// A handle of one asynchronous operation.
#pragma once
#include <zero/export.h>

namespace zero {

class ZERO_API Work {
 public:
  virtual ~Work() = default;
  // Returns when the operation is complete for this rank: outputs may be read, inputs
  // overwritten. Throws the operation's error (CommError, IoError), every time it is called.
  virtual void wait() = 0;
  // True when wait() would not block.
  virtual bool done() = 0;
};

}  // namespace zero
