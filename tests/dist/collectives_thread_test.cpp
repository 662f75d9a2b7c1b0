// Ranks as threads, and world size 1: the checks common to all transports, then cases that only threads can simulate:
// delays, failures at an exact call, absence, and mismatched calls.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include <zero/errors.h>

#include "support/collective_checks.h"

namespace zero::collectives_thread_test {
namespace {

using Comm = std::shared_ptr<Communicator>;
using Milliseconds = std::chrono::milliseconds;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The CommError each rank ends with ("" for none), whatever run_ranks rethrows.
struct Told {
  std::string text;
  int rank = -2;
};
std::vector<Told> told(int world, const ThreadFaults& faults, const std::function<void(Comm)>& body,
                       std::string* rethrown = nullptr) {
  std::vector<Told> errors(static_cast<std::size_t>(world));
  try {
    run_ranks(world, faults, [&](Comm comm) {
      try {
        body(comm);
      } catch (const CommError& e) {
        errors[static_cast<std::size_t>(comm->rank())] = {e.what(), e.rank()};
        throw;
      }
    });
  } catch (const std::exception& e) {
    if (rethrown) *rethrown = e.what();
  }
  return errors;
}

class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Thread, Worlds, ::testing::Range(1, 6));

TEST_P(Worlds, KeepTheContract) { run_ranks(GetParam(), test::check_all); }

TEST_P(Worlds, KeepItWhenRanksAreDelayed) {
  ThreadFaults faults;
  faults.before = [](int rank, std::uint64_t sequence, std::string_view) {
    std::minstd_rand random(static_cast<unsigned>(rank * 1000 + sequence + 1));
    random.discard(3);
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  };
  for (std::uint64_t seed = 10; seed < 13; ++seed)
    run_ranks(GetParam(), faults, [seed](Comm comm) { test::check_random_program(comm, seed, 80); });
}

TEST(Local, KeepsTheContract) {
  auto comm = Communicator::local();
  EXPECT_EQ(comm->size(), 1);
  EXPECT_EQ(comm->transport(), "local");
  test::check_all(comm);
}

TEST(Local, MovesNothingThatIsInPlace) {
  auto comm = Communicator::local();
  auto tensor = at::arange(5).to(at::kFloat);
  const auto* data = tensor.const_data_ptr();
  EXPECT_TRUE(comm->all_gather(tensor, tensor)->done());
  EXPECT_TRUE(comm->reduce_scatter(tensor, tensor)->done());
  comm->all_reduce(tensor)->wait();
  EXPECT_TRUE(at::equal(tensor, at::arange(5).to(at::kFloat)));
  EXPECT_EQ(tensor.const_data_ptr(), data);
  EXPECT_EQ(comm->stats().bytes_sent(), 0u);
  EXPECT_EQ(comm->stats().by_op.at("all_gather").calls, 1u);
}

TEST(Local, IsUnusableAfterAnAbort) {
  auto comm = Communicator::local();
  comm->abort("enough");
  EXPECT_THROW(comm->barrier(), CommError);
  EXPECT_THROW(comm->all_reduce(at::ones({2})), CommError);
}

TEST(Thread, AbortReachesAll) {
  for (const int world : {2, 4}) {
    for (const int culprit : {0, world - 1}) run_ranks(world, [=](Comm comm) { test::check_abort(comm, culprit); });
  }
}

TEST(Thread, TheAbsentRankIsNamed) {
  for (const int world : {2, 3, 5}) {
    for (const int absent : {0, world - 1})
      run_ranks(world, [=](Comm comm) { test::check_timeout(comm, absent, Milliseconds(150)); });
  }
}

TEST(Thread, AllAbsentRanksAreNamed) {
  ThreadFaults faults;
  faults.timeout = Milliseconds(1000);
  std::atomic<int> here{0}, heard{0};
  const auto errors = told(4, faults, [&](Comm comm) {
    if (comm->rank() % 2 == 1) {
      while (heard < 2) std::this_thread::yield();
      comm->barrier();
      return;
    }
    ++here;
    while (here < 2) std::this_thread::yield();  // both wait from here
    try {
      comm->barrier();
    } catch (...) {
      ++heard;
      throw;
    }
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error.text, "ranks 1, 3 within 1 s")) << error.text;
    EXPECT_EQ(error.rank, -1);
  }
  EXPECT_TRUE(contains(errors[2].text, "(rank 2/4, operation 0)")) << errors[2].text;
}

