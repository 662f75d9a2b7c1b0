// How the ranks of one run find each other, for the transports that stand on c10d or NCCL: the
// FailureDetector of the run at the right place, and its keys in the form c10d wants. No data moves here.
#pragma once
#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/bootstrap/failure_detector.h"

namespace zero::comm {

// Meets at
//   a unix socket in a private directory                if all ranks are on one host,
//   a port that the agent's TCPStore tells              under torchrun, whose agent holds MASTER_PORT,
//   MASTER_ADDR:MASTER_PORT, where rank 0 listens       else.
// Throws CommError naming who is missing when `timeout` is over, ConfigError when several hosts
// have no address to meet at. Blocking; every rank of the run calls it equally often.
std::unique_ptr<FailureDetector> rendezvous(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);

// The keys of `watch`, which must outlive it, as a c10d store. `get` and `wait` end with a
// CommError's text when a rank fails.
c10::intrusive_ptr<c10d::Store> store_of(FailureDetector& watch, std::chrono::milliseconds timeout);

// The first line of a c10 error: the rest is a backtrace.
std::string first_line(const std::exception& error);

}  // namespace zero::comm
