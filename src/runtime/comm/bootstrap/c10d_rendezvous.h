// Rendezvous of the ranks of a run, for transports based on c10d or NCCL: creates the FailureDetector and wraps its
// keys as a c10d store. Moves no data.
#pragma once
#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/bootstrap/failure_detector.h"

namespace zero::comm {

// Connects the ranks at
//   an abstract unix socket                             if all ranks are on one host,
//   a port published in the agent's TCPStore            under torchrun, whose agent uses MASTER_PORT,
//   MASTER_ADDR:MASTER_PORT, where rank 0 listens       otherwise.
// Throws CommError that names missing ranks after `timeout`, ConfigError if several hosts have no address to use.
// Blocking; every rank of the run calls it equally often.
std::unique_ptr<FailureDetector> rendezvous(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);

// The keys of `watch`, which must outlive the store, as a c10d store. If a rank fails, `get` and `wait` throw with the
// text of the CommError.
c10::intrusive_ptr<c10d::Store> store_of(FailureDetector& watch, std::chrono::milliseconds timeout);

// The first line of a c10 error, without its backtrace.
std::string first_line(const std::exception& error);

}  // namespace zero::comm
