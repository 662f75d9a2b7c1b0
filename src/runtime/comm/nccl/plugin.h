// What the loader and the plug-in library libzero_nccl.so agree on. No CUDA types here.
#pragma once
#include <cstdint>

#include "comm/transport.h"

namespace zero::comm {

// Name and type of the plug-in's one entry: an owning Transport, or one of zero's errors. Both
// sides come from one build, so exceptions and C++ types may cross.
constexpr const char* kNcclFactory = "zero_make_nccl";
using NcclFactory = Transport* (*)(const net::ProcessInfo* identity, std::int64_t timeout_ms);

}  // namespace zero::comm
