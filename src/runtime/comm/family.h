// The communicators of this rank that were split from one, and that one. They fail together: a failure in any of them
// ends the first, which all ranks of the run share, and so ends the waits of all others on every rank.
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
  // The first to join is the communicator of the run.
  void join(Transport& transport);
  void leave(Transport& transport);

  // Ends all transports if there are several, and thereby the peers' groups. Thread-safe.
  void stop(const PeerFailure& cause) noexcept;
  // The failure that ended the run's transport.
  std::optional<PeerFailure> failure() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Transport*> transports_;
};

}  // namespace zero::comm
