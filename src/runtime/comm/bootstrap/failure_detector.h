// Detects failed ranks and tells every rank. Connections form a star through rank 0, separate from data connections. A
// connection that closes without a goodbye means that the rank died. The connections also carry failure reasons, small
// keys and progress queries. One thread per rank answers even if the rank itself is blocked. Every connection begins
// with a handshake in which both sides prove the run's secret (net/secret.h). Moves no tensors.
#pragma once
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "net/secret.h"
#include "net/socket.h"

namespace zero::comm {

// The sequence number of an operation within a group of ranks. `group` is ProcessInfo::group_id(): equal on the
// members, unique in the run; 0: all ranks.
struct OperationId {
  std::uint64_t group = 0, sequence = 0;
  auto operator<=>(const OperationId&) const = default;
};

// Progress of a rank in operations of all ranks. `answered` is false if it did not respond: it is stopped or
// disconnected.
struct PeerProgress {
  bool answered = false;               // the last one that began
  std::uint64_t begun = 0, ended = 0;  // operations
  std::string op;                      // the last one begun
};

class FailureDetector {
 public:
  // Returns where rank 0 listens; called again before every attempt to connect. An empty path and port 0: not known
  // yet.
  using Locate = std::function<net::MeetingPoint()>;

  // Rank 0: waits for all other ranks at `listener`. Throws CommError that names the first missing rank after
  // `timeout`. Connections that do not prove the key of `identity` (net::key_of) are rejected.
  FailureDetector(const net::ProcessInfo& identity, base::Descriptor listener, std::chrono::milliseconds timeout);
  // Other ranks: connects to rank 0 and waits until all ranks have connected. Throws likewise.
  FailureDetector(const net::ProcessInfo& identity, const Locate& locate, std::chrono::milliseconds timeout);
  // Sends a goodbye, so that the peers do not report this rank as dead.
  ~FailureDetector();
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  // Keys shared by all ranks. get() blocks until the key is set; it throws CommError at the deadline or if a rank
  // fails. Key and value have at most 60 KiB in total.
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key, net::Clock::time_point deadline);
  bool has(const std::string& key);

  // Records the operation that this rank began or ended last, for progress queries. The run fails within a few seconds
  // if ranks wait in operations whose texts differ although they have the same id.
  void began(OperationId id, std::string op);
  void ended(OperationId id);
  // Queries the progress of every rank; blocks for at most `limit`.
  std::vector<PeerProgress> ask_progress(std::chrono::milliseconds limit);

  // The first failure of any rank, including this one.
  std::optional<PeerFailure> failure() const;
  // The same, but waits up to `grace` for the report, because a broken data connection may be noticed first. A rank
  // that left without failing counts if there is no other cause.
  std::optional<PeerFailure> cause(std::chrono::milliseconds grace);
  // Tells all ranks that `rank` failed: this rank, or one that it found to be stuck.
  void abort(int rank, const std::string& reason) noexcept;
  // Called once, at the first failure, on any thread; must not throw. Called immediately if a failure has occurred.
  void on_failure(std::function<void(const PeerFailure&)> callback);

  // The numeric address of this host as seen by the others; loopback if all ranks are on it.
  const std::string& own_address() const { return own_address_; }
  // Random bytes of this rendezvous that all ranks have: with them, proofs over other connections are of this one only.
  const std::string& session() const { return session_; }

 private:
  struct Link {
    int rank = -1;  // -1: not proved yet
    base::Descriptor fd;
    std::string in, out;
    net::Clock::time_point since;
    net::Handshake handshake;
    int error = 0;  // why it ended; 0: the peer closed it
  };
  enum class Entry { Waits, Proved, Refused };
  struct OwnCall {
    OperationId id;
    std::string op;
    net::Clock::time_point begun;
    bool ended;
  };

  void gather_peers(base::Descriptor listener, net::Clock::time_point deadline);
  Entry introduce(Link& link);
  std::string missing(int* first) const;
  void join_hub(const Locate& locate, net::Clock::time_point deadline);
  bool prove_to_hub(Link& link, const net::Frame& challenge);
  void run();
  void handle(const net::Frame& frame, int from);
  void link_ended(Link& link);
  void report_wait();
  void compare_waits(int rank, const std::string& calls);
  void note_failure(int rank, const std::string& reason);
  bool store(const std::string& key, std::string value);
  std::string progress_payload() const;  // requires the mutex
  // Queues a frame for every link except rank `except`'s and sends what does not block.
  void post(char kind, int rank, std::string_view payload, int except);
  static bool flush(Link& link);    // false: broken
  static bool receive(Link& link);  // false: closed. A limited amount for each call
  bool hub() const { return rank_ == 0; }

  const pid_t pid_ = ::getpid();
  const int rank_, size_;
  const std::string where_;
  const std::string key_;
  std::string own_address_, session_;
  std::string unproved_;      // a connection that could not prove the secret, for messages
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable news_;
  std::vector<Link> links_;
  std::map<std::string, std::string> keys_;
  std::size_t keys_bytes_ = 0;
  std::optional<PeerFailure> failure_;
  std::vector<bool> left_;
  std::vector<PeerProgress> progress_;
  PeerProgress own_progress_{true, 0, 0, "nothing"};
  std::deque<OwnCall> calls_;                     // the latest
  std::pair<OperationId, OperationId> reported_;  // the first open and the last call of the last report
  // At rank 0, for its thread: what each rank has reported.
  std::vector<std::map<OperationId, std::string>> waits_;
  std::function<void(const PeerFailure&)> callback_;
  bool stop_ = false;
  base::Descriptor wake_;
  std::thread thread_;
};

}  // namespace zero::comm
