// The transport for processes of one host, between real processes: the common checks of every
// transport, large tensors read in place, many operations, memory, and every way to fail.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include <zero/communicator.h>
#include <zero/errors.h>

#include "comm/transport.h"
#include "support/collective_checks.h"
#include "support/descriptors.h"
#include "support/fork_ranks.h"
#include "support/shm_ranks.h"

namespace zero::test::shm_test {
namespace {

using namespace std::chrono_literals;

// This process's share of resident memory that is shared, in bytes.
std::int64_t shared_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Pss_Shmem:", 0) == 0) return std::stoll(line.substr(10)) * 1024;
  }
  return -1;
}

class ShmWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Shm, ShmWorlds, ::testing::Values(1, 2, 3, 4));

TEST_P(ShmWorlds, KeepTheContract) {
  const auto ends = with_ranks(GetParam(), check_all);
  EXPECT_EQ(errors_of(ends), "");
}

TEST_P(ShmWorlds, KeepItWhenRanksAreDelayed) {
  const auto ends = with_ranks(GetParam(), [](const Comm& comm) {
    for (std::uint64_t seed = 20; seed < 24; ++seed) {
      check_random_program(comm, seed, 60);
      const auto rank = static_cast<std::uint64_t>(comm->rank());
      std::this_thread::sleep_for(std::chrono::milliseconds((seed * 7 + rank * 13) % 29));
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

// Inputs of every size around the limits of staging, of one phase and of reading in place; in the
// arena and outside it; overwritten at once after the wait.
TEST_P(ShmWorlds, MoveLargeTensorsInPlaceAndStaged) {
  const auto ends = with_ranks(GetParam(), [](const Comm& comm) {
    const int size = comm->size(), rank = comm->rank();
    for (const std::int64_t numel : {4096, 4097, 16384, 16385, 100003}) {
      for (const bool allocated : {true, false}) {
        const auto memory = [&](std::int64_t n) { return allocated ? comm->allocate(n, at::kFloat) : at::empty({n}); };
        for (int round = 0; round < 6; ++round) {
          const auto value = [&](int r, std::int64_t i) {
            return static_cast<float>((r + 1) * 1000 + (i * 7 + round) % 501);
          };
          const auto sum = [&](std::int64_t i) {
            float all = 0;
            for (int r = 0; r < size; ++r) all += value(r, i);
            return all;
          };
          const auto filled = [&](std::int64_t n) {
            auto tensor = memory(n);
            for (std::int64_t i = 0; i < n; ++i) tensor.mutable_data_ptr<float>()[i] = value(rank, i);
            return tensor;
          };
          auto part = filled(numel), whole = memory(numel * size);
          auto reduced = filled(numel), scattered = memory(numel), sent = filled(numel);
          auto parts = filled(numel * size), turned = memory(numel * size);
          auto a = comm->all_gather(whole, part);
          auto b = comm->all_reduce(reduced);
          auto c = comm->reduce_scatter(scattered, parts);
          auto d = comm->all_to_all(turned, parts);
          auto e = comm->broadcast(sent, size - 1);
          if (rank % 2 == 0) d->wait();
          a->wait();
          part.fill_(-1);
          b->wait();
          c->wait();
          d->wait();
          parts.fill_(-2);
          e->wait();
          for (std::int64_t i = 0; i < numel; ++i) {
            require(reduced.const_data_ptr<float>()[i] == sum(i), "all_reduce");
            require(scattered.const_data_ptr<float>()[i] == sum(rank * numel + i), "reduce_scatter");
            require(sent.const_data_ptr<float>()[i] == value(size - 1, i), "broadcast");
            for (int r = 0; r < size; ++r) {
              require(whole.const_data_ptr<float>()[r * numel + i] == value(r, i), "all_gather");
              require(turned.const_data_ptr<float>()[r * numel + i] == value(r, rank * numel + i), "all_to_all");
            }
          }
          sent.fill_(-3);
          reduced.fill_(-4);
        }
      }
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, Moves64MiB) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    const std::int64_t numel = (64 << 20) / 4;
    for (const bool allocated : {true, false}) {
      const auto memory = [&](std::int64_t n) { return allocated ? comm->allocate(n, at::kFloat) : at::empty({n}); };
      auto in = memory(numel), out = memory(numel / 2), all = memory(numel);
      torch::manual_seed(1);
      const auto noise = torch::randn({numel});
      in.copy_(noise * (comm->rank() + 1));
      comm->reduce_scatter(out, in)->wait();
      const auto expected = noise + noise * 2;
      require(out.equal(expected.narrow(0, comm->rank() * numel / 2, numel / 2)), "reduce_scatter");
      comm->all_gather(all, out)->wait();
      require(all.equal(expected), "all_gather");
      comm->all_reduce(in)->wait();
      require(in.equal(expected), "all_reduce");
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, Runs5000SmallOperations) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    auto one = comm->allocate(3, at::kFloat), all = comm->allocate(9, at::kFloat);
    for (int i = 0; i < 5000; ++i) {
      one.fill_(static_cast<float>(i + comm->rank()));
      if (i % 2 == 0) {
        comm->all_gather(all, one)->wait();
        for (int r = 0; r < 3; ++r) require(all[r * 3].item<float>() == static_cast<float>(i + r), "gathered");
      } else {
        comm->all_reduce(one)->wait();
        require(one[2].item<float>() == static_cast<float>(3 * i + 3), "reduced");
      }
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

// More operations without a wait than there are slots for announcements.
TEST(Shm, Holds500OperationsInFlight) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    std::vector<at::Tensor> tensors;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 500; ++i) {
      const std::int64_t numel = i % 3 == 0 ? 20000 : 5000;  // in place; two phases
      auto tensor = comm->allocate(numel, at::kFloat);
      tensor.fill_(static_cast<float>(i + comm->rank()));
      works.push_back(comm->all_reduce(tensor));
      tensors.push_back(tensor);
    }
    for (int i = 499; i >= 0; --i) {
      const auto index = static_cast<std::size_t>(i);
      works[index]->wait();
      require(tensors[index].eq(3 * i + 3).all().item<bool>(), "operation " + std::to_string(i));
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, ExchangesUpTo10MiB) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{65536}, std::size_t{10} << 20}) {
      const auto message = [&](int r) {
        return std::string(bytes + static_cast<std::size_t>(r), static_cast<char>('a' + r));
      };
      const auto got = comm->all_gather_bytes(message(comm->rank()));
      for (int r = 0; r < 3; ++r) require(got.at(static_cast<std::size_t>(r)) == message(r), "a message differs");
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, DoneTellsWhetherWaitWouldBlock) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    auto tensor = at::ones({8000});  // two phases
    if (comm->rank() == 1) comm->all_gather_bytes("later");
    auto work = comm->rank() == 0 ? nullptr : comm->all_reduce(tensor);
    if (comm->rank() == 0) {
      comm->all_gather_bytes("later");
      std::this_thread::sleep_for(50ms);
      work = comm->all_reduce(tensor);
    } else {
      require(!work->done(), "done before rank 0 came");
    }
    while (!work->done()) std::this_thread::sleep_for(1ms);
    work->wait();
    require(tensor.eq(2).all().item<bool>(), "sum");
  });
  EXPECT_EQ(errors_of(ends), "");
}

// --- memory

TEST(Shm, GivesMemoryBack) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    constexpr std::int64_t kBytes = 128 << 20;
    comm->barrier();
    const auto before = shared_bytes();
    {
      auto tensor = comm->allocate(kBytes, at::kByte);
      tensor.fill_(1);
      const auto held = shared_bytes() - before;
      require(std::abs(held - kBytes) < kBytes / 20, "holds " + std::to_string(held) + " bytes for 128 MiB");
      comm->barrier();
    }
    comm->barrier();
    // Staging of operations on memory of others.
    {
      auto plain = at::ones({16 << 20});
      comm->all_reduce(plain)->wait();
    }
    require(shared_bytes() - before > 8 << 20, "no staging piece is kept for the next operation");
    for (int i = 0; i < 40; ++i) comm->barrier();
    require(shared_bytes() - before < 10 << 20, "idle staging pieces stay");
    // Many small pieces.
    {
      std::vector<at::Tensor> pieces;
      for (int i = 0; i < 3000; ++i) pieces.push_back(comm->allocate(20000 + i, at::kByte).fill_(1));
      for (std::size_t i = 0; i < pieces.size(); i += 2) pieces[i] = at::Tensor();
    }
    comm->barrier();
    const auto after = shared_bytes() - before;
    require(after < 10 << 20, "still holds " + std::to_string(after) + " bytes");
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, TensorsOutliveTheTransport) {
  const auto ends = with_ranks(2, [](Comm comm) {
    auto tensor = comm->allocate(100000, at::kFloat), small = comm->allocate(10, at::kFloat);
    auto other = comm->allocate(7, at::kHalf);
    tensor.fill_(comm->rank());
    comm->all_reduce(tensor)->wait();
    auto work = comm->all_reduce(tensor);
    work->wait();
    other = at::Tensor();
    comm.reset();
    require(tensor.eq(2).all().item<bool>(), "value");
    work->wait();
    small.fill_(1);
    tensor = at::Tensor();
    small = at::Tensor();
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, RefusesMoreThanTheMachineHas) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    std::string text;
    try {
      comm->allocate(std::int64_t{1} << 46, at::kFloat);
    } catch (const IoError& e) {
      text = e.what();
    }
    require(contains(text, std::to_string(std::int64_t{1} << 48)), "got '" + text + "'");
    // More bytes than an integer can represent.
    bool refused = false;
    try {
      comm->allocate(std::int64_t{1} << 62, at::kFloat);
    } catch (const IoError&) {
      refused = true;
    }
    require(refused, "2^64 bytes were allocated");
    auto tensor = at::ones({4});
    comm->all_reduce(tensor)->wait();  // still works
  });
  EXPECT_EQ(errors_of(ends), "");
}

