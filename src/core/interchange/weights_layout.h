// The files of exported weights before a byte of them exists: names, fixed bytes, and the place of every tensor, from
// names, dtypes and shapes alone. So ranks write their own ranges into the same files. No file access.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zero::interchange {

struct OutTensor {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t bytes() const;
};

// One file: its size, and the bytes that one process writes: headers and indexes, by offset.
struct OutFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::vector<std::pair<std::uint64_t, std::string>> fixed;
};
OutFile text_file(const std::string& name, const std::string& text);

struct OutPlace {
  std::size_t file = 0;
  std::uint64_t offset = 0;  // of the tensor's first byte
};

struct WeightsLayout {
  std::vector<OutFile> files;
  std::vector<OutPlace> places;  // by tensor
};

// "model.safetensors", or "model-00001-of-0000N.safetensors" of at most shard_bytes of tensors each and their index;
// tensors in order of their names, none divided: one above shard_bytes has a file of its own. Metadata: "format": "pt",
// and `aliases`, name -> name of the tensor that holds the data. `stem` is in place of "model". ConfigError for a name
// that the format cannot hold.
WeightsLayout safetensors_layout(const std::vector<OutTensor>& tensors,
                                 const std::map<std::string, std::string>& aliases, std::int64_t shard_bytes,
                                 const std::string& stem = "model");

}  // namespace zero::interchange
