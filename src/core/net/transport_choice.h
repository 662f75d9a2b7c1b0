// Selects the transport and the timeout, from ZERO_TRANSPORT and ZERO_TIMEOUT_S or else from hosts and GPUs. No torch,
// no connections.
#pragma once
#include <chrono>
#include <functional>
#include <string>

#include "net/process_info.h"

namespace zero::net {

struct TransportChoice {
  std::string name;     // "local", "shm", "gloo", "nccl"
  bool asked = false;   // selected by ZERO_TRANSPORT; no fallback
  bool staged = false;  // moves copies in host memory, so that ranks can share a GPU
};

// World size 1 uses "local". "auto" uses nccl if this host has a GPU for each of its ranks, shm if all ranks share a
// host, else gloo. `gpus` returns this host's number of GPUs and is called only if needed. Throws ConfigError for an
// unknown name and for shm across hosts. ZERO_SHARE_GPU=1: staged, over the transport that would be used without GPUs.
TransportChoice choose_transport(const ProcessInfo& identity, const Environment& environment,
                                 const std::function<int()>& gpus);

// The choice without GPUs, for when nccl is unavailable and was not requested.
std::string transport_without_gpus(const ProcessInfo& identity);

// ZERO_TIMEOUT_S, by default 30 minutes. Throws ConfigError.
std::chrono::milliseconds choose_timeout(const Environment& environment);

// Bytes. Copying a smaller shard is cheaper than mapping it into every rank of a host.
inline constexpr std::size_t kLeastMappedBytes = 4 << 10;

// Number of GPUs that the CUDA driver shows to this process; 0 without a driver. Creates no context.
int visible_gpus();

}  // namespace zero::net
