// Files of torch.save with a dictionary of tensors, as a TensorSource: .pt, .pth, .bin, and several with an index.
#pragma once
#include <memory>
#include <string>

#include "interchange/source.h"

namespace zero::interchange {

// `path`: a file, or an index ("pytorch_model.bin.index.json") next to the files that it names. Tensors have the kind
// "weight"; two names of one view of one storage are a tie. options.key: the dictionary in the file, keys joined by
// '.'. Values that are no tensors become remarks. Throws IoError (kCheckpoint); ConfigError for a key that is not there
// and for names without options.prefix.
std::unique_ptr<TensorSource> open_torch(formats::FsOps& fs, const std::string& path,
                                         const SourceOptions& options = {});

}  // namespace zero::interchange
