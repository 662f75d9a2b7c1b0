// Safetensors files as a TensorSource: one file, several with an index, or a directory of either as Hugging Face writes
// it. Tensors have the kind "weight". Reader rules: docs/interchange.md.
#pragma once
#include <memory>
#include <string>

#include "interchange/source.h"

namespace zero::interchange {

// `path`: a safetensors file, a "*.index.json" next to the files that it names, or a directory with "model.safetensors"
// or "model.safetensors.index.json". Ties are the entries of __metadata__ whose value is a tensor and whose key is not.
// Throws IoError (kCheckpoint) for damage, ConfigError for a name without options.prefix.
std::unique_ptr<TensorSource> open_safetensors(formats::FsOps& fs, const std::string& path,
                                               const SourceOptions& options = {});

// Whether a directory has one of the two names.
bool has_safetensors(const formats::Folder& folder);

}  // namespace zero::interchange
