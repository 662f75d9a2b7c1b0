// See fault_attribution.h.
#include "comm/bootstrap/fault_attribution.h"

#include <algorithm>

#include "base/check.h"

namespace zero::comm {
namespace {

// A report of a death and the break of a data connection arrive independently.
constexpr std::chrono::milliseconds kGrace{3000};
// A separate thread of the peer answers; a peer that does not answer in this time is stopped.
constexpr std::chrono::milliseconds kAnswer{1500};

std::string rank_text(int rank) { return rank < 0 ? "a rank" : base::join("rank ", rank); }

PeerFailure late_one(FailureDetector& watch, const Waiting& w, int suspect) {
  const auto progress = watch.ask_progress(kAnswer);
  const auto text = [&](const std::string& got, const std::string& hint) {
    return at_call(w.call.op,
                   base::join("got ", got, ", expected ", w.call.text(), " within ", duration_text(w.timeout)), w.rank,
                   w.size, w.sequence, hint);
  };
  const auto takes_part = [&](int r) {
    return w.group == nullptr || std::find(w.group->begin(), w.group->end(), r) != w.group->end();
  };
  for (int r = 0; r < w.size; ++r) {
    if (takes_part(r) && !progress[r].answered) {
      return {r, text(base::join("no sign of life of rank ", r), "its process is stopped, or its host is cut off.")};
    }
  }
  if (w.group != nullptr) {  // ranks report only operations of the run
    return {suspect, text(base::join("no data of ", rank_text(suspect)),
                          "that rank has not made this call on its group, or does not wait for it.")};
  }
  // Two ranks whose calls differ block all others, which may be at a different operation.
  for (int r = 0; r < w.size; ++r) {
    for (int s = r + 1; s < w.size; ++s) {
      if (progress[r].begun != progress[s].begun || progress[r].op == progress[s].op) continue;
      const int odd = s == w.rank ? r : s;
      return {odd, text(base::join("another call on rank ", odd, ": ", progress[odd].op, " where rank ",
                                   odd == s ? r : s, " makes ", progress[odd == s ? r : s].op),
                        base::join(kSameCallsHint, "."))};
    }
  }
  int late = w.rank;
  for (int r = 0; r < w.size; ++r) {
    if (progress[r].begun < progress[late].begun) late = r;
  }
  if (progress[late].begun < w.sequence) {
    return {late, text(base::join("rank ", late, " late at operation ", progress[late].begun, ", ", progress[late].op),
                       "look at what that rank does; a longer time limit helps if it is only slow.")};
  }
  return {suspect, text(base::join("no data of ", rank_text(suspect)),
                        "that rank does not wait for its operations, or the network fails.")};
}

}  // namespace

PeerFailure attribute_timeout(FailureDetector& watch, const Waiting& waiting, int suspect) {
  if (auto known = watch.failure()) return *known;
  auto failure = late_one(watch, waiting, suspect);
  if (auto known = watch.failure()) return *known;
  watch.abort(failure.rank, failure.reason);
  return failure;
}

PeerFailure attribute_disconnect(FailureDetector& watch, const Waiting& w, int suspect, const std::string& error) {
  if (auto known = watch.cause(kGrace)) return *known;
  PeerFailure failure{
      suspect, at_call(w.call.op, base::join("got '", error, "' from ", rank_text(suspect), ", expected its data"),
                       w.rank, w.size, w.sequence, "the connection to that rank broke.")};
  watch.abort(failure.rank, failure.reason);
  return failure;
}

}  // namespace zero::comm
