// Processes that are not of the run: they flood a port, take a peer's place, pretend to be rank 0, hold a name, join
// without the secret. No rank may die or use their bytes. Also too few file descriptors.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/c10d_rendezvous.h"
#include "net/secret.h"
#include "net/socket.h"
#include "support/descriptors.h"
#include "support/strangers.h"

namespace zero::test::strangers_test {
namespace {

using namespace std::chrono_literals;

// TCP ports at which a process listens.
std::vector<int> ports_of(pid_t pid) {
  std::vector<int> ports;
  const auto own = sockets_of(pid);
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      std::vector<std::string> fields;
      for (std::string word; words >> word;) fields.push_back(word);
      if (fields.size() < 10 || fields[3] != "0A" || !own.contains(fields[9])) continue;
      ports.push_back(static_cast<int>(std::stoul(fields[1].substr(fields[1].find(':') + 1), nullptr, 16)));
    }
  }
  return ports;
}

base::Descriptor connected(int port) { return net::connect_to({"", "127.0.0.1", port}); }

// ---- gloo's port ----
TEST(Strangers, CannotEndARankByConnectionsAndFindNoPortAfterTheStart) {
  for (const bool hosts : {false, true}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const int port = hosts ? unused_port() : 0;
    const auto ends = fork_ranks(3, [&](int rank) {
      if (rank < 2) {
        rlimit few{};
        ::getrlimit(RLIMIT_NOFILE, &few);
        few.rlim_cur = std::min<rlim_t>(few.rlim_max, 256);
        ::setrlimit(RLIMIT_NOFILE, &few);
        board.pids[rank] = ::getpid();
        board.wait_for(1);
        const auto comm = open_comm("gloo", member(run, rank, 2, port));
        exchange(comm);
        require(ports_of(::getpid()).empty(), "a port is open after the start");
        board.marks++;
        board.wait_for(4);  // the stranger has tried again
        exchange(comm);
        return;
      }
      while (board.pids[0] == 0 || board.pids[1] == 0) std::this_thread::sleep_for(1ms);
      board.marks++;
      std::vector<base::Descriptor> held;
      std::set<int> seen;
      while (board.marks < 3) {
        for (const int at : {0, 1})
          for (const int open_port : ports_of(board.pids[at])) {
            if (open_port == port) continue;  // rank 0's own meeting point limits strangers itself
            seen.insert(open_port);
            for (int i = 0; i < 400 && held.size() < 900; ++i)
              if (auto fd = connected(open_port)) held.push_back(std::move(fd));
          }
      }
      std::size_t late = 0;
      for (const int seen_port : seen)
        if (connected(seen_port)) ++late;
      board.marks++;
      require(late == 0, "a port takes connections after the start");
      std::printf("%zu connections held, ports seen: %zu\n", held.size(), seen.size());
    });
    EXPECT_EQ(errors_of(ends), "");
  }
}

// The flood shows it over gloo. Groups of some ranks open no port either.
TEST(Ports, AreClosedAfterTheStartOverEveryTransport) {
  for (const std::string transport : {"shm", "shm+gloo"}) {
    const auto run = fresh_run_id();
    const bool hosts = transport == "shm+gloo";
    const int port = hosts ? unused_port() : 0;
    const auto ends = fork_ranks(4, [&](int rank) {
      auto identity = member(run, rank, 4, port);
      if (hosts) identity.local_rank = rank % 2, identity.local_size = 2;
      {
        net::MeetingPoint own{"", "127.0.0.1", 0};
        const auto listener = net::listen_at(own);
        require(ports_of(::getpid()) == std::vector<int>{own.port}, "a port is not seen");
      }
      const auto comm = open_comm(transport, identity);
      require(comm->transport() == transport, comm->transport());
      exchange(comm);
      require(ports_of(::getpid()).empty(), "a port is open after the start");
      const auto half = comm->split(rank % 2, rank);
      exchange(half);
      require(ports_of(::getpid()).empty(), "a port is open after a split");
      exchange(comm);
    });
    EXPECT_EQ(errors_of(ends), "") << transport;
  }
}

