// Ranks as processes forked from the test, for deaths, shared memory and sockets. The test process must not have used
// torch before, because torch's threads do not survive a fork.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace zero::test {

// How one rank ended.
struct RankEnd {
  int exit_code = -1;  // -1: by a signal
  int signal = 0;      // SIGKILL after the limit, too
  std::string error;   // what() of the exception that left `body`
  int blamed = -2;     // CommError::rank(), if it was one
  double seconds = 0;  // from the start of all
  bool ok() const { return exit_code == 0; }
};

// Runs body(rank) in `size` processes at once and waits for all. A rank exits with 0 when `body`
// returns, with 1 when an exception leaves it; no destructors or exit handlers of the test run
// there. Those that still run after `limit` are killed. Children die with the test.
std::vector<RankEnd> fork_ranks(int size, const std::function<void(int rank)>& body,
                                std::chrono::milliseconds limit = std::chrono::seconds(100));

// The errors of all ranks that failed, for messages; "" when none did.
std::string errors_of(const std::vector<RankEnd>& ends);

// A counter that the ranks of fork_ranks() share, without a transport.
class SharedCounter {
 public:
  SharedCounter();
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;
  void add() { ++*value_; }
  void wait_for(int value) const;  // polls

 private:
  std::atomic<int>* value_;
};

// A name for one run, unlike any other at this time.
std::string fresh_run_id();

}  // namespace zero::test
