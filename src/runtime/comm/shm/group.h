// Coordination of the ranks of one group without messages. A Group waits on the peers' pages (page.h) and turns death,
// departure, delay and mismatched calls into errors that name the rank. It moves no payload and does not know tensors.
#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective_call.h"
#include "comm/shm/host.h"

namespace zero::comm::shm {

class Group {
 public:
  // members[r]: the host's number of rank r, whose page is at places[r]. While waiting, the host's abort_check is
  // called repeatedly; a CommError of it becomes the failure.
  Group(const net::ProcessInfo& identity, std::shared_ptr<Host> host, std::vector<int> members,
        const std::vector<PagePlace>& places);

  Page& page(int rank) const { return *pages_[static_cast<std::size_t>(rank)]; }
  Page& mine() const { return page(identity_.rank); }
  const std::byte* base(int rank) const { return host_->base(members_[static_cast<std::size_t>(rank)]); }
  const std::vector<int>& members() const { return members_; }
  // The counter that tells the peers when this rank has left, and the peers' counters.
  const Epoch& left() const { return left_[static_cast<std::size_t>(identity_.rank)]; }
  const Readers& peers() const { return peers_; }
  const Announcement& announcement(int rank, std::uint64_t sequence) const { return page(rank).ring[sequence % kRing]; }

  // Blocks until `ready(peer)` holds for every peer; it may only read the peer's page. `at` is this rank's operation.
  // CommError: the host's failure, a peer that died or left, or, after the timeout, the ranks that are late. The error
  // is recorded for all ranks. Meanwhile this rank's operations of other groups advance, see on_wait().
  void await(const std::function<bool(int peer)>& ready, const Announcement& at);
  // Whether that holds, without blocking. A failure, or a peer that died or left, is a CommError as in await(); being
  // late is not.
  bool poll(const std::function<bool(int peer)>& ready, const Announcement& at);
  // See Transport::on_wait().
  void on_wait(std::function<bool()> advance_others) { advance_others_ = std::move(advance_others); }
  // Timeout of all later waits, including those of symmetric buffers.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Wakes the ranks that wait for this one.
  void ring() { host_->ring(); }
  // Throws the host's failure, if there is one.
  void check_failure(const Announcement& at);
  // As Host::fail(), then throws the recorded failure.
  [[noreturn]] void fail_and_throw(const Announcement& at, std::string_view text, std::string_view hint, int rank);
  // Called by both ranks when their operations differ.
  [[noreturn]] void fail_for_other_call(const Announcement& at, int peer);

 private:
  void look_around(const std::function<bool(int)>& ready, const Announcement& at);
  void fail_if_late(const std::function<bool(int)>& ready, const Announcement& at, std::chrono::milliseconds timeout);
  struct Known {
    std::string text, hint;
    int rank = -1;
  };
  [[noreturn]] void throw_failure(const Announcement& at, const Known& failure) const;
  int on_host(int rank) const { return members_[static_cast<std::size_t>(rank)]; }
  std::string who(int peer) const;  // "rank 2 (pid 123)"
  std::string expected(const Announcement& at) const;

  const net::ProcessInfo identity_;
  const std::shared_ptr<Host> host_;
  const std::vector<int> members_;
  std::vector<Page*> pages_;
  std::vector<Epoch> left_;
  Readers peers_;
  std::function<bool()> advance_others_;
  std::atomic<std::chrono::milliseconds> timeout_{std::chrono::minutes(30)};
  std::chrono::steady_clock::time_point next_look_{};  // of poll()
};

}  // namespace zero::comm::shm
