// The transport for several hosts, between processes: values, bytes between hosts, and the rank named when a rank dies,
// stops or does not connect on either host. The hosts are simulated: processes of one machine in two or three groups.
// Links between network namespaces are tested in tests/tools.
#include <chrono>
#include <thread>

#include "comm/group.h"
#include "comm/transport.h"
#include "net/node_topology.h"
#include "support/collective_checks.h"
#include "support/tcp_ranks.h"

using namespace std::chrono_literals;
using zero::Communicator;
using zero::net::NodeTopology;
using zero::net::ProcessInfo;
using zero::test::By;
using zero::test::expect_all_well;
using zero::test::free_port;
using zero::test::require;
using zero::test::require_named;
using zero::test::run_processes;

namespace shm_gloo_test {
namespace {

std::shared_ptr<Communicator> open(int rank, int size, int local_size, int port,
                                   std::chrono::milliseconds timeout = 60s) {
  ProcessInfo id;
  id.rank = rank;
  id.size = size;
  id.local_rank = rank % local_size;
  id.local_size = local_size;
  id.source = "the test";
  id.run_id = "test";
  id.master_addr = "127.0.0.1";
  id.master_port = port;
  return zero::comm::make_communicator(zero::comm::make_shm_gloo(id, timeout));
}

struct Shape {
  int hosts, ranks;
};

class Worlds : public testing::TestWithParam<Shape> {};

}  // namespace

TEST(NodeTopology, AreThoseOfRanksNumberedHostByHost) {
  const NodeTopology even({{0, 2}, {1, 2}, {0, 2}, {1, 2}});
  EXPECT_EQ(even.count(), 2);
  EXPECT_TRUE(even.even());
  EXPECT_EQ(even.host_of(1), 0);
  EXPECT_EQ(even.host_of(2), 1);
  const NodeTopology uneven({{0, 1}, {0, 3}, {1, 3}, {2, 3}});
  EXPECT_EQ(uneven.count(), 2);
  EXPECT_FALSE(uneven.even());
  EXPECT_EQ(uneven.first(1), 1);
  EXPECT_EQ(uneven.ranks(1), 3);
  EXPECT_TRUE(NodeTopology({{0, 2}, {0, 2}, {1, 2}, {1, 2}}).empty());  // one rank of each host after the other
  EXPECT_TRUE(NodeTopology({{0, 2}, {1, 2}, {0, 2}}).empty());
}

TEST_P(Worlds, EveryCollectiveMatchesTheNaiveOne) {
  const int size = GetParam().hosts * GetParam().ranks, port = free_port();
  expect_all_well(run_processes(size, [&](int rank) {
    auto comm = open(rank, size, GetParam().ranks, port);
    require(comm->transport() == "shm+gloo", comm->transport());
    zero::test::check_all(comm);
  }));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Worlds, testing::Values(Shape{2, 2}, Shape{2, 3}, Shape{3, 2}), [](const auto& i) {
  return std::to_string(i.param.hosts) + "NodeTopology" + std::to_string(i.param.ranks) + "Ranks";
});

TEST(ShmGloo, UnevenHostsTalkOverTcpAlone) {
  const int port = free_port();
  expect_all_well(run_processes(3, [&](int rank) {
    ProcessInfo id;
    id.rank = rank;
    id.size = 3;
    id.local_rank = rank == 2 ? 1 : 0;
    id.local_size = rank == 0 ? 1 : 2;
    id.master_addr = "127.0.0.1";
    id.master_port = port;
    auto comm = zero::comm::make_communicator(zero::comm::make_shm_gloo(id, 60s));
    require(comm->transport() == "gloo", comm->transport());
    zero::test::check_values(comm);
    comm->reset_stats();
    comm->all_gather(at::empty({3000}), at::ones({1000}))->wait();
    const auto across = comm->stats().bytes_across_hosts;
    require(across == (rank == 0 ? 8000u : 4000u), "sent to the other host: " + std::to_string(across));
  }));
}

// H hosts of L ranks, N = H * L.
TEST(ShmGloo, SendsBetweenHostsWhatTheFormulasSay) {
  for (const auto& shape : {Shape{2, 2}, Shape{3, 2}}) {
    const int hosts = shape.hosts, ranks = shape.ranks, size = hosts * ranks, port = free_port();
    expect_all_well(run_processes(size, [&](int rank) {
      auto comm = open(rank, size, ranks, port);
      const std::int64_t part = 1 << 14, whole = part * size;
      const auto measure = [&](const char* op, std::int64_t expected,
                               const std::function<std::shared_ptr<zero::Work>()>& begin) {
        comm->barrier();
        comm->reset_stats();
        begin()->wait();
        const auto stats = comm->stats();
        require(static_cast<std::int64_t>(stats.bytes_across_hosts) == expected,
                std::string(op) + " sent " + std::to_string(stats.bytes_across_hosts) + ", expected " +
                    std::to_string(expected));
      };
      const auto bf16 = at::TensorOptions().dtype(at::kBFloat16);
      auto all = at::ones({whole}, bf16), mine = at::ones({part}, bf16), other = at::empty({whole}, bf16);
      measure("all_gather", 2 * (hosts - 1) * part, [&] { return comm->all_gather(all, mine); });
      measure("reduce_scatter", 2 * (hosts - 1) * ranks * part, [&] { return comm->reduce_scatter(mine, all); });
      measure("all_reduce", 2 * (hosts - 1) * (ranks + 1) * part, [&] { return comm->all_reduce(all); });
      measure("all_to_all", 2 * (hosts - 1) * ranks * part, [&] { return comm->all_to_all(other, all); });
      measure("broadcast", rank == 1 ? 2 * (hosts - 1) * whole : 0, [&] { return comm->broadcast(all, 1); });
      // ZeRO++: one sum a host, of integers with a scale for every 256.
      for (const int bits : {8, 4})
        measure("reduce_scatter_quantized", (hosts - 1) * (part * bits / 8 + part / 64),
                [&] { return zero::comm::group_of(*comm)->reduce_scatter_quantized(mine, all, bits); });
      measure("a small all_reduce", 4 * (hosts - 1) * 3, [&] { return comm->all_reduce(at::ones({3})); });
    }));
  }
}

// Errors on a rank of the same host and on ranks of the other host, in the same column as the failed rank and not.
TEST(ShmGloo, NamesARankKilledAtAnyTime) {
  std::vector<int> ports;
  for (int trial = 0; trial < 8; ++trial) ports.push_back(free_port());
  zero::test::expect_killed_ranks_named(4, [&](int rank, int trial) { return open(rank, 4, 2, ports[trial]); });
}

TEST(ShmGloo, NamesALateRank) {
  for (const int absent : {0, 1, 2, 3}) {
    const int port = free_port();
    expect_all_well(
        run_processes(4, [&](int rank) { zero::test::check_timeout(open(rank, 4, 2, port), absent, 1500ms); }));
  }
}

TEST(ShmGloo, NamesAnAbsentRank) {
  for (const int absent : {0, 1, 3}) {
    const int port = free_port();
    expect_all_well(run_processes(4, [&](int rank) {
      if (rank == absent) return;
      require_named(absent, "rank " + std::to_string(absent), By::TimeLimit, [&] { open(rank, 4, 2, port, 1500ms); });
    }));
  }
}

TEST(ShmGloo, PassesOnTheReasonOfAnAbort) {
  for (const int culprit : {0, 3}) {
    const int port = free_port();
    expect_all_well(run_processes(4, [&](int rank) { zero::test::check_abort(open(rank, 4, 2, port), culprit); }));
  }
}

TEST(ShmGloo, NeighboursAreAWorldOfTheirOwn) {
  const int port = free_port();
  zero::test::SharedCounter finished;
  expect_all_well(run_processes(8, [&](int rank) {
    auto comm = open(rank, 8, 4, port);
    const auto group = zero::comm::group_of(*comm);
    auto host = group->neighbours(4), pair = group->neighbours(2), alone = group->neighbours(1);
    require(host->transport() == "shm" && host->size() == 4 && host->rank() == rank % 4, "four of a host");
    require(pair->size() == 2 && pair->rank() == rank % 2 && alone->size() == 1, "two of a host");
    auto sum = at::full({1}, float(rank));
    pair->all_reduce(sum)->wait();
    require(sum.item<float>() == float(rank / 2 * 4 + 1), "the sum of two neighbours");
    zero::test::check_values(std::make_shared<Communicator>(host));
    try {
      group->neighbours(3);
    } catch (const zero::ConfigError& error) {
      require(std::string(error.what()).find("a divisor of the 4 ranks of this host") != std::string::npos,
              error.what());
    }
    // Errors name ranks of the run. A failure ends all groups, so the other ranks finish first.
    if (rank != 4) finished.add();
    if (rank == 5) return;
    if (rank == 4) {
      finished.wait_for(7);
      pair->set_timeout(300ms);
      require_named(5, "rank 5", By::Either, [&] { pair->barrier(); });
    }
  }));
}

// Messages that no rank waits for do not block the end of a rank.
TEST(ShmGloo, EndsWithCollectivesNobodyWaitsFor) {
  const int port = free_port();
  expect_all_well(run_processes(4, [&](int rank) {
    auto comm = open(rank, 4, 2, port);
    auto out = torch::zeros({400'000}), in = torch::full({100'000}, float(rank));
    auto work = comm->all_gather(out, in);
    if (rank % 2 == 0) work->wait();
    comm.reset();
  }));
}

}  // namespace shm_gloo_test
