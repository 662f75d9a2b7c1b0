// The connections of a Messenger: c10d's process groups over gloo, connected, closed to strangers, and proved. Sends no
// payload.
#pragma once
#include <chrono>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/bootstrap/failure_detector.h"

namespace zero::comm {

// Messages to higher ranks use `up`, those to lower ranks `down`.
struct Mesh {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> up, down;
};

// Connects all ranks; blocking. Afterwards no rank listens any more, and every pair has proved the run's secret over
// each of its connections. CommError: no connection, too few file descriptors, a peer that could not prove it.
Mesh connect_mesh(const net::ProcessInfo& identity, FailureDetector& watch, std::chrono::milliseconds limit);

}  // namespace zero::comm
