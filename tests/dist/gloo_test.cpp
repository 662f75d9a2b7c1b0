// The gloo transport between processes: values, bytes sent, and the rank named when a rank dies, stops, does not
// connect or makes a different call.
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <thread>

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <zero/errors.h>

#include "comm/group.h"
#include "comm/transport.h"
#include "net/socket.h"
#include "support/collective_checks.h"
#include "support/folder.h"
#include "support/fork_ranks.h"
#include "support/nightly.h"
#include "support/tcp_ranks.h"

using namespace std::chrono_literals;
using zero::CommError;
using zero::Communicator;
using zero::net::ProcessInfo;
namespace base = zero::base;
namespace comm = zero::comm;
namespace net = zero::net;
using zero::test::By;
using zero::test::expect_all_well;
using zero::test::free_port;
using zero::test::kKilled;
using zero::test::require;
using zero::test::require_named;
using zero::test::run_processes;

namespace gloo_test {
namespace {

// The process information of a rank on one host; with a port, each rank counts as a separate host.
ProcessInfo identity(int rank, int size, const std::string& run_id, int port = 0) {
  ProcessInfo id;
  id.rank = rank;
  id.size = size;
  id.local_rank = port == 0 ? rank : 0;
  id.local_size = port == 0 ? size : 1;
  id.source = "the test";
  id.run_id = run_id;
  if (port != 0) {
    id.master_addr = "127.0.0.1";
    id.master_port = port;
  }
  return id;
}

std::shared_ptr<Communicator> open(const ProcessInfo& id, std::chrono::milliseconds timeout = 60s) {
  return comm::make_communicator(comm::make_gloo(id, timeout));
}

class GlooWorlds : public testing::TestWithParam<int> {};

}  // namespace

TEST_P(GlooWorlds, EveryCollectiveMatchesTheNaiveOneOnOneHost) {
  const int size = GetParam();
  const auto id = zero::test::fresh_run_id();
  expect_all_well(run_processes(size, [&](int rank) {
    auto comm = open(identity(rank, size, id));
    require(comm->transport() == "gloo", comm->transport());
    zero::test::check_all(comm);
  }));
}

TEST_P(GlooWorlds, EveryCollectiveMatchesTheNaiveOneOverTcp) {
  const int size = GetParam(), port = free_port();
  expect_all_well(run_processes(size, [&](int rank) {
    auto comm = open(identity(rank, size, "run", port));
    zero::test::check_values(comm);
    zero::test::check_exchange(comm);
  }));
}

INSTANTIATE_TEST_SUITE_P(Sizes, GlooWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& i) { return "World" + std::to_string(i.param); });

// Payload that this process sent over its TCP connections, without packet headers and retransmissions; -1 if the kernel
// does not report it.
static std::int64_t tcp_bytes_sent() {
  std::int64_t sum = 0;
  bool told = false;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    if (length < offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans) continue;
    told = true;
    sum += static_cast<std::int64_t>(info.tcpi_bytes_sent -
                                     info.tcpi_bytes_retrans);  // without retransmissions, which a busy machine makes
  }
  return told ? sum : -1;
}

TEST(Gloo, SendsOnTheWireWhatTheCountersSayAndHardlyMore) {
  constexpr int kSize = 4, kUntold = 42;
  const auto id = zero::test::fresh_run_id();
  const auto statuses = run_processes(kSize, [&](int rank) {
    auto comm = open(identity(rank, kSize, id));
    auto whole = torch::ones({1 << 20}, at::kBFloat16), part = torch::ones({1 << 18}, at::kBFloat16);
    const auto measure = [&](const char* op, const std::function<std::shared_ptr<zero::Work>()>& begin,
                             bool root_only = false) {
      comm->barrier();
      comm->reset_stats();
      const auto before = tcp_bytes_sent();
      if (before < 0) _exit(kUntold);
      begin()->wait();
      comm->barrier();  // data that was still queued has then arrived
      const auto sent = tcp_bytes_sent() - before;
      auto counted = static_cast<std::int64_t>(comm->stats().bytes_sent());
      // Counted as (N-1)/N*S on every rank, sent by the root alone.
      if (root_only) counted = rank == 0 ? counted * kSize : 0;
      require(sent >= counted && sent <= counted + 8192,
              std::string(op) + ": sent " + std::to_string(sent) + " bytes, counted " + std::to_string(counted));
    };
    measure("all_gather", [&] { return comm->all_gather(whole, part); });
    measure("reduce_scatter", [&] { return comm->reduce_scatter(part, whole); });
    measure("all_reduce", [&] { return comm->all_reduce(whole); });
    measure("all_to_all", [&] { return comm->all_to_all(torch::empty_like(whole), whole); });
    measure(
        "broadcast", [&] { return comm->broadcast(whole, 0); }, true);
  });
  if (statuses[0] == kUntold) GTEST_SKIP() << "this kernel's TCP_INFO does not tell the bytes sent";
  expect_all_well(statuses);
}

