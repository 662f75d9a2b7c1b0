// Communicator::split over every transport for CPUs: membership, values of concurrent collectives in all groups, nested
// groups, invalid calls, and a failure in one group that ends the waits of the others.
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/group.h"
#include "comm/transport.h"
#include "support/collective_checks.h"
#include "support/descriptors.h"
#include "support/folder.h"
#include "support/process_groups.h"
#include "support/tcp_ranks.h"

namespace zero::test::split_test {
namespace {

using namespace std::chrono_literals;
using Comm = std::shared_ptr<Communicator>;

net::ProcessInfo identity_at(const std::string& run_id, int port, int rank, int size, int local_size) {
  net::ProcessInfo identity;
  identity.rank = rank;
  identity.size = size;
  identity.run_id = run_id;
  identity.local_rank = rank % local_size;
  identity.local_size = local_size;
  identity.source = "the test";
  if (local_size < size) {
    identity.master_addr = "127.0.0.1";
    identity.master_port = port;
  }
  return identity;
}

// A rank over the transport; for "shm+gloo" it is on one of two hosts.
Comm connect(const std::string& transport, const std::string& run_id, int port, int rank, int size) {
  const auto identity = identity_at(run_id, port, rank, size, transport == "shm+gloo" ? size / 2 : size);
  auto made = transport == "shm"    ? comm::make_shm(identity, 20s)
              : transport == "gloo" ? comm::make_gloo(identity, 20s)
                                    : comm::make_shm_gloo(identity, 20s, true);
  auto comm = comm::make_communicator(std::move(made));
  require(comm->transport() == transport, comm->transport());
  return comm;
}

// Runs `body` on ranks that are joined by the transport.
void on_ranks(int size, const std::string& transport, const std::function<void(Comm)>& body) {
  if (transport == "thread") {
    ThreadFaults faults;
    faults.timeout = 20s;
    run_ranks(size, faults, body);
    return;
  }
  const auto run_id = fresh_run_id();
  const int port = free_port();
  const TempFolder folder;
  const auto ends = fork_ranks(size, [&](int rank) {
    at::set_num_threads(1);
    body(transport == "c10d" ? over_process_group(folder.file("store"), rank, size, 20s)
                             : connect(transport, run_id, port, rank, size));
  });
  EXPECT_EQ(errors_of(ends), "");
}
void on_four(const std::string& transport, const std::function<void(Comm)>& body) { on_ranks(4, transport, body); }

// The sum over the data of `ranks`, computed by one loop.
at::Tensor values_of(int rank, std::int64_t numel) {
  at::Tensor values = at::empty({numel});
  for (std::int64_t i = 0; i < numel; ++i)
    values.data_ptr<float>()[i] = std::ldexp(1.0f + 0.37f * static_cast<float>(rank), static_cast<int>(i * 7 % 13) - 6);
  return values;
}
at::Tensor sum_of(const std::vector<int>& ranks, std::int64_t numel) {
  auto sum = values_of(ranks[0], numel);
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    const auto part = values_of(ranks[i], numel);
    for (std::int64_t e = 0; e < numel; ++e) sum.data_ptr<float>()[e] += part.data_ptr<float>()[e];
  }
  return sum;
}

// `group` joins `ranks` of the run, in this order.
void require_group(const Comm& group, const std::vector<int>& ranks, int own) {
  require(group->size() == static_cast<int>(ranks.size()), "size " + std::to_string(group->size()));
  require(ranks[static_cast<std::size_t>(group->rank())] == own, "rank " + std::to_string(group->rank()));
  const auto told = group->all_gather_bytes(std::to_string(own));
  for (std::size_t r = 0; r < ranks.size(); ++r) require(told[r] == std::to_string(ranks[r]), "another order of ranks");
  for (const std::int64_t numel : {1, 33, 20000}) {
    auto values = values_of(own, numel);
    group->all_reduce(values)->wait();
    require(at::equal(values, sum_of(ranks, numel)), "another sum");
    auto gathered = at::empty({numel * group->size()});
    group->all_gather(gathered, values_of(own, numel))->wait();
    for (std::size_t r = 0; r < ranks.size(); ++r)
      require(at::equal(gathered.narrow(0, static_cast<std::int64_t>(r) * numel, numel), values_of(ranks[r], numel)),
              "another part");
  }
}

class Splits : public testing::TestWithParam<const char*> {};

}  // namespace

