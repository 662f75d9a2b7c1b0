// Determines which rank blocks an operation, from the progress that ranks report to the FailureDetector. For transports
// whose data connections only show that nothing arrives. Does not wait for data.
#pragma once
#include <chrono>

#include "comm/bootstrap/failure_detector.h"
#include "comm/collective_call.h"

namespace zero::comm {

// An operation from this rank's view.
struct Waiting {
  const Call& call;
  std::uint64_t sequence;
  int rank, size;
  std::chrono::milliseconds timeout;
  const std::vector<int>* group = nullptr;  // ranks of the run that take part; null: all
};

// After a timeout: names a rank that does not answer, else one that is behind, else one that made another call, else
// `suspect`, and tells all ranks. A failure that is already known takes precedence.
PeerFailure attribute_timeout(FailureDetector& watch, const Waiting& waiting, int suspect);
// After the data connection to `suspect` (-1: unknown) failed with `error`: names the rank that died if the
// FailureDetector knows of one, else `suspect`, and tells all ranks.
PeerFailure attribute_disconnect(FailureDetector& watch, const Waiting& waiting, int suspect, const std::string& error);

}  // namespace zero::comm
