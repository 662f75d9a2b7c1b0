// Processes that pretend to be rank 0 at the socket of one host, and ranks of the run that send what no rank sends:
// errors in words, in bounded memory.
#include <gtest/gtest.h>

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/c10d_rendezvous.h"
#include "comm/gloo/messenger.h"
#include "net/secret.h"
#include "net/socket.h"
#include "support/strangers.h"

namespace zero::test::fake_peers_test {
namespace {

using namespace std::chrono_literals;

// A process of this user that knows the name of rank 0's socket, but not the secret, and has it first.
class FakeRankZero {
 public:
  FakeRankZero(const std::string& run, bool shm) : run_(run), shm_(shm) {
    const net::LocalAddress address(net::local_name(shm ? "shm" : "meet", net::key_of(member(run, 0, 2))));
    fd_ = base::Descriptor(::socket(AF_UNIX, (shm ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    require(::bind(fd_.get(), address.get(), address.length) == 0 && ::listen(fd_.get(), 64) == 0, "bind");
  }

  // Answers each process that comes with what rank 0 would send, until `done`.
  void serve(const std::function<bool()>& done) const {
    const base::Descriptor memory(static_cast<int>(::memfd_create("stranger", MFD_CLOEXEC)));
    int answered = 0;
    while (!done()) {
      const base::Descriptor victim(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      pollfd polled{victim.get(), POLLIN, 0};
      if (!victim || ::poll(&polled, 1, 100) <= 0) {
        std::this_thread::sleep_for(1ms);
        continue;
      }
      ++answered;
      shm_ ? answer_shm(victim, memory.get()) : answer(victim);
      const auto told = rest_of(victim);
      require(told.empty(), "a rank has told something to a process without the secret");
    }
    require(answered > 0, "nobody came");
  }

 private:
  static std::string rest_of(const base::Descriptor& victim) {
    pollfd polled{victim.get(), POLLIN, 0};
    char bytes[4096];
    const auto got = ::poll(&polled, 1, 100) > 0 ? ::recv(victim.get(), bytes, sizeof bytes, MSG_DONTWAIT) : 0;
    return {bytes, static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
  }

  void answer(const base::Descriptor& victim) const {
    const auto hello = rest_of(victim);
    require(!contains(hello, "secret") && !contains(hello, run_), "the secret or the id was sent");
    for (const auto& frame : {net::encode('C', 0, std::string(64, 'x')), net::encode('W', 0, std::string(41, 'x')),
                              net::encode('X', 0, "0 forged")})
      ::send(victim.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
  }

  void answer_shm(const base::Descriptor& victim, int memory) const {
    ShmMessage message;
    require(::recv(victim.get(), &message, sizeof message, 0) == sizeof message, "an unknown greeting");
    const std::string greeting(reinterpret_cast<const char*>(&message), sizeof message);
    require(!contains(greeting, "secret") && !contains(greeting, run_), "the secret or the id was sent");
    message.kind = 1;
    ::send(victim.get(), &message, sizeof message, MSG_NOSIGNAL);
    for (message.rank = 0; message.rank < 2; ++message.rank) {
      message.kind = 3;
      send_memory(victim.get(), message, memory);
    }
    message.kind = 4;
    std::strcpy(message.text, "forged");
    ::send(victim.get(), &message, sizeof message, MSG_NOSIGNAL);
  }

  const std::string run_;
  const bool shm_;
  base::Descriptor fd_;
};

TEST(StrangersAsRankZero, WhoHaveRankZerosSocketEndTheStartInWordsAndNoByteOfThemIsUsed) {
  for (const std::string transport : {"shm", "gloo"}) {
    auto& board = Board::fresh();
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(3, [&](int rank) {
      if (rank == 2) {
        const FakeRankZero fake(run, transport == "shm");
        board.marks++;
        return fake.serve([&] { return board.marks == 3; });
      }
      board.wait_for(1);
      try {
        open_comm(transport, member(run, rank, 2), 1s);
      } catch (...) {
        board.marks++;
        throw;
      }
      board.marks++;
    });
    EXPECT_EQ(ends[2].error, "") << transport;
    for (const int rank : {0, 1}) {
      const auto& error = ends[rank].error;
      // Rank 0 of a meeting cannot tell one from another run's rank 0.
      EXPECT_TRUE(contains(
          error, rank == 0 && transport == "gloo" ? "got a living rank 0 at" : "did not prove the run's secret"))
          << transport << ": " << error;
      EXPECT_FALSE(contains(error, "forged")) << error;
      EXPECT_LT(ends[rank].seconds, 20) << transport;
    }
  }
}

// ---- members that send too much ----
// Reads frames until one of `kind` has come.
net::Frame next_frame(const base::Descriptor& fd, std::string& in) {
  net::Frame frame;
  while (net::decode(in, frame) == 0) {
    pollfd polled{fd.get(), POLLIN, 0};
    ::poll(&polled, 1, 10'000);
    char bytes[4096];
    const auto got = ::recv(fd.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    require(got > 0, "rank 0 has closed the connection");
    in.append(bytes, static_cast<std::size_t>(got));
  }
  return frame;
}

TEST(PeerLimits, ARankThatNeverStopsSendingFillsNoMemory) {
  auto& board = Board::fresh();
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    if (rank == 0) {
      std::thread([&] {
        board.wait_for(1);
        ::_exit(0);
      }).detach();
      comm::rendezvous(member(run, 0, 3), 60s);  // rank 2 does not come
      return;
    }
    const auto key = net::key_of(member(run, 1, 3));
    base::Descriptor fd;
    while (!(fd = net::connect_to(net::local_meeting_point(key)))) std::this_thread::sleep_for(1ms);
    net::Handshake handshake{"control", 3, 1, 0, net::fresh_nonce(), ""};
    const auto hello = net::encode('H', 1, handshake.asked + "3");
    ::send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL);
    std::string in;
    handshake.answered = next_frame(fd, in).payload.substr(0, net::kProofBytes);
    const auto proof = net::encode('R', 1, handshake.proof(key, 'C'));
    ::send(fd.get(), proof.data(), proof.size(), MSG_NOSIGNAL);
    require(next_frame(fd, in).kind == 'M', "rank 0 does not take the proof");
    const auto frame = net::encode('P', 1, std::string(60'000, 'p'));
    std::size_t sent = 0;
    for (auto last = net::Clock::now(); net::Clock::now() - last < 500ms && sent < 16 << 20;) {
      const auto more = ::send(fd.get(), frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (more <= 0) {
        std::this_thread::sleep_for(5ms);
        continue;
      }
      sent += static_cast<std::size_t>(more);
      last = net::Clock::now();
    }
    board.marks++;
    // What rank 0 holds, and the buffers of the kernel.
    require(sent < 4 << 20, "rank 0 took " + std::to_string(sent) + " bytes before the start");
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(PeerLimits, KeysOfARankAreLimited) {
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    const auto watch = comm::rendezvous(member(run, rank, 2), 20s);
    // What ranks need passes.
    if (rank == 1) watch->set("first", std::string(60'000, 'v'));
    require(watch->get("first", net::Clock::now() + 20s).size() == 60'000, "another value");
    for (int i = 0; rank == 1 && i < 40; ++i) watch->set("key " + std::to_string(i), std::string(60'000, 'v'));
    watch->get("of nobody", net::Clock::now() + 20s);
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(contains(end.error, "bytes of keys, the last of rank 1")) << end.error;
    EXPECT_EQ(end.blamed, 1);
  }
}

// Rank 1 is of the run, so its proof is right, and then says that a message of this length follows.
TEST(PeerLimits, LengthsOfMessagesAreChecked) {
  for (const std::uint64_t length : {std::uint64_t{1} << 40, std::uint64_t{1} << 63}) {
    const auto run = fresh_run_id();
    const auto ends = fork_ranks(2, [&](int rank) {
      at::set_num_threads(1);
      comm::Messenger messenger(member(run, rank, 2), 20s);
      const auto work = messenger.begin_all_gather_bytes();
      if (rank == 0) {
        comm::all_gather_bytes(*work, {0, 1}, 0, "short");
        return;
      }
      auto slots = at::zeros({2, 256}, at::kByte);
      std::memcpy(slots.mutable_data_ptr(), &length, sizeof length);
      work->receive(0, slots[1]);
      work->send(0, slots[0]);
      work->wait();
      messenger.watch().get("of nobody", net::Clock::now() + 20s);
    });
    for (const auto& end : ends)
      EXPECT_TRUE(contains(end.error, "got a message of " + std::to_string(length) + " bytes from rank 1"))
          << end.error;
  }
}

}  // namespace
}  // namespace zero::test::fake_peers_test
