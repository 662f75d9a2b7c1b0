// The plug-in library libzero_nccl.so, and the only file that includes NCCL and CUDA. See library.h.
#include <nccl.h>

#include <cstring>

#include "comm/nccl/library.h"

namespace zero::comm::nccl {
namespace {

static_assert(sizeof(Id) == sizeof(ncclUniqueId));
static_assert(kSuccess == ncclSuccess && kInProgress == ncclInProgress);

ncclComm_t of(void* communicator) { return static_cast<ncclComm_t>(communicator); }
cudaStream_t on(void* stream) { return static_cast<cudaStream_t>(stream); }

int start(void** communicator, int size, const Id* id, int rank) {
  ncclUniqueId meeting;
  std::memcpy(&meeting, id, sizeof meeting);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(communicator), size, meeting, rank, &config);
}

int progress(void* communicator) {
  ncclResult_t state = ncclSuccess;
  const auto asked = ncclCommGetAsyncError(of(communicator), &state);
  return asked != ncclSuccess ? asked : state;
}

constexpr Library kLibrary{
    kVersion,
    [](int result) { return ncclGetErrorString(static_cast<ncclResult_t>(result)); },
    [](Id* id) -> int { return ncclGetUniqueId(reinterpret_cast<ncclUniqueId*>(id)); },
    start,
    progress,
    [](void* communicator, const void* in, void* out, std::size_t bytes, void* stream) -> int {
      return ncclAllGather(in, out, bytes, ncclUint8, of(communicator), on(stream));
    },
    [](void* communicator, void* inout, std::size_t bytes, int root, void* stream) -> int {
      return ncclBroadcast(inout, inout, bytes, ncclUint8, root, of(communicator), on(stream));
    },
    [](void* communicator, const void* in, std::size_t bytes, int peer, void* stream) -> int {
      return ncclSend(in, bytes, ncclUint8, peer, of(communicator), on(stream));
    },
    [](void* communicator, void* out, std::size_t bytes, int peer, void* stream) -> int {
      return ncclRecv(out, bytes, ncclUint8, peer, of(communicator), on(stream));
    },
    []() -> int { return ncclGroupStart(); },
    []() -> int { return ncclGroupEnd(); },
    [](void* communicator) -> int { return ncclCommFinalize(of(communicator)); },
    [](void* communicator) -> int { return ncclCommDestroy(of(communicator)); },
    [](void* communicator) -> int { return ncclCommAbort(of(communicator)); },
};

}  // namespace
}  // namespace zero::comm::nccl

extern "C" __attribute__((visibility("default"))) const zero::comm::nccl::Library* zero_nccl_library() {
  return &zero::comm::nccl::kLibrary;
}
