// The index next to the files of a large model, as Hugging Face writes it for safetensors and for files of torch: which
// tensor is in which file.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/files.h"

namespace zero::interchange {

struct WeightIndex {
  std::string path;
  std::map<std::string, std::set<std::string>> by_file;  // plain name of a file -> names of its tensors
  std::string total;                                     // metadata.total_size as written; empty: none
  std::optional<std::uint64_t> total_bytes;              // nothing: none, or no number

  // Throws unless metadata.total_size is that, or is not there.
  void check_total(std::uint64_t data_bytes) const;
};

// Throws IoError (kCheckpoint).
WeightIndex read_weight_index(const formats::Folder& folder, const std::string& name);
// Throws unless a file holds the tensors that the index `index` says, and no others.
void check_claimed(const formats::Folder& folder, const std::string& index, const std::string& file,
                   std::set<std::string> claimed, const std::vector<std::string>& held);

}  // namespace zero::interchange
