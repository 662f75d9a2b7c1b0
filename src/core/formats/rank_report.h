// What a rank tells the rank that writes the manifest: its files, their tensors and the hashes of their blocks. It goes
// through a file in the directory of the checkpoint; a collective would give every rank everyone's.
#pragma once
#include <string>
#include <vector>

#include "formats/blocks.h"
#include "formats/files.h"
#include "formats/manifest.h"
#include "formats/rank_file.h"

namespace zero::formats {

struct RankReport {
  std::vector<Manifest::FileEntry> files;
  std::vector<std::string> rows;  // by file
  // Their parts have the places of files in `files`.
  std::vector<Tensor> shared;  // with other ranks
  std::vector<Tensor> own;

  // The first `num_shared` tensors of the file are shared.
  void add(RankFile&& file, std::size_t num_shared);
  // A file without tensors of the checkpoint.
  void add(HashedFile&& file);
};

// Returns the hash of the report.
std::string write_report(const Folder& folder, int rank, const RankReport& report);
// Reads the report with this hash and removes it.
RankReport take_report(const Folder& folder, int rank, const std::string& hash);

// Adds a rank's files to the manifest, its shared parts to the manifest's tensors, and its own tensors to the list of
// ranks; rows of the blocks of its files to `rows`.
class ManifestMerge {
 public:
  // The manifest has all shared tensors, without parts.
  explicit ManifestMerge(Manifest& manifest);
  void add(RankReport&& report);
  // Sorts parts, removes tensors that are private after all, and writes the file of rows.
  void finish(const Folder& folder);

 private:
  Manifest& manifest_;
  std::map<std::pair<std::string, std::string>, Tensor*> by_name_;
  std::vector<std::pair<std::string, std::string>> private_, rows_;
};

}  // namespace zero::formats