// Sockets of this process where ranks of one host meet. Other runs of the machine have theirs.
std::ptrdiff_t meeting_sockets() {
  const auto own = sockets_of(::getpid());
  std::ptrdiff_t found = 0;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    std::istringstream fields(line);
    std::string field;
    for (int i = 0; i < 7; ++i) fields >> field;  // the seventh is the inode
    found += contains(line, "@zero-shm-") && own.contains(field);
  }
  return found;
}

TEST(Shm, LeavesNothingBehind) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    std::ptrdiff_t before = 0;
    for (int round = 0; round < 20; ++round) {
      {
        auto comm = join_run(run_id + std::to_string(round), rank, 2);
        comm->barrier();
        require(meeting_sockets() == 0, "a socket is left");
        comm->barrier();
      }
      if (round == 0) before = open_descriptors();
    }
    require(open_descriptors() == before,
            "descriptors grew from " + std::to_string(before) + " to " + std::to_string(open_descriptors()));
    require(::access("/dev/shm/zero-arena", F_OK) != 0, "a file in /dev/shm");
  });
  EXPECT_EQ(errors_of(ends), "");
}

// --- failures

// All ranks except `culprit` fail with a CommError that names it and contains `text`.
void expect_blamed(const std::vector<RankEnd>& ends, int culprit, const std::string& text) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    if (static_cast<int>(rank) == culprit) continue;
    EXPECT_EQ(ends[rank].exit_code, 1) << "rank " << rank;
    EXPECT_EQ(ends[rank].blamed, culprit) << ends[rank].error;
    EXPECT_TRUE(contains(ends[rank].error, text)) << ends[rank].error;
  }
}