// Rank 0 is the centre of the failure detector's star, so its death is detected differently.
TEST(Gloo, NamesAKilledRankLongBeforeTheTimeLimit) {
  for (const bool tcp : {false, true}) {
    for (const int victim : {0, 1, 2}) {
      const auto id = zero::test::fresh_run_id();
      const int port = tcp ? free_port() : 0;
      const auto statuses = run_processes(3, [&](int rank) {
        auto comm = open(identity(rank, 3, id, port));
        auto sum = torch::ones({100'000});
        // The victim may die before the others have completed the last operation with it.
        const auto rounds = [&] {
          for (int i = 0; rank != victim || i < 3; ++i) comm->all_reduce(sum)->wait();
        };
        if (rank == victim) {
          rounds();
          kill(getpid(), SIGKILL);
        }
        require_named(victim, "rank " + std::to_string(victim), By::Report, rounds);
        require_named(victim, "rank " + std::to_string(victim), By::Report, [&] { comm->barrier(); });
        comm.reset();  // must not wait for the dead
      });
      EXPECT_EQ(statuses[victim], kKilled);
      expect_all_well(statuses, victim);
    }
  }
}

TEST(Gloo, NamesARankThatDiesWhileOthersWaitForSomethingElse) {
  const auto id = zero::test::fresh_run_id();
  const auto statuses = run_processes(3, [&](int rank) {
    auto comm = open(identity(rank, 3, id));
    comm->barrier();
    if (rank == 1) {
      std::this_thread::sleep_for(200ms);
      kill(getpid(), SIGKILL);
    }
    // Both wait for data of the root, and for none of the rank that dies.
    auto data = torch::ones({1000});
    if (rank == 2) require_named(1, "rank 1", By::Report, [&] { comm->broadcast(data, 0)->wait(); });
    if (rank == 0) {
      std::this_thread::sleep_for(1s);
      require_named(1, "rank 1", By::Report, [&] { comm->broadcast(data, 0)->wait(); });
    }
  });
  EXPECT_EQ(statuses[1], kKilled);
  expect_all_well(statuses, 1);
}

TEST(Gloo, NamesARankKilledAtAnyTime) {
  const auto id = zero::test::fresh_run_id();
  zero::test::expect_killed_ranks_named(
      3, [&](int rank, int trial) { return open(identity(rank, 3, id + std::to_string(trial))); });
}

TEST(Gloo, NamesAnAbsentRank) {
  zero::test::OneIn part(2);
  for (const bool tcp : {false, true}) {
    for (const int absent : {0, 1, 2}) {
      if (!part.take()) continue;
      const auto id = zero::test::fresh_run_id();
      const int port = tcp ? free_port() : 0;
      const auto statuses = run_processes(3, [&](int rank) {
        if (rank == absent) return;
        require_named(absent, "rank " + std::to_string(absent), By::TimeLimit,
                      [&] { open(identity(rank, 3, id, port), 1s); });
      });
      expect_all_well(statuses);
    }
  }
}

TEST(Gloo, NamesARankThatDiesDuringTheStart) {
  const auto id = zero::test::fresh_run_id();
  const auto statuses = run_processes(3, [&](int rank) {
    if (rank == 2) {
      std::this_thread::sleep_for(2s);
      return;  // never comes
    }
    if (rank == 1) {
      std::thread([] {
        std::this_thread::sleep_for(500ms);
        kill(getpid(), SIGKILL);
      }).detach();
      open(identity(rank, 3, id), 60s);
    }
    require_named(1, "rank 1", By::Report, [&] { open(identity(rank, 3, id), 60s); });
  });
  EXPECT_EQ(statuses[1], kKilled);
  EXPECT_EQ(statuses[0], 0);
}

TEST(Gloo, NamesALateRank) {
  for (const int absent : {0, 1}) {
    const auto id = zero::test::fresh_run_id();
    expect_all_well(
        run_processes(3, [&](int rank) { zero::test::check_timeout(open(identity(rank, 3, id)), absent, 500ms); }));
  }
}

TEST(Gloo, NamesAStoppedRank) {
  const auto id = zero::test::fresh_run_id();
  const auto statuses = run_processes(3, [&](int rank) {
    auto comm = open(identity(rank, 3, id));
    comm->barrier();
    comm->set_timeout(1s);
    if (rank == 1) {
      // A child process wakes it up again at the end of the test.
      const pid_t self = getpid();
      if (fork() == 0) {
        std::this_thread::sleep_for(3s);
        kill(self, SIGKILL);
        _exit(0);
      }
      raise(SIGSTOP);
    }
    require_named(1, "rank 1", By::TimeLimit, [&] { comm->barrier(); });
  });
  EXPECT_EQ(statuses[1], kKilled);
  expect_all_well(statuses, 1);
}

TEST(Gloo, PassesOnTheReasonOfAnAbort) {
  for (const int culprit : {0, 2}) {
    const auto id = zero::test::fresh_run_id();
    expect_all_well(run_processes(3, [&](int rank) { zero::test::check_abort(open(identity(rank, 3, id)), culprit); }));
  }
}

TEST(Gloo, NamesARankThatMakesAnotherCall) {
  const auto id = zero::test::fresh_run_id();
  expect_all_well(run_processes(3, [&](int rank) {
    auto comm = open(identity(rank, 3, id));
    comm->set_timeout(1s);
    auto data = torch::ones({300});
    const auto numel = rank == 2 ? 299 : 300;
    try {
      comm->broadcast(data.narrow(0, 0, numel), 0)->wait();
      comm->barrier();
    } catch (const CommError& error) {
      const std::string text = error.what();
      require(text.find("299 elements") != std::string::npos || text.find("300 elements") != std::string::npos, text);
      require(text.find("another call") != std::string::npos, text);
      return;
    }
    throw std::runtime_error("different calls went unnoticed");
  }));
}

// Found long before the time limit of a minute. Ranks of the other group wait in a barrier and get the same error.
TEST(Gloo, NamesDifferentCallsOfAGroup) {
  const int port = free_port();
  expect_all_well(run_processes(4, [&](int rank) {
    auto comm = open(identity(rank, 4, "run", port));
    // A group that was closed made another call with the same sequence number.
    comm->split(0, rank)->barrier();
    auto group = comm->split(rank % 2, rank);
    const auto begin = std::chrono::steady_clock::now();
    std::string text = "none";
    try {
      auto data = torch::ones({300});
      if (rank % 2 == 0) group->all_reduce(data.narrow(0, 0, rank == 2 ? 299 : 300))->wait();
      comm->barrier();
    } catch (const CommError& error) {
      text = error.what();
    }
    require(std::chrono::steady_clock::now() - begin < 30s, "at the time limit: " + text);
    for (const auto* part : {"got different calls", "rank 0 calls all_reduce", "300", "rank 2 calls all_reduce", "299",
                             "operation 1 of a group of both"})
      require(text.find(part) != std::string::npos, text);
  }));
}

// Rank 0 waits in the order of issue before it begins the second; rank 1 waits for the second first.
TEST(Gloo, AWaitForALaterOperationCompletesTheEarlierOneForThePeers) {
  const auto id = zero::test::fresh_run_id();
  expect_all_well(run_processes(2, [&](int rank) {
    auto comm = open(identity(rank, 2, id), 5s);
    auto sum = torch::ones({1001}), out = torch::zeros({20}), in = torch::ones({10});
    auto first = comm->all_reduce(sum);
    if (rank == 0) first->wait();
    auto second = comm->all_gather(out, in);
    second->wait();
    first->wait();
    require(sum.eq(2).all().item<bool>() && out.eq(1).all().item<bool>(), "wrong values");
  }));
}

TEST(Gloo, DoneTurnsTrueWithoutAWait) {
  const auto id = zero::test::fresh_run_id();
  expect_all_well(run_processes(2, [&](int rank) {
    auto comm = open(identity(rank, 2, id));
    auto sum = torch::ones({1000});
    if (rank == 1) std::this_thread::sleep_for(300ms);
    auto work = comm->all_reduce(sum);
    if (rank == 0) require(!work->done(), "done before the peer began");
    for (int i = 0; i < 1000 && !work->done(); ++i) std::this_thread::sleep_for(5ms);
    require(work->done(), "never done");
    work->wait();
    require(sum.eq(2).all().item<bool>(), "wrong values");
  }));
}

TEST(Gloo, SeveralCommunicatorsOfOneRunOneAfterTheOtherAndAtATime) {
  for (const bool tcp : {false, true}) {
    const auto id = zero::test::fresh_run_id();
    const int port = tcp ? free_port() : 0;
    expect_all_well(run_processes(3, [&](int rank) {
      auto first = open(identity(rank, 3, id, port)), second = open(identity(rank, 3, id, port));
      zero::test::check_exchange(first);
      zero::test::check_exchange(second);
      first.reset();
      second->barrier();
      zero::test::check_exchange(open(identity(rank, 3, id, port)));
    }));
  }
}

TEST(Gloo, LeavesNothingBehindAndListensOnTheLoopbackOnly) {
  const auto id = zero::test::fresh_run_id();
  const zero::test::TempFolder folder;
  const auto directory = folder.text();
  expect_all_well(run_processes(2, [&](int rank) {
    setenv("TMPDIR", directory.c_str(), 1);
    auto comm = open(identity(rank, 2, id));
    comm->barrier();
    require(std::filesystem::is_empty(directory), "the meeting point is still there");
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      const int fd = std::atoi(entry.path().filename().c_str());
      int listens = 0;
      socklen_t length = sizeof listens;
      if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
      require(net::local_address(fd).empty(), "listens on '" + net::local_address(fd) + "'");
    }
  }));
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove(directory);
}

TEST(Gloo, RefusesASecondRankZeroOfTheSameRun) {
  auto point = net::local_meeting_point("one rank 0");
  auto first = net::listen_at(point);
  try {
    net::listen_at(point);
    FAIL() << "two listeners";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("two runs have the same run id"), std::string::npos) << error.what();
  }
  first.close();
  EXPECT_TRUE(net::listen_at(point));  // the name ends with its listener
}

