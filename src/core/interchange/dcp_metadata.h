// The table of a checkpoint of torch.distributed.checkpoint: the pickle ".metadata", read and never executed.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::interchange {

// A whole archive of torch.save in a file, or a tensor's bytes: DcpMetadata::archives.
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
  bool archives = true;
  std::map<std::string, DcpTensor> tensors;               // by the name in the flattened dictionary
  std::map<std::string, DcpItem> objects;                 // pickled objects
  std::map<std::string, std::vector<std::string>> paths;  // of names, the keys of the nested dictionaries
};

struct TilingFault {
  std::string got, expected;
};
// Whether boxes of the same number of dimensions lie in the tensor and have every element once; nothing: they do.
std::optional<TilingFault> tiling_fault(const std::vector<std::int64_t>& shape, std::vector<formats::Box> boxes);

// Throws IoError (kCheckpoint).
DcpMetadata read_dcp_metadata(const formats::Folder& folder);

}  // namespace zero::interchange
