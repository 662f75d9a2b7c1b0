// Messages between ranks on any hosts, over c10d's ProcessGroupGloo and TCP: what the collectives of "gloo" and of
// "shm+gloo" are made of. A Messenger joins all ranks of the run; a MessageWork is one collective's messages, which go
// from where the data lie to where they belong. c10d's exceptions end here; FailureDetector knows who failed. Which
// rank sends what to whom is not decided here.
#pragma once
#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/work.h>

#include "comm/bootstrap/failure_detector.h"
#include "comm/collective_call.h"
#include "comm/transport.h"
#include "net/node_topology.h"

namespace zero::comm {

// One collective in flight: messages, then maybe a step that posts more of them. Done when all are through.
class MessageWork : public Work {
 public:
  // Flat tensors of bytes that stay as they are until the work is done. Empty ones are left out on both sides.
  virtual void send(int peer, const at::Tensor& bytes) = 0;
  virtual void receive(int peer, const at::Tensor& bytes) = 0;
  // Runs once the messages so far are through, on the thread that waits.
  virtual void then(std::function<void()> step) = 0;
  // The same for a step that posts a second phase's messages.
  virtual void then_post(std::function<void()> step) = 0;
};

class Messenger {
 public:
  // Connects all ranks; blocks until all have come. CommError naming who is missing when `timeout` is over.
  Messenger(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
  // A group among the ranks of this one, which outlives it: over the same connections, and what fails in one has failed
  // in all. Nothing is sent. ConfigError where too many groups live at once.
  std::unique_ptr<Messenger> split(const Split& split) const;
  // Waits a while for the peers to have received what this rank sent.
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // The next collective. CommError at once if the run has failed.
  std::shared_ptr<MessageWork> begin(Call call);
  std::shared_ptr<MessageWork> begin_exchange();
  void set_timeout(std::chrono::milliseconds timeout);
  // Tells everybody in the run that its `rank` failed.
  void abort(int rank, const std::string& reason) noexcept;
  // Calls `callback` at the first failure beside ending all messages; must not throw. None: null.
  void on_failure(std::function<void(const PeerFailure&)> callback);
  FailureDetector& watch();
  // The groups that this rank is in, a bit each.
  std::uint64_t groups() const;

  // Where the ranks are; empty if they are not numbered host by host.
  const net::NodeTopology& hosts() const;
  // Payload (no exchanges) that this rank has sent to other hosts so far; to any rank if it is not known who is where.
  std::uint64_t bytes_across_hosts() const;

 private:
  struct Lane;
  struct Channel;
  class Operation;
  explicit Messenger(std::shared_ptr<Channel> channel);
  std::shared_ptr<Channel> channel_;
  std::uint64_t sequence_ = 0;
};

// The number of each rank's host, where that is known; else each rank is on its own.
std::vector<int> hosts_of(const Messenger& messenger, const net::ProcessInfo& identity);

// The transport whose ranks all talk through `messenger`; null in a world of one.
std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                     std::unique_ptr<Messenger> messenger);

// One message of any length from each of `ranks` (of which the own is number `own`) to each; waits. In their order.
std::vector<std::string> exchange(MessageWork& work, const std::vector<int>& ranks, std::size_t own,
                                  std::string_view mine);

}  // namespace zero::comm
