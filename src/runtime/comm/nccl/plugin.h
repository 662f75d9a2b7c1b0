// The interface between the loader and the plug-in library libzero_nccl.so. No CUDA types.
#pragma once
#include <cstdint>

#include "comm/transport.h"

namespace zero::comm {

// Name and type of the plug-in's only entry point. It returns an owning Transport or throws one of zero's errors. Both
// sides belong to one build, so exceptions and C++ types may cross.
constexpr const char* kNcclFactory = "zero_make_nccl";
using NcclFactory = Transport* (*)(const net::ProcessInfo* identity, std::int64_t timeout_ms);

}  // namespace zero::comm