TEST(Shm, NamesAKilledPeer) {
  for (const int victim : {0, 2}) {
    for (const bool large : {false, true}) {
      const std::string run_id = fresh_run_id();
      const auto ends = fork_ranks(4, [&](int rank) {
        auto comm = join_run(run_id, rank, 4);
        const std::int64_t numel = large ? 100000 : 10;
        auto in = comm->allocate(numel, at::kFloat), out = comm->allocate(4 * numel, at::kFloat);
        in.fill_(1);
        comm->all_gather(out, in)->wait();
        if (rank == victim) {
          // Dies after announcing its part: the others have read it, but it has not read theirs.
          auto work = comm->all_gather(out, in);
          ::raise(SIGKILL);
        }
        for (;;) comm->all_gather(out, in)->wait();
      });
      expect_blamed(ends, victim, "rank " + std::to_string(victim) + " (pid ");
      EXPECT_EQ(ends[static_cast<std::size_t>(victim)].signal, SIGKILL);
      for (const auto& end : ends) {
        if (end.signal == 0) {
          EXPECT_TRUE(contains(end.error, "is gone")) << end.error;
        }
      }
    }
  }
}

TEST(Shm, NamesAKilledPeerToAProgramThatPolls) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(3, [&](int rank) {
    auto comm = join_run(run_id, rank, 3);
    comm->barrier();
    if (rank == 1) ::raise(SIGKILL);
    auto work = comm->all_reduce(at::ones({10}));
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (!work->done()) {
      require(std::chrono::steady_clock::now() < until, "done() does not notice that a peer died");
      std::this_thread::sleep_for(1ms);
    }
    work->wait();
  });
  expect_blamed(ends, 1, "rank 1 (pid ");
}

