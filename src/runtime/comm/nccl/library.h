// NCCL as one table of C functions, without its types and CUDA's. The plug-in library libzero_nccl.so fills it; it is
// opened at the first use, so that libzero runs without NCCL.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "net/process_info.h"

namespace zero::comm::nccl {

// ncclUniqueId: rank 0 creates it, and the ranks of a communicator meet by it.
struct Id {
  char bytes[128];
};

// ncclResult_t; every other value is an error.
inline constexpr int kSuccess = 0, kInProgress = 7;

// A communicator is an opaque pointer, a stream a cudaStream_t; memory is in the GPU that was current at start().
// Results are ncclResult_t. start(), the operations and group_end() may return kInProgress, and progress() then says
// how it ended: the communicator is non-blocking, because otherwise a peer that dies would block this rank forever.
// Operations are enqueued on the stream. Not thread-safe for one communicator.
struct Library {
  std::uint32_t version;
  const char* (*error_text)(int result);
  int (*create_id)(Id* id);
  int (*start)(void** communicator, int size, const Id* id, int rank);
  // The state of the last call, or an error of the network (ncclCommGetAsyncError).
  int (*progress)(void* communicator);
  int (*all_gather)(void* communicator, const void* in, void* out, std::size_t bytes_in, void* stream);
  int (*broadcast)(void* communicator, void* inout, std::size_t bytes, int root, void* stream);
  int (*send)(void* communicator, const void* in, std::size_t bytes, int peer, void* stream);
  int (*receive)(void* communicator, void* out, std::size_t bytes, int peer, void* stream);
  // Sends and receives between them run together.
  int (*group_begin)();
  int (*group_end)();
  int (*finalize)(void* communicator);
  int (*destroy)(void* communicator);
  // Ends the communicator, also its operations that wait for a peer; their outputs are then undefined.
  int (*abort)(void* communicator);
};

// Both sides belong to one build; a table of another version is rejected.
inline constexpr std::uint32_t kVersion = 1;
inline constexpr const char* kPlugin = "libzero_nccl.so";
inline constexpr const char* kEntry = "zero_nccl_library";
using Entry = const Library* (*)();

// The plug-in's table, after checks that this host has a GPU for each of its ranks. ConfigError with the reason.
const Library& library(const net::ProcessInfo& identity);

// For tests without GPUs: from now on library() returns this table and checks nothing.
void serve_by(const Library* table);

}  // namespace zero::comm::nccl
