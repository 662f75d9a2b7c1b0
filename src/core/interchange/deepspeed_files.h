// Names of the files in a checkpoint of DeepSpeed: which rank's, of what.
#pragma once
#include <string>
#include <vector>

#include "formats/files.h"

namespace zero::interchange {

struct DeepSpeedFiles {
  std::vector<std::string> model;  // by rank: one file up to stage 2, one a rank at stage 3
  std::vector<std::string> optim;  // by rank; empty: stage 0, or a universal checkpoint
  bool universal = false;          // has zero/<parameter>/fp32.pt
};

// Of the directory of one tag. Throws IoError (kCheckpoint) for files of pipelines, tensor parallelism and experts, and
// for ranks that are missing.
DeepSpeedFiles deepspeed_files(const formats::Folder& tag);
// Whether the directory of one tag looks like DeepSpeed's.
bool is_deepspeed_tag(const formats::Folder& folder);

}  // namespace zero::interchange
