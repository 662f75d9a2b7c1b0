// One rank's file of a checkpoint: written and hashed in one pass, read part by part with every hash checked.
// Independent of models and of other ranks.
#pragma once
#include <algorithm>
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
#include "formats/slices.h"

namespace zero::formats {

// A range of elements of one tensor.
struct Source {
  std::string kind, name, dtype;
  std::vector<std::int64_t> shape;  // of the whole tensor
  bool requires_grad = false;
  std::int64_t start = 0, numel = 0;  // of the range
  // Elements [at, at + numel) of the range, valid while the pointer lives. Called once per part of the file.
  std::function<std::shared_ptr<const void>(std::int64_t at, std::int64_t numel)> read;
  // fp32 state that must not be saved with Inf or NaN: InternalError (kNumerical).
  bool must_be_finite = false;
};

struct RankFile {
  Manifest::FileEntry file;
  std::vector<Tensor> tensors;  // one per non-empty source, in the order of sources, with its own parts only
};

// Creates `name`, reserves its space, writes data and header, syncs and closes.
RankFile write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources);

// Reads parts of the files of one checkpoint. Keeps only a few files open, for any number of ranks.
class PartReader {
 public:
  PartReader(const Folder& folder, const Manifest& manifest) : folder_(folder), manifest_(manifest) {}
  // Returns the part's bytes after checking their hash; valid until the next call. Throws IoError (kCheckpoint) with
  // file, key, offset, expected and actual hash.
  const char* read(const Tensor& tensor, const Part& part);
  // Reads the parts that have elements of the runs (by their place in the tensor's own order), each once, and calls
  // take(run, bytes) for what a run and a part share. bytes: of the first element.
  template <class Take>
  void visit(const Tensor& tensor, const std::vector<Run>& runs, const Take& take) {
    const auto width = bits_of(tensor.dtype) / 8;
    auto run = runs.begin();  // the first that a later part may have
    for (const auto& part : tensor.parts) {
      const auto end = part.start + part.numel;
      while (run != runs.end() && run->stored + run->numel <= part.start) ++run;
      const char* bytes = nullptr;
      for (auto next = run; next != runs.end() && next->stored < end; ++next) {
        const auto first = std::max(next->stored, part.start), last = std::min(next->stored + next->numel, end);
        if (bytes == nullptr) bytes = read(tensor, part);
        take(Run{next->wanted + (first - next->stored), first, last - first}, bytes + (first - part.start) * width);
      }
    }
  }
  // Checks that no file was replaced since it was opened.
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
