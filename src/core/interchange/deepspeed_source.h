// Checkpoints of DeepSpeed (0.19.8) as a TensorSource: ZeRO stages 0 to 3 of any number of data-parallel ranks, and
// universal ones. docs/interchange.md has the table of what lies where.
#pragma once
#include <memory>
#include <string>

#include "interchange/source.h"

namespace zero::interchange {

// `path`: the directory that was given to save_checkpoint(), of which options.tag or the one that "latest" or
// "latest_universal" names is taken, or the directory of one tag. Masters, the states of the optimizer, frozen
// parameters and buffers (of rank 0); ties are aliases. Client state and schedules become remarks. Throws IoError
// (kCheckpoint), also for parts of pipelines, tensor parallelism and experts.
std::unique_ptr<TensorSource> open_deepspeed(formats::FsOps& fs, const std::string& path,
                                             const SourceOptions& options = {});

// Whether a directory is one of the two.
bool has_deepspeed(const formats::Folder& folder);

}  // namespace zero::interchange
