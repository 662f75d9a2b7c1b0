// A checkpoint of libzero as a TensorSource: masters, optimizer states, frozen parameters and buffers, put together
// from the files of all ranks.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "formats/manifest.h"
#include "interchange/source.h"

namespace zero::interchange {

// `path`: a directory of checkpoints, of which options.tag or the newest complete one is taken, or one checkpoint.
// Buffers that differed between ranks are those of rank 0, with a remark. Throws IoError (kCheckpoint).
std::unique_ptr<TensorSource> open_native(formats::FsOps& fs, const std::string& path,
                                          const SourceOptions& options = {});

// The effective options of the run that saved it; empty for another source.
std::map<std::string, std::string> native_config(const TensorSource& source);

SourceProgress progress_of(const formats::Manifest& manifest);

}  // namespace zero::interchange
