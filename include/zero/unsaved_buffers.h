// Buffers that are no part of a model's state dict.
#pragma once
#include <string>

#include <zero/export.h>

namespace zero {

// Of a module with buffers as Python's register_buffer(persistent=False) makes them: masks and tables that the program
// computes again. An Engine broadcasts them as it does others. Exports and imports of weights do not have them. A
// checkpoint has each rank's own, for a resume; where it has none of that shape and type, they stay as they are.
struct ZERO_API UnsavedBuffers {
  virtual ~UnsavedBuffers() = default;
  // name: of a buffer of this module itself. The same answer on every rank.
  virtual bool is_unsaved(const std::string& name) const = 0;
};

}  // namespace zero
