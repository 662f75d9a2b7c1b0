// Communicator::from_process_group over c10d's gloo group, which each test makes as a program would: values of every
// collective, an Engine's bits, failures and refusals.
#include <ATen/Parallel.h>
#include <torch/types.h>
#include <zero/library.h>

#include <csignal>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "parity/training.h"
#include "support/collective_checks.h"
#include "support/folder.h"
#include "support/process_groups.h"
#include "support/tcp_ranks.h"

namespace zero::test::process_group_test {
namespace {

using namespace std::chrono_literals;
using Backend = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
using Comm = std::shared_ptr<Communicator>;

// Runs body(group, rank) in `size` processes that share a gloo group.
std::vector<RankEnd> with_groups(int size, const std::function<void(Backend, int)>& body) {
  const TempFolder folder;
  return fork_ranks(size, [&](int rank) {
    at::set_num_threads(1);
    body(process_group(folder.file("store"), rank, size, 30s), rank);
  });
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

class ProcessGroups : public testing::TestWithParam<int> {};

}  // namespace

TEST_P(ProcessGroups, EveryCollectiveMatchesTheNaiveOne) {
  const auto ends = with_groups(GetParam(), [](Backend group, int rank) {
    auto comm = Communicator::from_process_group(group);
    require(comm->transport() == "c10d" && comm->rank() == rank && comm->size() == group->getSize(), "another rank");
    require(comm->local_rank() == rank && comm->local_size() == comm->size(), "all ranks are on one host");
    check_all(comm);
  });
  EXPECT_EQ(errors_of(ends), "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProcessGroups, testing::Values(1, 2, 3));

TEST(ProcessGroup, NoticesPartsOfDifferentSizes) {
  const auto ends = with_groups(2, [](Backend group, int rank) {
    auto comm = Communicator::from_process_group(group);
    const std::vector<std::int64_t> sent{1, rank == 0 ? 3 : 1}, expected{rank == 0 ? 1 : 4, 1};
    std::string text;
    try {
      comm->all_to_all(at::empty({rank == 0 ? 2 : 5}), at::ones({rank == 0 ? 4 : 2}), expected, sent)->wait();
    } catch (const CommError& error) {
      text = error.what();
    }
    // Without a store, rank 0 only sees that the connection closes.
    require(rank == 0 ? !text.empty() : contains(text, "rank 0 sends 3 elements to rank 1, which expects 4"), text);
  });
  EXPECT_EQ(errors_of(ends), "");
}

// As torch's init_process_group makes it, with a backend for CPU tensors inside; two Communicators one after the other.
TEST(ProcessGroup, GivesItsBackendForCpus) {
  const auto ends = with_groups(2, [](Backend backend, int rank) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
    require(!refusal([&] { Communicator::from_process_group(group); }).empty(), "a group without a backend");
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    for (int i = 0; i < 2; ++i) {
      auto comm = Communicator::from_process_group(group);
      // The other rank waits long enough that it could read keys of the first Communicator in the store.
      if (i == 1 && rank == 1) std::this_thread::sleep_for(300ms);
      auto sum = at::full({5}, static_cast<float>(rank + 1));
      comm->all_reduce(sum)->wait();
      require(sum[4].item<float>() == 3, "another sum");
      comm->abort("done with it");
    }
    auto pair = Communicator::from_process_group(group)->split(0, -rank);  // meets at the store of the backend
    require(pair->rank() == 1 - rank && pair->all_gather_bytes(std::to_string(rank))[0] == "1", "another group");
    require(!refusal([] { Communicator::from_process_group(Backend()); }).empty(), "no group");
  });
  EXPECT_EQ(errors_of(ends), "");
}

// A backend of another library, of one rank.
class OtherBackend final : public c10d::Backend {
 public:
  OtherBackend() : c10d::Backend(0, 1) {}
  const std::string getBackendName() const override { return "other"; }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions&) override {
    struct Done final : c10d::Work {
      Done() { finish(); }
    };
    out.copy_(in);
    return c10::make_intrusive<Done>();
  }
};

TEST(ProcessGroup, OfAnotherBackendCannotBeSplit) {
  auto comm = Communicator::from_process_group(c10::make_intrusive<OtherBackend>());
  const auto text = refusal([&] { comm->split(0, 0); });
  EXPECT_TRUE(contains(text, "cannot be split") && contains(text, "make a process group of those ranks")) << text;
  comm->barrier();
}

TEST(ProcessGroup, EngineHasTheBitsOfThreads) {
  const auto ends = with_groups(2, [](Backend group, int) {
    auto comm = Communicator::from_process_group(group);
    for (const char* recipe : {"fp32", "bf16"}) {
      Training training;
      training.steps = 4;
      training.clip = 0.1;
      training.recipe = recipe;
      const auto got = train_rank(training, comm).hash, expected = train_threads(training).hash;
      require(got == expected, std::string(recipe) + ": " + got + ", expected " + expected);
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(ProcessGroup, PassesOnTheReasonOfAnAbort) {
  const auto ends = with_groups(3, [](Backend group, int rank) {
    auto comm = Communicator::from_process_group(group);
    if (rank == 1) {
      std::this_thread::sleep_for(200ms);
      comm->abort("the boiler burst");
      std::this_thread::sleep_for(1s);
    }
    require_named(1, "the boiler burst", By::Report, [&] { comm->barrier(); });
    require_named(1, "the boiler burst", By::Report, [&] { comm->all_reduce(at::ones({7}))->wait(); });
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(ProcessGroup, EndsItsWaitsInTime) {
  const auto ends = with_groups(2, [](Backend group, int rank) {
    auto comm = Communicator::from_process_group(group);
    comm->barrier();
    if (rank == 1) {
      std::this_thread::sleep_for(3s);
      return;
    }
    comm->set_timeout(300ms);
    require_named(-1, "all_gather(fp32, 2 elements) from all 2 ranks", By::TimeLimit,
                  [&] { comm->all_gather(at::empty({2}), at::ones({1}))->wait(); });
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(ProcessGroup, NoticesADeath) {
  const auto ends = with_groups(3, [](Backend group, int rank) {
    auto comm = Communicator::from_process_group(group);
    comm->barrier();
    if (rank == 2) kill(getpid(), SIGKILL);
    require_named(-1, "from all 3 ranks", By::Report, [&] {
      for (;;) comm->barrier();
    });
  });
  EXPECT_EQ(ends[2].signal, SIGKILL);
  EXPECT_TRUE(ends[0].ok() && ends[1].ok()) << errors_of(ends);
}

// c10d's write to a dead peer raises it in a thread of the group. The program's own handler stays.
TEST(ProcessGroup, IgnoresSigpipeUnlessItIsHandled) {
  const auto ends = with_groups(1, [](Backend group, int) {
    signal(SIGPIPE, SIG_DFL);  // whatever this process inherited
    {
      auto comm = Communicator::from_process_group(group);
      raise(SIGPIPE);
    }
    static volatile std::sig_atomic_t raised = 0;
    signal(SIGPIPE, [](int) { raised = raised + 1; });
    auto comm = Communicator::from_process_group(group);
    raise(SIGPIPE);
    require(raised == 1, "the handler was replaced");
  });
  EXPECT_EQ(errors_of(ends), "");
}

}  // namespace zero::test::process_group_test