TEST_P(Splits, MakeGroupsOfOneColorNumberedByKey) {
  on_four(GetParam(), [](Comm comm) {
    const int rank = comm->rank();
    // Interleaved colors, reversed keys: rank 3 before rank 1, rank 2 before rank 0.
    auto parity = comm->split(rank % 2, -rank);
    require_group(parity, rank % 2 == 0 ? std::vector{2, 0} : std::vector{3, 1}, rank);
    // Neighbours, equal keys: by rank.
    auto half = comm->split(rank / 2, 0);
    require_group(half, rank < 2 ? std::vector{0, 1} : std::vector{2, 3}, rank);
    require_group(parity, rank % 2 == 0 ? std::vector{2, 0} : std::vector{3, 1}, rank);
    // All but rank 1, and a color of one rank only.
    auto some = comm->split(rank == 1 ? -1 : rank == 2 ? 7 : 3, 0);
    require((some == nullptr) == (rank == 1), "a color below 0 is no group");
    if (rank == 2) require_group(some, {2}, rank);
    if (rank == 0 || rank == 3) require_group(some, {0, 3}, rank);
    // All, in another order.
    auto reversed = comm->split(5, 10 - rank);
    require_group(reversed, {3, 2, 1, 0}, rank);
    require_group(comm, {0, 1, 2, 3}, rank);
  });
}

TEST_P(Splits, DoEveryCollectiveInBothHalvesAtOnce) {
  on_four(GetParam(), [](Comm comm) {
    auto half = comm->split(comm->rank() % 2, 0);
    check_all(half);
    const auto before = comm->stats();
    check_random_program(half, 1 + static_cast<std::uint64_t>(comm->rank() % 2), 60);
    require(comm->stats().bytes_sent() == before.bytes_sent(), "a group counts for itself");
    check_values(comm);
  });
}

// 2 rows of 3 ranks.
TEST_P(Splits, DoEveryCollectiveInRowsAndColumnsOfAGrid) {
  on_ranks(6, GetParam(), [](Comm comm) {
    auto row = comm->split(comm->rank() / 3, 0), column = comm->split(comm->rank() % 3, 0);
    check_all(row);
    check_all(column);
    check_all(row);
  });
}

TEST_P(Splits, CountForTheRunIfTheyHaveAName) {
  on_four(GetParam(), [](Comm comm) {
    auto half = comm->split(comm->rank() / 2, 0, "tp"), other = comm->split(comm->rank() % 2, 0);
    comm->reset_stats();
    for (const auto& group : {half, other}) group->all_reduce(at::ones({600}))->wait();
    half->barrier();
    for (const bool ended : {false, true}) {
      if (ended) half.reset();
      const auto stats = comm->stats();
      require(stats.by_op.size() == 1 && stats.control.calls == 1, "the group without a name counts for itself");
      const auto row = stats.by_op.at("tp.all_reduce");
      require(row.calls == 1 && row.bytes_sent == 2400, std::to_string(row.bytes_sent));
    }
    comm->reset_stats();
    require(comm->stats().by_op.empty(), "reset_stats");
  });
}

TEST_P(Splits, MayBeSplitAgainAndOutliveTheirParent) {
  on_four(GetParam(), [](Comm comm) {
    const int rank = comm->rank();
    auto three = comm->split(rank == 0 ? -1 : 0, 0);
    Comm two, one;
    if (three) {
      require_group(three, {1, 2, 3}, rank);
      two = three->split(rank == 2 ? -1 : 1, -rank);
      if (two) {
        require_group(two, {3, 1}, rank);
        one = two->split(rank, 0);
        require_group(one, {rank}, rank);
      }
    }
    comm->barrier();
    comm.reset();
    if (three) require_group(three, {1, 2, 3}, rank);
    three.reset();
    if (two) require_group(two, {3, 1}, rank);
  });
}

TEST_P(Splits, HaveOperationsOfSeveralGroupsInFlight) {
  on_four(GetParam(), [](Comm comm) {
    const int rank = comm->rank();
    auto row = comm->split(rank / 2, rank), column = comm->split(rank % 2, rank);
    for (int round = 0; round < 20; ++round) {
      const std::int64_t numel = 5000 + round;
      auto a = values_of(rank, numel), b = values_of(rank, numel), c = values_of(rank, numel);
      auto first = row->all_reduce(a), second = column->all_reduce(b), third = comm->all_reduce(c);
      first->wait();
      second->wait();
      third->wait();
      require(at::equal(a, sum_of(rank < 2 ? std::vector{0, 1} : std::vector{2, 3}, numel)), "row");
      require(at::equal(b, sum_of(rank % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3}, numel)), "column");
      require(at::equal(c, sum_of({0, 1, 2, 3}, numel)), "all");
    }
  });
}