TEST(Thread, ARankThatHasEndedIsNotWaitedFor) {
  ThreadFaults faults;
  faults.timeout = std::chrono::minutes(10);
  const auto errors = told(3, faults, [](Comm comm) {
    comm->barrier();
    if (comm->rank() == 1) return;
    comm->all_reduce(at::ones({4}))->wait();
  });
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(contains(errors[static_cast<std::size_t>(rank)].text, "rank 1 has ended"))
        << errors[static_cast<std::size_t>(rank)].text;
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)].rank, 1);
  }
}

TEST(Thread, EndingWhilePeersStillWaitForAnOldOperationIsFine) {
  run_ranks(3, [](Comm comm) {
    auto tensor = at::ones({1000});
    auto work = comm->all_reduce(tensor);
    if (comm->rank() == 0) std::this_thread::sleep_for(Milliseconds(50));
    if (comm->rank() == 2) return;  // its part is posted, and it needs no result
    work->wait();
    if (tensor[999].item<float>() != 3) throw std::runtime_error("wrong sum");
  });
}

TEST(Thread, DifferentCallsNameBoth) {
  const std::vector<std::tuple<std::function<void(Comm)>, std::function<void(Comm)>, std::string, std::string>> cases{
      {[](Comm c) { c->all_reduce(at::ones({6}))->wait(); }, [](Comm c) { c->broadcast(at::ones({6}), 0)->wait(); },
       "all_reduce(fp32, 6 elements)", "broadcast(fp32, 6 elements, root 0)"},
      {[](Comm c) { c->all_reduce(at::ones({6}))->wait(); },
       [](Comm c) { c->all_reduce(at::ones({6}, at::kHalf))->wait(); }, "all_reduce(fp32, 6 elements)",
       "all_reduce(fp16, 6 elements)"},
      {[](Comm c) { c->all_reduce(at::ones({6}))->wait(); }, [](Comm c) { c->all_reduce(at::ones({1}))->wait(); },
       "all_reduce(fp32, 6 elements)", "all_reduce(fp32, 1 element)"},
      {[](Comm c) { c->broadcast(at::ones({6}), 1)->wait(); }, [](Comm c) { c->broadcast(at::ones({6}), 2)->wait(); },
       "broadcast(fp32, 6 elements, root 1)", "broadcast(fp32, 6 elements, root 2)"},
      {[](Comm c) { c->all_reduce(at::ones({6}))->wait(); }, [](Comm c) { c->all_gather_bytes("text"); },
       "all_reduce(fp32, 6 elements)", "all_gather_bytes()"},
  };
  for (const auto& [common, other, common_text, other_text] : cases) {
    std::string rethrown;
    const auto errors = told(
        3, {},
        [&](Comm comm) {
          for (int i = 0; i < 4; ++i) comm->barrier();
          (comm->rank() == 2 ? other : common)(comm);
        },
        &rethrown);
    for (const auto& error : errors) {
      EXPECT_TRUE(contains(error.text, common_text)) << error.text;
      EXPECT_TRUE(contains(error.text, "rank 2 calls " + other_text)) << error.text;
      EXPECT_TRUE(contains(error.text, "operation 4")) << error.text;
    }
    EXPECT_TRUE(contains(rethrown, other_text)) << rethrown;
  }
}

TEST(Thread, AFailingRankIsToldToAllAndItsErrorRethrown) {
  struct Own : std::logic_error {
    using std::logic_error::logic_error;
  };
  std::vector<Told> errors(4);
  std::atomic<int> ended = 0;
  const auto body = [&](Comm comm) {
    struct Count {
      std::atomic<int>& ended;
      ~Count() { ++ended; }
    } count{ended};
    try {
      for (int i = 0; i < 10; ++i) {
        if (comm->rank() == 2 && i == 5) throw Own("disk full");
        comm->all_reduce(at::ones({10}))->wait();
      }
    } catch (const CommError& e) {
      errors[static_cast<std::size_t>(comm->rank())] = {e.what(), e.rank()};
      throw;
    }
  };
  EXPECT_THROW(run_ranks(4, body), Own);
  EXPECT_EQ(ended, 4);
  for (const std::size_t rank : {0, 1, 3}) {
    EXPECT_EQ(errors[rank].rank, 2);
    EXPECT_TRUE(contains(errors[rank].text, "rank 2 failed: disk full")) << errors[rank].text;
  }
}

