// The table of a checkpoint of torch.distributed.checkpoint: the pickle ".metadata", read and never executed.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::interchange {

// A whole archive of torch.save in a file.
struct DcpItem {
  std::string file;
  std::uint64_t begin = 0, bytes = 0;
};
struct DcpTensor {
  std::string dtype;  // "F32"
  std::vector<std::int64_t> shape;
  std::vector<std::pair<formats::Box, DcpItem>> boxes;  // tile the tensor: proved
};
struct DcpMetadata {
  std::map<std::string, DcpTensor> tensors;               // by the name in the flattened dictionary
  std::map<std::string, DcpItem> objects;                 // pickled objects
  std::map<std::string, std::vector<std::string>> paths;  // of names, the keys of the nested dictionaries
};

// Throws IoError (kCheckpoint).
DcpMetadata read_dcp_metadata(const formats::Folder& folder);

}  // namespace zero::interchange
