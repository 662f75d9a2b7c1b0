// Checkpoints of torch.distributed.checkpoint (torch 2.11) as a TensorSource: FSDP1, FSDP2 and DDP, any number of
// ranks; also the safetensors files of its HuggingFaceStorageWriter (dcp_shards.h).
#pragma once
#include <memory>
#include <string>

#include "interchange/source.h"

namespace zero::interchange {

// `path`: the directory with ".metadata", or with the files of all ranks. Parameters that the optimizer's states name
// are "master", their states "opt.NAME", all other tensors "weight". Without options.prefix the dictionary that holds
// the model is recognised
// ("model" and "module"). Tables are read when it is opened, and the small items that hold names of parameters and step
// counts; tensors when they are asked for. Throws IoError (kCheckpoint), also for compressed items.
std::unique_ptr<TensorSource> open_dcp(formats::FsOps& fs, const std::string& path, const SourceOptions& options = {});

inline constexpr const char* kDcpMetadata = ".metadata";

}  // namespace zero::interchange