TEST(Shm, NamesAPeerThatLeft) {
  SharedCounter informed;
  const auto ends = with_ranks(3, [&](Comm comm) {
    if (comm->rank() == 1) {
      comm.reset();
      informed.wait_for(2);  // the process is alive, but no longer a rank
      return;
    }
    try {
      comm->barrier();
    } catch (const CommError&) {
      informed.add();
      throw;
    }
  });
  expect_blamed(ends, 1, "has ended");
}

// The last operation of a rank that leaves at once is complete for the others.
TEST(Shm, LetsPeersLeaveAfterTheirLastOperation) {
  for (int round = 0; round < 10; ++round) {
    const auto ends = with_ranks(3, [](const Comm& comm) {
      for (const std::int64_t numel : {5, 7000, 70000}) {
        auto tensor = comm->allocate(numel, at::kFloat);
        tensor.fill_(1);
        if (comm->rank() == 2) std::this_thread::sleep_for(5ms);
        comm->all_reduce(tensor)->wait();
        require(tensor.eq(3).all().item<bool>(), "sum");
      }
      auto plain = at::ones({30000});
      comm->broadcast(plain, 0)->wait();
      require(plain.eq(1).all().item<bool>(), "broadcast");
    });
    EXPECT_EQ(errors_of(ends), "");
  }
}

// If a rank leaves with an operation in flight, peers can still read its data, even if the memory was freed.
TEST(Shm, KeepsItsWordAfterItLeft) {
  for (const std::int64_t numel : {100, 100000, 3 << 20}) {
    for (const bool allocated : {true, false}) {
      const auto ends = with_ranks(2, [&](Comm comm) {
        auto tensor = allocated ? comm->allocate(numel, at::kFloat) : at::empty({numel});
        tensor.fill_(comm->rank() == 0 ? 7 : 1);
        auto work = comm->broadcast(tensor, 0);
        if (comm->rank() == 0) {
          auto later = comm->allocate(1, at::kFloat);  // keeps the arena
          work.reset();
          tensor = at::Tensor();
          comm.reset();
          std::this_thread::sleep_for(400ms);
          return;
        }
        std::this_thread::sleep_for(200ms);
        work->wait();
        require(tensor.eq(7).all().item<bool>(), "got " + std::to_string(tensor[0].item<float>()));
      });
      EXPECT_EQ(errors_of(ends), "") << numel << " elements";
    }
  }
}

TEST(Shm, NamesThoseWhoDoNotCome) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    join_run(run_id, rank, 4, 500ms);
  });
  for (const int rank : {0, 2}) {
    const RankEnd& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(contains(end.error, "ranks 1, 3 did not come within 500 ms")) << end.error;
    EXPECT_EQ(end.blamed, 1);
  }
}

TEST(Shm, NamesAnAbsentRank0) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    if (rank != 0) join_run(run_id, rank, 2, 300ms);
  });
  expect_blamed(ends, 0, "rank 0 did not come within 300 ms");
}

TEST(Shm, NamesAPeerThatDiesWhileTheOthersCome) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(3, [&](int rank) {
    if (rank == 2) return;
    if (rank == 1) {
      ::alarm(1);  // SIGALRM ends it while it waits for rank 2
    }
    join_run(run_id, rank, 3, 20s);
  });
  EXPECT_EQ(ends[1].signal, SIGALRM);
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
  EXPECT_TRUE(contains(ends[0].error, "died while the others came")) << ends[0].error;
}

