// One rank's file of a checkpoint: written with hashes in one pass over the memory, read back part
// by part with every hash looked at. Knows memory and the format, not models and not other ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"

namespace zero::formats {

// A run of elements of one tensor.
struct Source {
  std::string kind, name, dtype;
  std::vector<std::int64_t> shape;  // of the whole tensor
  bool requires_grad = false;
  std::int64_t start = 0, numel = 0;  // of the run
  // Elements [at, at + numel) of the run, for as long as the pointer lives. Called once for each part of the file.
  std::function<std::shared_ptr<const void>(std::int64_t at, std::int64_t numel)> read;
  // fp32 state whose Inf or NaN must not reach a disk: an InternalError (kNumerical).
  bool must_be_finite = false;
};

struct RankFile {
  Manifest::FileEntry file;
  std::vector<Tensor> tensors;  // one a source with elements, in the sources' order; its own parts only
};

// Creates `name`, takes the room first, writes data then header, syncs and closes.
RankFile write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources);

// Reads parts out of the files of one checkpoint. Keeps few of them open, however many ranks wrote it.
class PartReader {
 public:
  PartReader(const Folder& folder, const Manifest& manifest) : folder_(folder), manifest_(manifest) {}
  // The part's bytes, whose hash was right; valid until the next call. Throws IoError (kCheckpoint)
  // naming file, key, offset, wanted and got.
  const char* read(const Tensor& tensor, const Part& part);
  // Every file read from is still the one that was opened.
  void finish() const;

 private:
  struct Known {
    std::optional<File> file;  // open
    std::uint64_t bytes;
    FileInfo info;
    std::map<std::string, TensorEntry> entries;
    std::uint64_t data_begin;
  };
  Known& open(const std::string& name);

  const Folder& folder_;
  const Manifest& manifest_;
  std::map<std::string, Known> files_;
  int open_ = 0;
  std::vector<char> buffer_;
};

}  // namespace zero::formats