// The numbers of gloo's connections, then gloo's messages, as a peer's (gloo/transport/tcp/pair.h).
void take_places(Board& board, int ranks) {
  struct Preamble {
    std::size_t bytes, opcode, slot, offset, length, from;
  };
  constexpr std::size_t kSends = 1, kWaits = 3, kBytes = 32;
  std::vector<base::Descriptor> places;
  std::set<int> seen;
  const auto end = net::Clock::now() + 20s;
  // Rank 1 is as slow as on a busy host: it stands between opening its port and connecting.
  const auto slow = [&](int signal) { ::kill(board.pids[1], signal); };
  while (board.marks < ranks && net::Clock::now() < end) {
    slow(SIGSTOP);
    if (!ports_of(board.pids[1]).empty()) break;
    slow(SIGCONT);
    std::this_thread::sleep_for(200us);
  }
  const auto caught = net::Clock::now();
  bool continued = false;
  while (board.marks < ranks && net::Clock::now() < end) {
    if (!continued && (seen.size() == 2 || net::Clock::now() - caught > 300ms)) {
      std::this_thread::sleep_for(5ms);
      slow(SIGCONT);
      continued = true;
    }
    for (int rank = 0; rank < ranks; ++rank)
      for (const int port : ports_of(board.pids[rank]))
        if (seen.insert(port).second)
          for (std::int64_t number = 0; number < 8; ++number)
            if (auto fd = connected(port)) {
              ::send(fd.get(), &number, sizeof number, MSG_NOSIGNAL);
              places.push_back(std::move(fd));
            }
    for (const auto& fd : places) {
      Preamble got{};
      if (::recv(fd.get(), &got, sizeof got, MSG_DONTWAIT) != sizeof got || got.opcode != kWaits) continue;
      const Preamble forged{sizeof forged + kBytes, kSends, got.slot, 0, kBytes, 0};
      std::string bytes(reinterpret_cast<const char*>(&forged), sizeof forged);
      bytes.append(kBytes, '\x3f');
      ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
  }
}

TEST(Strangers, InAPeersPlaceEndTheStartAndNoByteOfThemIsUsed) {
  auto& board = Board::fresh();
  int rounds = 0;
  for (; rounds < 12 && board.wins == 0; ++rounds) {
    board.marks = 0;
    for (auto& pid : board.pids) pid = 0;
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(3, [&](int rank) {
      if (rank == 2) {
        while (board.pids[0] == 0 || board.pids[1] == 0) std::this_thread::sleep_for(1ms);
        return take_places(board, 2);
      }
      board.pids[rank] = ::getpid();
      while (board.pids[1 - rank] == 0) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(20ms);
      try {
        const auto comm = open_comm("gloo", member(run, rank, 2), 6s);
        exchange(comm);
        board.marks++;
      } catch (const CommError& error) {
        board.marks++;
        const std::string text = error.what();
        std::printf("rank %d: %s\n", rank, text.c_str());
        require(contains(text, "rank"), "no rank is named: " + text);
        if (contains(text, "expected a proof of the run's secret")) board.wins++;
      }
    });
    EXPECT_EQ(errors_of(ends), "");
    for (const auto& end : ends) EXPECT_EQ(end.signal, 0) << "a rank died";
  }
  EXPECT_GT(board.wins, 0) << "no stranger got a place in " << rounds << " starts, so nothing was shown";
}

// ---- the meeting of all ranks ----
// Where rank 0 listens: TCP with a port, else the unix socket of one host.
net::MeetingPoint meeting_of(const std::string& run, int port) {
  return port != 0 ? net::MeetingPoint{"", "127.0.0.1", port}
                   : net::local_meeting_point(net::key_of(member(run, 0, 2)));
}

TEST(Strangers, WhoPretendToBeRankZeroLearnNothingAndAreNotBelieved) {
  for (const bool hosts : {false, true}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const int port = hosts ? unused_port() : 0;
    const auto ends = fork_ranks(3, [&](int rank) {
      if (rank == 2) {
        auto point = meeting_of(run, port);
        bool full = false;
        auto listener = net::listen_at(point);
        board.marks++;
        base::Descriptor victim;
        while (!(victim = net::accept_from(listener, &full))) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(300ms);
        char bytes[4096];
        const auto got = ::recv(victim.get(), bytes, sizeof bytes, MSG_DONTWAIT);
        const std::string hello(bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
        require(!hello.empty() && !contains(hello, "secret") && !contains(hello, run), "the secret or the id was sent");
        for (const auto& frame : {net::encode('W', 0, std::string(32, 'x') + "127.0.0.1"),
                                  net::encode('C', 0, std::string(64, 'x')), net::encode('X', 0, "0 \x1b[2Jforged")})
          ::send(victim.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
        std::this_thread::sleep_for(100ms);
        listener.close();
        victim.close();
        board.marks++;
        return;
      }
      board.wait_for(rank == 0 ? 2 : 1);
      exchange(open_comm("gloo", member(run, rank, 2, port)));
    });
    EXPECT_EQ(errors_of(ends), "") << (hosts ? "TCP" : "unix");
  }
}

TEST(Strangers, AFakeRankZeroThatStaysIsNamedInTheError) {
  auto& board = Board::fresh();
  const auto run = fresh_run_id();
  const int port = unused_port();
  const auto ends = fork_ranks(2, [&](int rank) {
    if (rank == 1) {
      board.wait_for(1);
      open_comm("gloo", member(run, 1, 2, port), 2s);
      return;
    }
    auto identity = member(run, 0, 2, port);
    identity.secret = "another";
    board.marks++;
    open_comm("gloo", identity, 3s);
  });
  EXPECT_TRUE(contains(ends[1].error, "did not prove the run's secret")) << ends[1].error;
  EXPECT_TRUE(contains(ends[1].error, "ZERO_TOKEN")) << ends[1].error;
  EXPECT_TRUE(contains(ends[0].error, "no sign of rank 1")) << ends[0].error;
}

// One who knows the name or the port, but not the secret: sends rank 0's own proof back to it.
void join_by_frames(const base::Descriptor& fd, int size) {
  const auto hello = net::encode('H', 1, std::string(32, 'n') + std::to_string(size));
  ::send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL);
  std::string in;
  net::Frame frame;
  const auto more = [&] {
    pollfd polled{fd.get(), POLLIN, 0};
    ::poll(&polled, 1, 10'000);
    char bytes[4096];
    const auto got = ::recv(fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) in.append(bytes, static_cast<std::size_t>(got));
    return got > 0;
  };
  while (net::decode(in, frame) == 0) require(more(), "no challenge");
  require(frame.kind == 'C' && frame.payload.size() == 64, "an unknown challenge");
  const auto proof = net::encode('R', 1, frame.payload.substr(32));
  ::send(fd.get(), proof.data(), proof.size(), MSG_NOSIGNAL);
  require(!more() && in.empty(), "rank 0 has told something to a process without the secret");
}

TEST(Strangers, CannotJoinTheMeetingWithoutTheSecret) {
  for (const bool hosts : {false, true}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const int port = hosts ? unused_port() : 0;
    const auto ends = fork_ranks(3, [&](int rank) {
      if (rank == 2) {
        const auto point =
            hosts ? net::MeetingPoint{"", "127.0.0.1", port} : net::local_meeting_point(net::key_of(member(run, 1, 2)));
        base::Descriptor fd;
        while (!(fd = net::connect_to(point))) std::this_thread::sleep_for(1ms);
        join_by_frames(fd, 2);
        board.marks++;
        return;
      }
      if (rank == 1) board.wait_for(1);
      exchange(open_comm("gloo", member(run, rank, 2, port)));
    });
    EXPECT_EQ(errors_of(ends), "");
  }
}

TEST(Strangers, CannotJoinSharedMemoryWithoutTheSecret) {
  auto& board = Board::fresh();
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(3, [&](int rank) {
    if (rank == 2) {
      const net::LocalAddress address(net::local_name("shm", net::key_of(member(run, 1, 2))));
      int error = 0;
      ucred owner{};
      base::Descriptor fd;
      while (!(fd = net::connect_local(address, SOCK_SEQPACKET, &error, &owner))) std::this_thread::sleep_for(1ms);
      ::fcntl(fd.get(), F_SETFL, 0);
      ShmMessage message, answer;
      ::send(fd.get(), &message, sizeof message, MSG_NOSIGNAL);
      require(::recv(fd.get(), &answer, sizeof answer, 0) == sizeof answer && answer.kind == 1, "no challenge");
      message.kind = 2;
      std::memcpy(message.proof, answer.proof, sizeof message.proof);
      const base::Descriptor memory(static_cast<int>(::memfd_create("stranger", MFD_CLOEXEC)));
      send_memory(fd.get(), message, memory.get());
      require(::recv(fd.get(), &answer, sizeof answer, 0) <= 0, "rank 0 has answered a process without the secret");
      board.marks++;
      return;
    }
    if (rank == 1) board.wait_for(1);
    exchange(open_comm("shm", member(run, rank, 2)));
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Strangers, OfAnotherUserWhoHoldTheNameAreNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  for (const std::string transport : {"shm", "gloo"}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(3, [&](int rank) {
      const auto identity = member(run, rank, 2);
      const bool shm = transport == "shm";
      const net::LocalAddress address(net::local_name(shm ? "shm" : "meet", net::key_of(identity)));
      if (rank == 2) {
        require(::setuid(65534) == 0, "setuid");
        const base::Descriptor fd(::socket(AF_UNIX, (shm ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC, 0));
        require(::bind(fd.get(), address.get(), address.length) == 0 && ::listen(fd.get(), 16) == 0, "bind");
        board.marks++;
        board.wait_for(3);
        return;
      }
      board.wait_for(1);
      try {
        open_comm(transport, identity, 5s);
      } catch (...) {
        board.marks++;
        throw;
      }
    });
    for (const int rank : {0, 1}) {
      EXPECT_TRUE(contains(ends[rank].error, "(uid 65534)")) << transport << ": " << ends[rank].error;
      EXPECT_LT(ends[rank].seconds, 4) << transport;
    }
  }
}

TEST(Strangers, WhoHoldTheNameAndTakeNoConnectionAreNotWaitedForWithoutLimit) {
  for (const std::string transport : {"shm", "gloo"}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(2, [&](int rank) {
      const auto identity = member(run, 1, 2);
      const bool shm = transport == "shm";
      const int type = (shm ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC | SOCK_NONBLOCK;
      const net::LocalAddress address(net::local_name(shm ? "shm" : "meet", net::key_of(identity)));
      if (rank == 0) {
        const base::Descriptor fd(::socket(AF_UNIX, type, 0));
        require(::bind(fd.get(), address.get(), address.length) == 0 && ::listen(fd.get(), 0) == 0, "bind");
        std::vector<base::Descriptor> queue;
        do queue.emplace_back(::socket(AF_UNIX, type, 0));
        while (::connect(queue.back().get(), address.get(), address.length) == 0);
        board.marks++;
        board.wait_for(2);
        return;
      }
      board.wait_for(1);
      try {
        open_comm(transport, identity, 1s);
      } catch (...) {
        board.marks++;
        throw;
      }
    });
    EXPECT_TRUE(contains(ends[1].error, transport == "shm" ? "takes no connections" : "no answer of rank 0"))
        << ends[1].error;
    EXPECT_LT(ends[1].seconds, 10) << transport;
  }
}

TEST(Strangers, TextsOfPeersDoNotCommandTheTerminal) {
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    const auto watch = comm::rendezvous(member(run, rank, 2), 20s);
    if (rank == 1) watch->abort(1, "\x1b]0;owned\a\x1b[2J");
    const auto cause = watch->cause(10s);
    require(cause && (rank == 1 || !contains(cause->reason, "\x1b")), "an escape sequence of a peer");
    require(rank == 1 || contains(cause->reason, "owned"), cause->reason);
    watch->get("until both have seen it", net::Clock::now() + 300ms);
  });
  for (const auto& end : ends) EXPECT_TRUE(contains(end.error, "owned")) << end.error;
}

// ---- file descriptors ----
void limit_descriptors(int more) {
  const int next = ::fcntl(0, F_DUPFD, 0);
  ::close(next);
  const rlimit few{static_cast<rlim_t>(next + more), static_cast<rlim_t>(next + more)};
  ::setrlimit(RLIMIT_NOFILE, &few);
}

TEST(Descriptors, TooFewForTheRanksEndTheStartInWords) {
  for (const std::string transport : {"shm", "gloo"}) {
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(2, [&](int rank) {
      if (rank == 0) limit_descriptors(16);
      open_comm(transport, member(run, rank, 2), 4s);
    });
    EXPECT_TRUE(contains(ends[0].error, "file descriptors") && contains(ends[0].error, "ulimit -Hn"))
        << transport << ": " << ends[0].error;
    EXPECT_LT(ends[0].seconds, 3) << transport;
    EXPECT_EQ(ends[1].exit_code, 1) << transport << ": " << ends[1].error;
    if (transport == "gloo") {
      EXPECT_TRUE(contains(ends[1].error, "file descriptors")) << ends[1].error;
    }
  }
}

// The program takes the rest after the start has begun: rank 0 can accept rank 1, but not its memory.
TEST(Descriptors, MissingForAPeersMemoryAreSaid) {
  auto& board = Board::fresh();
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    if (rank == 0) {
      std::thread([&] {
        std::this_thread::sleep_for(500ms);
        limit_descriptors(1);
        board.marks++;
      }).detach();
    } else {
      board.wait_for(1);
    }
    open_comm("shm", member(run, rank, 2), 20s);
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(contains(end.error, "rank 0 has no file descriptor left")) << end.error;
    EXPECT_TRUE(contains(end.error, "ulimit -n")) << end.error;
    EXPECT_LT(end.seconds, 10);
  }
}

}  // namespace
}  // namespace zero::test::strangers_test
