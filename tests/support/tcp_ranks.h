// Shared by tests of transports over TCP: ranks as processes, ports, and errors that must name a rank.
#pragma once
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <zero/communicator.h>
#include <zero/errors.h>

#include "net/socket.h"
#include "support/fork_ranks.h"
#include "support/require.h"

namespace zero::test {

inline constexpr int kKilled = -SIGKILL;

inline int free_port() {
  net::MeetingPoint point{"", "127.0.0.1", 0};
  net::listen_at(point);
  return point.port;
}

// Exit statuses of one process a rank, -signal for a death by signal.
inline std::vector<int> run_processes(int size, const std::function<void(int)>& body) {
  std::vector<int> statuses;
  int rank = 0;
  for (const auto& end : fork_ranks(size, [&](int r) {
         at::set_num_threads(1);
         body(r);
       })) {
    if (!end.error.empty()) std::fprintf(stderr, "rank %d: %.600s\n", rank, end.error.c_str());
    statuses.push_back(end.signal != 0 ? -end.signal : end.exit_code);
    ++rank;
  }
  return statuses;
}

inline void expect_all_well(const std::vector<int>& statuses, int except = -1) {
  for (int r = 0; r < static_cast<int>(statuses.size()); ++r) {
    if (r == except) continue;
    EXPECT_EQ(statuses[r], 0) << "rank " << r;
  }
}

// The cause of the error: a report of the failed rank, or a timeout, which its text states. Either: whichever is first.
enum class By { Report, TimeLimit, Either };

// `body` throws a CommError that names `rank` and contains `words`.
inline void require_named(int rank, const std::string& words, By by, const std::function<void()>& body) {
  try {
    body();
  } catch (const zero::CommError& error) {
    require(error.rank() == rank, "expected rank " + std::to_string(rank) + " to be named, got " + error.what());
    require(contains(error.what(), words), "expected '" + words + "' in: " + error.what());
    const bool late = contains(error.what(), " within ") || contains(error.what(), " in time");
    require(by == By::Either || late == (by == By::TimeLimit),
            std::string(by == By::Report ? "told by a time limit: " : "not told by a time limit: ") + error.what());
    return;
  }
  throw std::runtime_error("expected a CommError that names rank " + std::to_string(rank) + ", got none");
}

// A rank is killed during large messages with several operations in flight, after a different time in every trial. All
// others name it, then and later, and do not wait for it when they end. open(rank, trial) connects a rank.
inline void expect_killed_ranks_named(int size,
                                      const std::function<std::shared_ptr<Communicator>(int rank, int trial)>& open) {
  using namespace std::chrono_literals;
  for (int trial = 0; trial < 8; ++trial) {
    const int victim = trial % size;
    const auto statuses = run_processes(size, [&](int rank) {
      auto comm = open(rank, trial);
      comm->barrier();
      if (rank == victim) {
        std::thread([trial] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5 + 23 * trial));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      auto sum = torch::zeros({1'000'001}), out = torch::zeros({size * 1'000'000}), in = torch::ones({1'000'000});
      const auto forever = [&] {
        for (;;) {
          auto first = comm->all_reduce(sum), second = comm->all_gather(out, in);
          first->wait();
          second->wait();
        }
      };
      require_named(victim, "rank " + std::to_string(victim), By::Report, forever);
      require_named(victim, "rank " + std::to_string(victim), By::Report, [&] { comm->barrier(); });
      comm.reset();
    });
    EXPECT_EQ(statuses[victim], kKilled) << "trial " << trial;
    expect_all_well(statuses, victim);
  }
}

}  // namespace zero::test
