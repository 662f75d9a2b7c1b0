// Any source of tensors as a checkpoint of libzero, which then loads on any number of ranks.
#pragma once
#include <string>

#include <zero/checkpoint_tools.h>

#include "interchange/source.h"

namespace zero::interchange {

// Writes ROOT/TAG with one rank's file, part by part, and commits it as a save does. `label`: of the source, for
// messages. checkpoint_tools.h says what becomes of each tensor.
CheckpointImported import_checkpoint(formats::FsOps& fs, TensorSource& source, const std::string& label,
                                     const std::string& root, const std::string& tag, const CheckpointImport& options);

}  // namespace zero::interchange
