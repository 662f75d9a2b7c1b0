// A save that is written while the program trains, as the engine sees it. Implemented in checkpoint/.
#pragma once

namespace zero::engine {

class BackgroundSave {
 public:
  virtual ~BackgroundSave() = default;
  // [collective] Call between steps, before a step changes anything. true: the save is over on all ranks and the object
  // has no more use. Throws IoError on all ranks if it failed on one.
  virtual bool at_boundary() = 0;
  // [collective] Returns when the save of no rank reads a state any more. Call before states change other than by an
  // update. `call` is named in errors.
  virtual void release(const char* call) = 0;
  // [local] The same of this rank's save.
  virtual void release_here() = 0;
};

// The same for a snapshot that this rank keeps in memory.
class KeptSave {
 public:
  virtual ~KeptSave() = default;
  // [local] As BackgroundSave::release().
  virtual void release() = 0;
};

}  // namespace zero::engine