// Every rank waits in another order, for operations of several phases on memory that peers read in place: rank 0 waits
// for rank 1 in a row, 1 for 3 in a column, 3 for 2 in a row, 2 for 0 in a column.
TEST_P(Splits, WaitInAnyOrderOverGroups) {
  on_four(GetParam(), [](Comm comm) {
    comm->set_timeout(10s);
    const int rank = comm->rank();
    auto row = comm->split(rank / 2, rank), column = comm->split(rank % 2, rank);
    const bool row_first = rank == 0 || rank == 3;
    const std::vector<int> in_row{rank / 2 * 2, rank / 2 * 2 + 1}, in_column{rank % 2, rank % 2 + 2};
    const auto filled = [&](const Comm& group, std::int64_t numel) {
      auto values = group->allocate(numel, at::kFloat);
      values.copy_(values_of(rank, numel));
      return values;
    };
    for (int round = 0; round < 6; ++round) {
      const std::int64_t numel = 40000 + round;
      struct Running {
        at::Tensor sum, gathered, scattered, parts;
        std::vector<std::shared_ptr<Work>> works;
      };
      const auto begin = [&](const Comm& group) {
        Running now;
        const std::int64_t uneven = numel / 2 - group->rank(), to_other = numel - uneven;
        const std::int64_t from_other = numel - numel / 2 + (group->rank() == 0 ? 1 : 0);
        now.sum = filled(group, numel);
        now.gathered = group->allocate(2 * numel, at::kFloat);
        now.scattered = group->allocate(numel, at::kFloat);
        now.parts = at::empty({uneven + from_other});
        const auto mine = filled(group, numel), twice = filled(group, 2 * numel);
        std::vector<std::int64_t> out{uneven, from_other}, in{uneven, to_other};
        if (group->rank() == 1) {
          std::swap(out[0], out[1]);
          std::swap(in[0], in[1]);
        }
        now.works = {group->all_reduce(now.sum), group->all_gather(now.gathered, mine),
                     group->reduce_scatter(now.scattered, twice), group->all_to_all(now.parts, mine, out, in)};
        return now;
      };
      const auto check = [&](const Running& now, const std::vector<int>& ranks) {
        const auto own = ranks[0] == rank ? 0 : 1;
        require(at::equal(now.sum, sum_of(ranks, numel)), "another sum");
        for (int r = 0; r < 2; ++r)
          require(at::equal(now.gathered.narrow(0, r * numel, numel), values_of(ranks[r], numel)), "another part");
        require(at::equal(now.scattered, sum_of(ranks, 2 * numel).narrow(0, own * numel, numel)), "another half");
        // Rank 0 keeps numel / 2 and sends the rest; rank 1 sends all but the numel / 2 - 1 at its end.
        const auto first = values_of(ranks[0], numel), second = values_of(ranks[1], numel);
        const auto half = numel / 2, kept = own == 0 ? half : half - 1;
        const auto expected =
            own == 0 ? at::cat({first.narrow(0, 0, kept), second.narrow(0, 0, numel - half + 1)})
                     : at::cat({first.narrow(0, half, numel - half), second.narrow(0, numel - kept, kept)});
        require(at::equal(now.parts, expected), "another exchange");
      };
      auto first = begin(row), second = begin(column);
      auto all = values_of(rank, numel);
      // Not always: over hosts a thread works on it, which advances operations of other groups.
      const auto third = round % 2 == 0 ? comm->all_reduce(all) : nullptr;
      const auto wait_for = [](const Running& now) {
        for (auto work = now.works.rbegin(); work != now.works.rend(); ++work) (*work)->wait();
      };
      wait_for(row_first ? first : second);
      if (third && rank % 2 == 1) third->wait();
      wait_for(row_first ? second : first);
      if (third && rank % 2 == 0) third->wait();
      check(first, in_row);
      check(second, in_column);
      if (third) require(at::equal(all, sum_of({0, 1, 2, 3}, numel)), "the sum of all");
    }
  });
}

