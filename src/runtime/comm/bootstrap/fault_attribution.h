// Which rank keeps an operation from its end, told from what the ranks say of themselves over the
// watch. For transports whose data connections only know that nothing comes. No waiting for data here.
#pragma once
#include <chrono>

#include "comm/bootstrap/failure_detector.h"
#include "comm/collective_call.h"

namespace zero::comm {

// An operation as this rank sees it.
struct Waiting {
  const Call& call;
  std::uint64_t sequence;
  int rank, size;
  std::chrono::milliseconds timeout;
  const std::vector<int>* group = nullptr;  // the run's ranks that take part; null: all
};

// The time limit is over: names a rank that does not answer, else one that is behind, else one
// that made another call, else `suspect`, and tells everybody. A failure already known wins.
PeerFailure attribute_timeout(FailureDetector& watch, const Waiting& waiting, int suspect);
// The data connection to `suspect` (-1: some rank) failed with `error`: names who died if the watch
// hears of it, else `suspect`, and tells everybody.
PeerFailure attribute_disconnect(FailureDetector& watch, const Waiting& waiting, int suspect, const std::string& error);

}  // namespace zero::comm
