// Where the ranks of a run meet and how each learns what became of the others: a star of
// connections through rank 0, beside the one that moves data. A connection that ends without a
// farewell is a death; reasons of failures, small keys and "how far are you" travel over it. One
// thread a rank answers even while the rank itself is stuck. It moves no tensors.
#pragma once
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "net/socket.h"

namespace zero::comm {

// How far a rank has come. `answered` is false for one that cannot even tell: stopped, or cut off.
struct PeerProgress {
  bool answered = false;
  std::uint64_t begun = 0, ended = 0;  // operations
  std::string op;                      // the last one begun
};

class FailureDetector {
 public:
  // Tells where rank 0 listens; asked again before every attempt to connect. An empty path and
  // port 0: not known yet.
  using Locate = std::function<net::MeetingPoint()>;

  // Rank 0: waits for all others at `listener`. Throws CommError naming the first that is missing
  // when `timeout` is over. Everybody gives the same `token`; who does not is turned away.
  FailureDetector(const net::ProcessInfo& identity, const std::string& token, base::Descriptor listener,
                  std::chrono::milliseconds timeout);
  // The others: connects to rank 0 and waits until all have come. Throws likewise.
  FailureDetector(const net::ProcessInfo& identity, const std::string& token, const Locate& locate,
                  std::chrono::milliseconds timeout);
  // Says farewell, so that the end of this rank is not taken for a death.
  ~FailureDetector();
  FailureDetector(const FailureDetector&) = delete;
  FailureDetector& operator=(const FailureDetector&) = delete;

  // Keys that every rank sees; get() waits for the key and throws CommError at the deadline or when
  // a rank fails. Key and value together are at most 60 KiB.
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key, net::Clock::time_point deadline);
  bool has(const std::string& key);

  // Records which operation this rank began or ended last, for those who ask.
  void began(std::uint64_t sequence, std::string op);
  void ended(std::uint64_t sequence);
  // How far every rank says it is; takes at most `limit`.
  std::vector<PeerProgress> ask_progress(std::chrono::milliseconds limit);

  // The first failure of any rank, this one included.
  std::optional<PeerFailure> failure() const;
  // The same, waiting up to `grace` for the news: a broken data connection may be seen earlier. A
  // rank that left without failing counts if there is no other cause.
  std::optional<PeerFailure> cause(std::chrono::milliseconds grace);
  // Tells everybody that `rank` failed, this one or one that this one found to be stuck.
  void abort(int rank, const std::string& reason) noexcept;
  // Called once, at the first failure, on any thread; must not throw. At once if it has happened.
  void on_failure(std::function<void(const PeerFailure&)> callback);

  // The numeric address by which this host is seen from the others; loopback if all are here.
  const std::string& own_address() const { return own_address_; }

 private:
  struct Link {
    int rank = -1;  // -1: has not said who it is
    base::Descriptor fd;
    std::string in, out;
    net::Clock::time_point since;
  };

  void gather_peers(base::Descriptor listener, net::Clock::time_point deadline, const std::string& token);
  bool admit(Link& link, const net::Frame& hello, const std::string& token);
  std::string missing(int* first) const;
  void join_hub(const Locate& locate, net::Clock::time_point deadline, const std::string& token);
  void run();
  void handle(const net::Frame& frame, int from);
  void link_ended(Link& link);
  void note_failure(int rank, const std::string& reason);
  std::string progress_payload() const;  // under the mutex
  // Queues a frame for every link but the one of rank `except`, and sends what goes at once.
  void post(char kind, int rank, std::string_view payload, int except);
  static bool flush(Link& link);    // false: broken
  static bool receive(Link& link);  // false: ended
  bool hub() const { return rank_ == 0; }

  const pid_t pid_ = ::getpid();
  const int rank_, size_;
  const std::string where_;
  std::string own_address_;
  mutable std::mutex mutex_;  // everything below
  std::condition_variable news_;
  std::vector<Link> links_;
  std::map<std::string, std::string> keys_;
  std::optional<PeerFailure> failure_;
  std::vector<bool> left_;
  std::vector<PeerProgress> progress_;
  PeerProgress own_progress_{true, 0, 0, "nothing"};
  std::function<void(const PeerFailure&)> callback_;
  bool stop_ = false;
  base::Descriptor wake_;
  std::thread thread_;
};

}  // namespace zero::comm