// Foreign connections to the port while ranks wait for the last one: silence, noise, a wrong token, a connection that
// closes. ZERO_STRANGERS sets how many.
TEST(Gloo, StrangersAtThePortDoNotDisturbTheStart) {
  const int port = free_port();
  const char* text = std::getenv("ZERO_STRANGERS");
  const int count = text == nullptr ? 1000 : std::atoi(text);
  int over[2];
  ASSERT_EQ(pipe(over), 0);
  expect_all_well(run_processes(4, [&](int rank) {
    if (rank < 3) {
      char byte = 0;
      if (rank == 2) require(read(over[0], &byte, 1) == 1, "no end of the strangers");
      zero::test::check_exchange(open(identity(rank, 3, "run", port)));
      return;
    }
    std::deque<base::Descriptor> strangers;
    for (int i = 0; i < count;) {
      auto fd = net::connect_to({"", "127.0.0.1", port});
      if (!fd) {
        std::this_thread::sleep_for(2ms);
        continue;
      }
      const auto words = i % 4 == 0   ? std::string()
                         : i % 4 == 1 ? std::string(1000, 'x')
                                      : net::encode('H', 2, "3\nwrong");
      if (!words.empty()) send(fd.get(), words.data(), words.size(), MSG_NOSIGNAL);
      if (++i % 3 != 0) strangers.push_back(std::move(fd));
      if (strangers.size() > 300) strangers.pop_front();  // below the limit of descriptors
    }
    require(write(over[1], "x", 1) == 1, "no word of the end");
  }));
  close(over[0]);
  close(over[1]);
  std::printf("%d connections of strangers\n", count);
}

// As torchrun does: the port that ranks are given belongs to a TCPStore of the launcher.
TEST(Gloo, MeetsByTheStoreOfAnAgent) {
  int ports[2];
  ASSERT_EQ(pipe(ports), 0);
  const pid_t agent = fork();
  if (agent == 0) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const std::uint16_t port = store->getPort();
    if (write(ports[1], &port, sizeof port) != sizeof port) _exit(1);
    pause();
  }
  std::uint16_t port = 0;
  ASSERT_EQ(read(ports[0], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  expect_all_well(run_processes(3, [&](int rank) {
    for (int i = 0; i < 2; ++i) zero::test::check_exchange(open(identity(rank, 3, "run", port)));
  }));
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  kill(agent, SIGKILL);
  waitpid(agent, nullptr, 0);
}

TEST(Gloo, SeveralHostsWithoutAnAddressAreAConfigurationError) {
  auto id = identity(0, 2, "run");
  id.local_size = 1;
  EXPECT_THROW(open(id, 1s), zero::ConfigError);
}

}  // namespace gloo_test
