// Reads ranges of tensors from the files of one checkpoint, each byte once and in the order of the files: ranges are
// collected first, joined to windows of at most kMostWindowBytes, and every block (format 1: part) is compared with its
// hash before any of its bytes is used. One window is read while another is used.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/blocks.h"
#include "formats/files.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "formats/slices.h"

namespace zero::formats {

class RangeReader {
 public:
  static constexpr std::uint64_t kMostWindowBytes = std::uint64_t{16} << 20;

  // verify: false: bytes are taken as they are.
  RangeReader(const Folder& folder, const Manifest& manifest, bool verify = true)
      : folder_(folder), manifest_(manifest), verify_(verify), rows_(folder, manifest), known_(manifest.files.size()) {}

  // Collects the runs (by their place in the tensor's own order) for the next read(). `id`: of the caller, passed to
  // take.
  void add(std::size_t id, const Tensor& tensor, const std::vector<Run>& runs);
  // Reads what was collected and forgets it. once: nothing of it will be read again, so it need not pass through the
  // page cache, which would cost a copy. take(id, run, bytes): elements that follow each other in the caller's order
  // and in a part; bytes: of the first element, valid during the call. Throws IoError (kCheckpoint) with file, offset
  // and both hashes.
  using Take = std::function<void(std::size_t id, const Run& run, const char* bytes)>;
  void read(const Take& take, bool once = false);
  // Checks that no file was replaced since it was opened.
  void finish() const;

 private:
  struct Entry {
    std::uint32_t file, id;
    std::uint64_t offset;  // of the first byte in the file
    std::int64_t wanted, stored, numel;
    const Tensor* tensor;
    const Part* part;
  };
  struct Window {
    std::uint32_t file = 0;
    std::uint64_t begin = 0, end = 0;  // bytes of the file
    std::size_t first = 0, last = 0;   // entries that have bytes in it
  };
  struct Known {
    std::optional<File> file;  // open
    FileInfo info;
    std::map<std::string, TensorEntry> keys;  // format 1
    std::uint64_t data_begin = 0;
    bool seen = false;
  };
  struct Loaded {
    AlignedMemory bytes;
    std::uint64_t capacity = 0;
    std::string rows;
  };
  Known& open(std::uint32_t file);
  void close_some(std::uint32_t file);
  std::uint64_t offset_of(const Tensor& tensor, const Part& part);
  std::vector<Window> windows();
  void load(const Window& window, Loaded& to, bool once);
  void check(const Window& window, const Loaded& loaded);
  void use(const Window& window, const Loaded& loaded, const Take& take);

  const Folder& folder_;
  const Manifest& manifest_;
  const bool verify_;
  BlockRows rows_;
  std::vector<Known> known_;  // by file
  int open_ = 0;
  std::vector<Entry> entries_;
};

// Checks that a file's header has the tensors of the manifest at their places, and no others. Throws IoError
// (kCheckpoint).
void require_same_header(const Folder& folder, const Manifest& manifest, std::uint32_t file);

}  // namespace zero::formats
