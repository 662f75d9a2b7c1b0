// Safetensors files that the ranks of torch.distributed.checkpoint's HuggingFaceStorageWriter wrote side by side
// (save_distributed=True, without consolidation): each holds boxes of tensors, and says where in the tensor each
// begins.
#pragma once
#include <string>

#include "formats/files.h"
#include "interchange/dcp_metadata.h"

namespace zero::interchange {

// "shard-00001-model-00001-of-00002.safetensors"
bool is_dcp_shard(const std::string& name);
bool has_dcp_shards(const formats::Folder& folder);

// The table of such a directory, from the headers of its files. A tensor's size is not stored: it is what its boxes
// reach, and they must have every element once. Throws IoError (kCheckpoint).
DcpMetadata read_dcp_shards(const formats::Folder& folder);

}  // namespace zero::interchange