TEST(Shm, RefusesTwoProcessesOfOneRank) {
  for (const int twice : {0, 1}) {
    const std::string run_id = fresh_run_id();
    const auto ends = fork_ranks(3, [&](int process) {
      // Later, so that the others are already waiting.
      if (process == 2) std::this_thread::sleep_for(1s);
      join_run(run_id, process == 2 ? twice : process, 4, 15s);
    });
    const std::string text = "two processes claim rank " + std::to_string(twice);
    for (const auto& end : ends) {
      EXPECT_EQ(end.exit_code, 1);
      EXPECT_TRUE(contains(end.error, text)) << end.error;
    }
  }
}

TEST(Shm, RefusesAWorldOfAnotherSize) {
  const std::string run_id = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) { join_run(run_id, rank, rank == 0 ? 2 : 3, 5s); });
  for (const auto& end : ends) EXPECT_TRUE(contains(end.error, "is of a world of 3")) << end.error;
}

TEST(Shm, KeepsRunsApart) {
  const std::string first = fresh_run_id(), second = fresh_run_id();
  const auto ends = fork_ranks(4, [&](int process) {
    auto comm = join_run(process < 2 ? first : second, process % 2, 2);
    const auto got = comm->all_gather_bytes(std::to_string(process / 2));
    require(got[0] == got[1], "a message of another run");
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Shm, NamesBothCallsOfADisagreement) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    auto tensor = at::ones({12});
    comm->barrier();
    if (comm->rank() == 0) {
      comm->all_reduce(tensor)->wait();
    } else {
      comm->broadcast(tensor, 0)->wait();
    }
  });
  for (const auto& end : ends) {
    EXPECT_TRUE(contains(end.error, "all_reduce(fp32, 12 elements)")) << end.error;
    EXPECT_TRUE(contains(end.error, "broadcast(fp32, 12 elements, root 0)")) << end.error;
    EXPECT_TRUE(contains(end.error, "operation 1)")) << end.error;
  }
  const auto sizes = with_ranks(2, [](const Comm& comm) {
    auto tensor = at::ones({12 + comm->rank()}, comm->rank() == 0 ? at::kFloat : at::kHalf);
    comm->all_reduce(tensor)->wait();
  });
  for (const auto& end : sizes) {
    EXPECT_TRUE(contains(end.error, "all_reduce(fp32, 12 elements)")) << end.error;
    EXPECT_TRUE(contains(end.error, "all_reduce(fp16, 13 elements)")) << end.error;
  }
  // Only one argument differs: the number of elements, or the root.
  const auto numels = with_ranks(2, [](const Comm& comm) { comm->all_reduce(at::ones({12 + comm->rank()}))->wait(); });
  for (const auto& end : numels) {
    EXPECT_TRUE(contains(end.error, "all_reduce(fp32, 12 elements)")) << end.error;
    EXPECT_TRUE(contains(end.error, "all_reduce(fp32, 13 elements)")) << end.error;
  }
  const auto roots = with_ranks(2, [](const Comm& comm) {
    comm->broadcast(at::ones({12}), comm->rank())->wait();  // a root does not wait for other ranks
    comm->barrier();
  });
  for (const auto& end : roots) {
    EXPECT_TRUE(contains(end.error, "root 0)")) << end.error;
    EXPECT_TRUE(contains(end.error, "root 1)")) << end.error;
  }
}

TEST(Shm, TellsOfAnAbort) {
  for (const int culprit : {0, 2}) {
    const auto ends = with_ranks(3, [&](const Comm& comm) { check_abort(comm, culprit); });
    EXPECT_EQ(errors_of(ends), "");
  }
}

TEST(Shm, NamesALatePeer) {
  for (const int absent : {0, 1}) {
    const auto ends = with_ranks(3, [&](const Comm& comm) { check_timeout(comm, absent, 500ms); });
    EXPECT_EQ(errors_of(ends), "");
  }
  // The error names the last operation of the late rank.
  const auto ends = with_ranks(2, [](const Comm& comm) {
    comm->barrier();
    auto tensor = at::ones({5});
    comm->all_reduce(tensor)->wait();
    comm->set_timeout(300ms);
    if (comm->rank() == 1) return std::this_thread::sleep_for(1500ms);
    comm->all_gather(at::empty({10}), tensor)->wait();
  });
  EXPECT_TRUE(contains(ends[0].error, "called all_reduce(fp32, 5 elements) last, operation 1")) << ends[0].error;
  EXPECT_TRUE(contains(ends[0].error, "within 300 ms")) << ends[0].error;
}

}  // namespace
}  // namespace zero::test::shm_test