TEST(Thread, AFailureInjectedBeforeOneCall) {
  ThreadFaults faults;
  std::mutex mutex;
  std::vector<std::vector<std::string>> seen(3);
  faults.before = [&](int rank, std::uint64_t sequence, std::string_view op) {
    std::lock_guard lock(mutex);
    auto& mine = seen[static_cast<std::size_t>(rank)];
    EXPECT_EQ(sequence, mine.size());
    mine.emplace_back(op);
    if (rank == 1 && sequence == 4) throw std::runtime_error("injected");
  };
  std::string rethrown;
  const auto errors = told(
      3, faults,
      [](Comm comm) {
        comm->barrier();
        comm->all_gather(at::empty({3}), at::ones({1}))->wait();
        comm->reduce_scatter(at::empty({1}), at::ones({3}))->wait();
        comm->all_to_all(at::empty({3}), at::ones({3}))->wait();
        comm->broadcast(at::ones({3}), 0)->wait();
        comm->all_reduce(at::ones({3}))->wait();
      },
      &rethrown);
  EXPECT_EQ(rethrown, "injected");
  EXPECT_EQ(seen[1],
            (std::vector<std::string>{"all_gather_bytes", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}));
  for (const std::size_t rank : {0, 2})
    EXPECT_TRUE(contains(errors[rank].text, "rank 1 failed: injected")) << errors[rank].text;
}

TEST(Thread, TheFirstFailureInTimeIsRethrown) {
  for (const int first : {0, 1, 2}) {
    try {
      run_ranks(3, [&](Comm comm) {
        try {
          if (comm->rank() != first) comm->barrier();  // until the first has failed
        } catch (const CommError&) {
        }
        throw std::runtime_error("rank " + std::to_string(comm->rank()));
      });
      FAIL() << "nothing thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_EQ(e.what(), "rank " + std::to_string(first));
    }
  }
}

TEST(Thread, AnErrorToldByAbortBeforeItIsThrownIsStillTheFirst) {
  for (int i = 0; i < 10; ++i) {
    std::atomic<int> ended{0};
    EXPECT_THROW(run_ranks(3,
                           [&](Comm comm) {
                             if (comm->rank() == 2) {
                               comm->abort("told");
                               while (ended < 2) std::this_thread::yield();  // the others end first
                               throw ConfigError("thrown");
                             }
                             try {
                               comm->barrier();
                             } catch (...) {
                               ++ended;
                               throw;
                             }
                           }),
                 ConfigError);
  }
}

TEST(Thread, AThrownIntIsAFailureToo) {
  EXPECT_THROW(run_ranks(2,
                         [](Comm comm) {
                           if (comm->rank() == 1) throw 7;
                           comm->barrier();
                         }),
               int);
}

TEST(Thread, WaitGivesItsErrorEveryTime) {
  run_ranks(2, [](Comm comm) {
    if (comm->rank() == 1) {
      comm->abort("gone");
      return;
    }
    std::shared_ptr<Work> work;
    try {
      work = comm->all_reduce(at::ones({2}));
    } catch (const CommError&) {
      return;  // told already
    }
    for (int i = 0; i < 3; ++i) {
      bool thrown = false;
      try {
        work->wait();
      } catch (const CommError& e) {
        thrown = e.rank() == 1;
      }
      if (!thrown || !work->done()) throw std::runtime_error("no error");
    }
  });
}

TEST(Thread, DoneTurnsTrueByItself) {
  std::atomic<bool> looked{false};
  run_ranks(2, [&](Comm comm) {
    while (comm->rank() == 1 && !looked) std::this_thread::yield();
    auto work = comm->all_reduce(at::ones({2}));
    if (comm->rank() == 0 && work->done()) throw std::runtime_error("done without the other rank");
    looked = true;
    while (!work->done()) std::this_thread::yield();
    work->wait();
  });
}

TEST(Thread, RanksComputeOnOneCoreAndLeaveTheProgramsNumberAlone) {
  const int before = at::get_num_threads();
  run_ranks(3, [](Comm comm) {
    comm->barrier();
    if (at::get_num_threads() != 1)
      throw std::runtime_error("a rank with " + std::to_string(at::get_num_threads()) + " threads");
  });
  EXPECT_EQ(at::get_num_threads(), before);
}

TEST(Thread, WrongArgumentsOfRunRanks) {
  EXPECT_THROW(run_ranks(0, [](Comm) {}), ConfigError);
  ThreadFaults faults;
  faults.timeout = Milliseconds(0);
  EXPECT_THROW(run_ranks(2, faults, [](Comm) {}), ConfigError);
}

}  // namespace
}  // namespace zero::collectives_thread_test
