// Messages between ranks on any hosts, over c10d's ProcessGroupGloo and TCP; the collectives of "gloo" and "shm+gloo"
// consist of them. A Messenger connects all ranks of the run. A MessageWork is the messages of one collective, which
// are sent from and received into their final locations. c10d's exceptions are handled here, and FailureDetector
// determines which rank failed. Callers decide which rank sends what.
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

// One collective in flight: messages, then optionally a function that posts more of them. Done when all are complete.
class MessageWork : public Work {
 public:
  // Flat byte tensors that stay unchanged until the work is done. Empty tensors are skipped on both sides.
  virtual void send(int peer, const at::Tensor& bytes) = 0;
  virtual void receive(int peer, const at::Tensor& bytes) = 0;
  // The same for a message that is not payload.
  virtual void send_control(int peer, const at::Tensor& bytes) = 0;
  // Runs `step` after the messages so far are complete, on the thread that waits.
  virtual void then(std::function<void()> step) = 0;
  // The same for a step that posts the messages of a second phase.
  virtual void then_post(std::function<void()> step) = 0;
  // Ends the run: this and all other ranks throw CommError with this text. For a step.
  [[noreturn]] virtual void fail_all_ranks(const std::string& text) = 0;
};

class Messenger {
 public:
  // Connects all ranks; blocking. CommError that names the missing ranks after `timeout`.
  Messenger(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
  // A group of ranks of this one, which must outlive it. It uses the same connections, and a failure in one fails all.
  // Local. ConfigError if too many groups exist at once.
  std::unique_ptr<Messenger> split(const Split& split) const;
  // Waits a limited time until peers have received what this rank sent.
  ~Messenger();
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  // Starts the next collective. CommError at once if the run has failed.
  std::shared_ptr<MessageWork> begin(Call call);
  std::shared_ptr<MessageWork> begin_all_gather_bytes();
  void set_timeout(std::chrono::milliseconds timeout);
  // Tells all ranks of the run that its `rank` failed.
  void abort(int rank, const std::string& reason) noexcept;
  // Also calls `callback` at the first failure; it must not throw. null: none.
  void on_failure(std::function<void(const PeerFailure&)> callback);
  FailureDetector& watch();
  // As in Transport. advance() lets a thread complete each operation of two phases in flight, of all groups, because
  // gloo can wait for a message but not poll it.
  std::string split_offer() const;
  void advance();
  void on_wait(std::function<bool()> advance_others);

  // The nodes of the ranks; empty unless ranks are numbered host by host.
  const net::NodeTopology& hosts() const;
  // Payload, without control messages, that this rank has sent to other hosts; to all ranks if hosts are unknown.
  std::uint64_t bytes_across_hosts() const;

 private:
  struct Lane;
  struct Channel;
  class Operation;
  explicit Messenger(std::shared_ptr<Channel> channel);
  std::shared_ptr<Channel> channel_;
  std::uint64_t sequence_ = 0;
};

// The number of each rank's host if known; otherwise every rank has its own.
std::vector<int> hosts_of(const Messenger& messenger, const net::ProcessInfo& identity);

// Posts the messages of an all_to_all between this rank and `peers`, in their order: in[p] goes to rank p, out[p] comes
// from it. Unless the parts are equal, ranks first tell each other the sizes. `identity` names ranks in errors.
void post_parts(MessageWork& work, const net::ProcessInfo& identity, const std::vector<int>& peers,
                const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in, bool equal);

// The transport in which all ranks communicate through `messenger`; null for world size 1.
std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                     std::unique_ptr<Messenger> messenger);

// Sends one message of any length from each of `ranks` (this rank is number `own`) to each, and waits. Returns them in
// the order of `ranks`.
std::vector<std::string> all_gather_bytes(MessageWork& work, const std::vector<int>& ranks, std::size_t own,
                                          std::string_view mine);

}  // namespace zero::comm