// Some ranks begin an operation of the column only after they have waited for the row: rank 1 waits for 0 in a row, 0
// for 2 to begin in a column, 2 for 3 in a row, 3 for 1 to begin in a column.
TEST_P(Splits, WaitForGroupsThatOthersHaveNotBegun) {
  on_four(GetParam(), [](Comm comm) {
    comm->set_timeout(10s);
    const int rank = comm->rank();
    auto row = comm->split(rank / 2, rank), column = comm->split(rank % 2, rank);
    for (int round = 0; round < 6; ++round) {
      const std::int64_t numel = 40000 + round;
      auto in_row = values_of(rank, numel), in_column = values_of(rank, numel);
      auto read_in_place = row->allocate(numel, at::kFloat);
      read_in_place.copy_(values_of(rank, numel));
      auto gathered = at::empty({2 * numel});
      auto first = row->all_gather(gathered, read_in_place), second = row->all_reduce(in_row);
      std::shared_ptr<Work> third;
      if (rank == 0 || rank == 3) {
        third = column->all_reduce(in_column);
        third->wait();
        first->wait();
        second->wait();
      } else {
        first->wait();
        second->wait();
        third = column->all_reduce(in_column);
        third->wait();
      }
      require(at::equal(in_row, sum_of({rank / 2 * 2, rank / 2 * 2 + 1}, numel)), "row");
      require(at::equal(in_column, sum_of({rank % 2, rank % 2 + 2}, numel)), "column");
      require(at::equal(gathered.narrow(0, numel, numel), values_of(rank / 2 * 2 + 1, numel)), "gathered");
    }
  });
}

// Rank 0 waits in a row for 1, which waits in a diagonal for 2 to begin, which waits in a column for the second phase
// of rank 0's earlier operation.
TEST_P(Splits, AdvanceEarlierOperationsWhileTheyWait) {
  on_four(GetParam(), [](Comm comm) {
    comm->set_timeout(10s);
    const int rank = comm->rank();
    auto row = comm->split(rank / 2, rank), column = comm->split(rank % 2, rank);
    auto diagonal = comm->split(rank == 1 || rank == 2, rank);
    constexpr std::int64_t kNumel = 300000;  // over TCP too, a sum of two phases
    auto in_row = values_of(rank, kNumel), in_column = in_row.clone(), in_diagonal = in_row.clone();
    if (rank == 0) {
      auto first = column->all_reduce(in_column), second = row->all_reduce(in_row);
      second->wait();
      first->wait();
    } else if (rank == 1) {
      diagonal->all_reduce(in_diagonal)->wait();
      row->all_reduce(in_row)->wait();
    } else if (rank == 2) {
      column->all_reduce(in_column)->wait();
      diagonal->all_reduce(in_diagonal)->wait();
    }
    if (rank < 2) require(at::equal(in_row, sum_of({0, 1}, kNumel)), "row");
    if (rank % 2 == 0) require(at::equal(in_column, sum_of({0, 2}, kNumel)), "column");
    if (rank == 1 || rank == 2) require(at::equal(in_diagonal, sum_of({1, 2}, kNumel)), "diagonal");
    comm->barrier();
  });
}

TEST_P(Splits, RefuseUnfinishedOperationsOnAllRanks) {
  on_four(GetParam(), [](Comm comm) {
    auto values = at::ones({100});
    auto work = comm->all_reduce(values);
    if (comm->rank() != 2) work->wait();
    std::string text;
    try {
      comm->split(0, 0);
    } catch (const ConfigError& error) {
      text = error.what();
    }
    require(contains(text, "unfinished operations on rank 2"), "got: " + text);
    work->wait();
    require(comm->split(0, 0)->size() == 4, "the communicator can still be used");
  });
}

TEST_P(Splits, NoticeAnotherCall) {
  on_four(GetParam(), [](Comm comm) {
    std::string text;
    try {
      if (comm->rank() == 1) {
        comm->barrier();
        comm->barrier();
      } else {
        comm->split(0, 0);
      }
    } catch (const CommError& error) {
      text = error.what();
    }
    require(contains(text, "calls split") && contains(text, "all_gather_bytes or barrier"), "got: " + text);
  });
}

TEST_P(Splits, NoticePartsOfDifferentSizes) {
  on_four(GetParam(), [](Comm comm) { check_parts_differ(comm); });
  on_four(GetParam(), [](Comm comm) {
    auto half = comm->split(comm->rank() / 2, 0);
    comm->barrier();  // the other half has been split as well
    if (comm->rank() >= 2) {
      std::this_thread::sleep_for(500ms);  // until the others have left the barrier, too
      return check_parts_differ(half);
    }
    std::string text;
    try {
      comm->barrier();
    } catch (const CommError& error) {
      text = error.what();
    }
    require(contains(text, "which expects 4"), "got: " + text);
  });
}

