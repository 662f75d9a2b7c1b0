// Weights for other libraries among the files of a checkpoint: safetensors as Hugging Face writes them, of all trained
// and frozen parameters and buffers, in the dtypes that forward reads. They repeat what the checkpoint holds.
#pragma once
#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::formats {

// Checks that the exported files, if there are any, hold every parameter and buffer once, in the manifest's shape and
// the dtype of its recipe and of libzero.keep_fp32, and that the index says which is where. The caller compares their
// hashes. Throws IoError (kCheckpoint).
void require_exported(const Folder& folder, const Manifest& manifest);

}  // namespace zero::formats
