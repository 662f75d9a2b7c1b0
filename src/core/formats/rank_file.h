// Writes one file of a checkpoint: a rank's states or its frozen parameters. Every byte is copied, hashed and written
// in one pass. Independent of models and of other ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::formats {

// Bytes that a source is asked for at once, at most.
inline constexpr std::int64_t kReadBytes = std::int64_t{4} << 20;

// A range of elements of one tensor.
struct Source {
  std::string kind, name, dtype;
  std::vector<std::int64_t> shape;  // of the whole tensor
  bool requires_grad = false;
  std::int64_t start = 0, numel = 0;  // of the range
  // Elements [at, at + numel) of the range, valid while the pointer lives. Called in ascending order, for
  // kReadBytes at a time; the last call of a part is for the rest.
  std::function<std::shared_ptr<const void>(std::int64_t at, std::int64_t numel)> read;
  // fp32 state that must not be saved with Inf or NaN: InternalError (kNumerical).
  bool must_be_finite = false;
};

struct RankFile {
  Manifest::FileEntry file;
  std::vector<Tensor> tensors;  // one per source, in the order of sources, with its own parts only; their file is 0
  std::string rows;             // hashes of the file's blocks (blocks.h)
};

// Creates `name`, reserves its space, writes data and header, syncs and closes.
RankFile write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources);

// The same for a file that a complete checkpoint in `previous` may have unchanged: it gets another name here, if the
// file system can and its entry there is equal. null: always writes. Reads the sources twice unless it links.
struct Previous {
  const Folder* folder;
  Manifest::FileEntry file;
};
RankFile link_or_write_rank_file(const Folder& folder, const std::string& name, const std::vector<Source>& sources,
                                 const Previous* previous);

}  // namespace zero::formats
