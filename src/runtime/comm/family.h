// The communicators of this rank that were split from one, and that one: they share their end. A failure in any of them
// ends the first, which all ranks of the run have, and so the waits of every other one on every rank. Which operation
// failed, and how, is not known here.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace zero::comm {

class Family {
 public:
  // The first one to join is the run's.
  void join(Transport& transport);
  void leave(Transport& transport);

  // Ends all if there are several, and so the same groups of the peers. From any thread.
  void stop(const PeerFailure& cause) noexcept;
  // What has ended the run's transport.
  std::optional<PeerFailure> failure() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Transport*> transports_;
};

}  // namespace zero::comm