// Rank 3 aborts. Rank 1 waits for it in their group, ranks 0 and 2 wait for each other in theirs: all get the error.
TEST_P(Splits, ShareAFailure) {
  for (const bool in_group : {true, false}) {
    std::mutex mutex;
    std::string wrong;
    const auto body = [&](Comm comm) {
      const int rank = comm->rank();
      auto group = comm->split(rank % 2, 0);
      group->barrier();
      if (rank == 3) {
        std::this_thread::sleep_for(200ms);
        (in_group ? group : comm)->abort("the boiler burst");
        std::this_thread::sleep_for(1s);
        return;
      }
      if (rank == 2) std::this_thread::sleep_for(1500ms);  // so that rank 0 waits for it
      try {
        require_named(3, "the boiler burst", By::Report, [&] { group->barrier(); });
        require_named(3, "the boiler burst", By::Report, [&] { comm->barrier(); });
      } catch (const std::exception& error) {
        std::lock_guard lock(mutex);
        wrong += error.what();
        throw;
      }
    };
    if (std::string(GetParam()) != "thread") {
      on_four(GetParam(), body);
      continue;
    }
    on_four("thread", body);
    EXPECT_EQ(wrong, "");
  }
}

// A call of one group times out; the other group and the run get the error. Errors name both numbers of a rank.
TEST_P(Splits, TellOfALateRankByItsNumberInTheRun) {
  on_four(GetParam(), [](Comm comm) {
    const int rank = comm->rank();
    auto group = comm->split(rank % 2, 0);
    group->barrier();
    if (rank == 1) group->set_timeout(500ms);
    if (rank == 3) std::this_thread::sleep_for(2s);
    if (rank == 2) std::this_thread::sleep_for(1500ms);
    // c10d does not know which rank is late.
    const bool known = std::string(GetParam()) != "c10d";
    require_named(known ? 3 : -1, known ? "rank 3" : "no end within 500 ms", rank == 1 ? By::TimeLimit : By::Either,
                  [&] { group->barrier(); });
  });
}

INSTANTIATE_TEST_SUITE_P(Over, Splits, testing::Values("thread", "shm", "gloo", "shm+gloo", "c10d"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase(name, '+');
                           return name;
                         });

TEST(SplitOfOne, IsLocalAndSharesItsEnd) {
  auto comm = Communicator::local();
  EXPECT_EQ(comm->split(-3, 0), nullptr);
  auto group = comm->split(4, 0)->split(0, 0);
  EXPECT_EQ(group->size(), 1);
  EXPECT_EQ(group->transport(), "local");
  group->barrier();
  group->abort("over");
  EXPECT_THROW(comm->barrier(), CommError);
}

// Memory of one group is read in place by all others, so a value moves between groups without a copy.
TEST(SplitOfShm, SharesTheMemoryOfTheRun) {
  on_four("shm", [](Comm comm) {
    auto group = comm->split(comm->rank() % 2, 0);
    auto other = group->split(0, -comm->rank());
    for (const auto& from : {comm, group, other}) {
      auto values = from->allocate(20000, at::kFloat);
      values.fill_(static_cast<float>(comm->rank()));
      for (const auto& reader : {comm, group, other}) {
        require(comm::group_of(*reader)->holds(values), "memory of another group");
        auto gathered = at::empty({20000 * reader->size()});
        reader->all_gather(gathered, values)->wait();
        const int first = reader == comm ? 0 : reader == group ? comm->rank() % 2 : 2 + comm->rank() % 2;
        require(gathered[0].item<float>() == static_cast<float>(first), "of another rank");
      }
    }
  });
}

TEST(SplitOfShm, NamesTheRankInTheGroupAndInTheRun) {
  on_four("shm", [](Comm comm) {
    const int rank = comm->rank();
    auto group = comm->split(rank % 2, 0);
    if (rank == 3) return;
    if (rank == 1) require_named(3, "rank 1 of the group (rank 3 of the run)", By::Report, [&] { group->barrier(); });
    std::this_thread::sleep_for(500ms);
  });
  on_four("shm", [](Comm comm) {
    const int rank = comm->rank();
    auto group = comm->split(rank % 2, 0, "dp");
    if (rank == 3) return;
    if (rank == 1) require_named(3, "rank 1 of dp (rank 3 of the run)", By::Report, [&] { group->barrier(); });
    std::this_thread::sleep_for(500ms);
  });
}

