// Writes the weights of a source of tensors as files for other libraries, in one process, 4 MiB at a time.
#pragma once
#include <string>

#include <zero/weights.h>

#include "interchange/source.h"

namespace zero::interchange {

// Throws ConfigError if `path` exists or options and names do not fit, IoError if reading or writing fails,
// InternalError (kNumerical) for values that fp16 cannot hold. Nothing is visible under `path` then.
ExportReport export_weights(formats::FsOps& fs, TensorSource& source, const std::string& label, const std::string& path,
                            const ExportOptions& options);

}  // namespace zero::interchange
