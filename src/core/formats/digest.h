// The digest of what a checkpoint holds of a model: states, frozen parameters and shared buffers. It does not depend on
// the ranks, degrees of parallelism, stage and files that they were saved with. Private state of ranks is no part of
// it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::formats {

// The sum over elements of numbers that mix the tensor's kind and name, the element's row-major index and its bits:
// addition has no order, so ranges and ranks are added as they come.
class Digest {
 public:
  // Elements of the tensor `name` ("master/layer.weight"), which follow each other from `index` on. width: bytes of
  // one.
  void add(std::string_view name, std::int64_t index, const char* data, std::int64_t numel, int width);
  void add(std::string_view hex);  // another digest's, of other elements
  std::string hex() const;         // 32 digits

 private:
  std::uint64_t low_ = 0, high_ = 0;
};

// Reads all parts, with their hashes. Throws IoError (kCheckpoint).
std::string digest_of(const Folder& checkpoint, const Manifest& manifest);

}  // namespace zero::formats