// On two hosts of two ranks each, as the transport finds them.
TEST(SplitOfHosts, TakesSharedMemoryInsideAHost) {
  on_four("shm+gloo", [](Comm comm) {
    const int rank = comm->rank();
    require(comm->split(rank / 2, 0)->transport() == "shm", "two of one host");
    auto across = comm->split(rank % 2, 0);
    require(across->transport() == "gloo" && across->local_size() == 1, "one of each host");
    require(comm->split(0, 0)->transport() == "shm+gloo", "all");
    auto mixed = comm->split(0, rank % 2);  // 0 2 1 3: not host by host
    require(mixed->transport() == "gloo", "ranks that alternate between hosts");
    check_values(mixed);
    across->reset_stats();
    auto named = comm->split(rank % 2, 0, "dp");
    comm->reset_stats();
    auto values = at::ones({1000});
    for (const auto& group : {across, named}) group->broadcast(values, 0)->wait();
    across->barrier();
    const std::uint64_t expected = across->rank() == 0 ? 4000 : 0;
    require(across->stats().bytes_across_hosts == expected, std::to_string(across->stats().bytes_across_hosts));
    require(comm->stats().bytes_across_hosts == expected, std::to_string(comm->stats().bytes_across_hosts));
    named.reset();
    require(comm->stats().bytes_across_hosts == expected, "of an ended group");
  });
}

// A thousand groups, one after another.
TEST(SplitOfProcesses, LeavesNoDescriptorMappingOrMemoryBehind) {
  const auto mapped = [] {
    std::ifstream maps("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  };
  const auto shared_kib = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("RssShmem:")) return std::stol(line.substr(9));
    return 0L;
  };
  for (const char* transport : {"shm", "gloo", "shm+gloo"}) {
    on_four(transport, [&](Comm comm) {
      // The peers may still read the last message when a rank has ended its group.
      const auto split = [&, message = std::string(3000, 'x')] {
        auto group = comm->split(comm->rank() % 2, 0);
        group->all_gather_bytes(message);
      };
      for (int i = 0; i < 20; ++i) split();
      comm->barrier();
      const auto descriptors = open_descriptors(), mappings = mapped();
      const auto shared = shared_kib();
      comm->barrier();
      for (int i = 0; i < 1000; ++i) split();
      comm->barrier();
      require(open_descriptors() == descriptors,
              std::to_string(open_descriptors() - descriptors) + " more descriptors");
      require(mapped() < mappings + 20, std::to_string(mapped() - mappings) + " more mappings");
      require(shared_kib() < shared + 1024, std::to_string(shared_kib() - shared) + " KiB more of shared memory");
    });
  }
}

// Rank 3 is killed. Rank 1 waits for it in their group, rank 0 for rank 2 in theirs, rank 2 for all.
TEST(SplitOfProcesses, AKilledRankEndsTheWaitsOfAllGroups) {
  for (const std::string transport : {"shm", "gloo", "shm+gloo"}) {
    const auto run_id = fresh_run_id();
    const int port = free_port();
    const auto statuses = run_processes(4, [&](int rank) {
      auto comm = connect(transport, run_id, port, rank, 4);
      auto group = comm->split(rank % 2, 0, "tp");
      group->barrier();
      comm->barrier();
      if (rank == 3) {
        std::this_thread::sleep_for(300ms);
        kill(getpid(), SIGKILL);
      }
      require_named(3, "rank 3", By::Report, [&] { (rank == 2 ? comm : group)->barrier(); });
      require_named(3, "rank 3", By::Report, [&] { group->barrier(); });
    });
    EXPECT_EQ(statuses[3], kKilled) << transport;
    expect_all_well(statuses, 3);
  }
}

TEST(SplitOfGloo, HoldsSixtyThreeGroupsAtOnce) {
  on_four("gloo", [](Comm comm) {
    std::vector<Comm> groups;
    std::string text;
    try {
      for (int i = 0; i < 64; ++i) groups.push_back(comm->split(0, 0));
    } catch (const ConfigError& error) {
      text = error.what();
    }
    require(groups.size() == 63 && contains(text, "at most 63"), std::to_string(groups.size()) + " groups: " + text);
    groups.back()->barrier();
  });
}

}  // namespace zero::test::split_test
