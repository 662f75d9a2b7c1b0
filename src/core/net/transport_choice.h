// Which transport joins the ranks, and how long it may wait: what ZERO_TRANSPORT and ZERO_TIMEOUT_S
// say, and what follows from hosts and GPUs without them. No torch, nothing is connected here.
#pragma once
#include <chrono>
#include <functional>
#include <string>

#include "net/process_info.h"

namespace zero::net {

struct TransportChoice {
  std::string name;    // "local", "shm", "gloo", "nccl"
  bool asked = false;  // by ZERO_TRANSPORT, so another one will not do
};

// A world of one is "local". By itself ("auto"): nccl where this host has a GPU for each of its
// ranks, shm where all ranks share the host, else gloo. `gpus` counts this host's GPUs and is asked
// only if it matters. Throws ConfigError for an unknown name and for shm across hosts.
TransportChoice choose_transport(const ProcessInfo& identity, const Environment& environment,
                                 const std::function<int()>& gpus);

// As choose_transport, GPUs aside: the one to take when nccl cannot be had and was not asked for.
std::string transport_without_gpus(const ProcessInfo& identity);

// ZERO_TIMEOUT_S, 30 minutes without it. Throws ConfigError.
std::chrono::milliseconds choose_timeout(const Environment& environment);

// Bytes. A smaller shard is cheaper to copy than to map into every rank of a host.
inline constexpr std::size_t kLeastMappedBytes = 4 << 10;

// GPUs that the CUDA driver lets this process see; 0 without a driver. Opens no context.
int visible_gpus();

}  // namespace zero::net
