// The communicators of this rank that were split from one, and that one. They fail together: a failure in any of them
// ends the first, which all ranks of the run share, and so ends the waits of all others on every rank.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <zero/communicator.h>

#include "comm/transport.h"

namespace zero::comm {

class Family : public std::enable_shared_from_this<Family> {
 public:
  // The first to join is the communicator of the run.
  void join(Transport& transport);
  // Not from within advance().
  void leave(Transport& transport);

  // Calls and bytes of the groups that have a name, which the communicator of the run counts as well. Thread-safe.
  void count(const std::string& op, std::uint64_t bytes);
  void count_control(std::uint64_t bytes);
  void add_named_groups(CommStats& stats) const;
  void forget_named_groups();
  // As Transport::bytes_across_hosts(), of those groups, including ended ones.
  std::uint64_t named_bytes_across_hosts() const;

  // Ends all transports if there are several, and thereby the peers' groups. Thread-safe.
  void stop(const PeerFailure& cause) noexcept;
  // Transport::advance() of all groups. For their waits, see Transport::on_wait().
  bool advance();
  // The failure that ended the run's transport.
  std::optional<PeerFailure> failure() const;

 private:
  std::mutex advancing_;  // locked before mutex_; guards changes of transports_ as well
  mutable std::mutex mutex_;
  std::vector<Transport*> transports_;
  CommStats named_;
  std::uint64_t across_of_ended_ = 0;
};

}  // namespace zero::comm
