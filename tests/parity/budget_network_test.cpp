// As budget_test, over TCP between processes, for features that need a network (quantized parameters).
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "comm/group.h"
#include "net/socket.h"
#include "parity/budget_stack.h"
#include "support/folder.h"
#include "support/shm_ranks.h"

namespace zero::test::budget_network_test {
namespace {

int free_port() {
  net::MeetingPoint point{"", "127.0.0.1", 0};
  net::listen_at(point);
  return point.port;
}

TEST(BudgetOverNetwork, ParametersAsIntegersHaveRoom) {
  Training setup;
  setup.world = 2;
  setup.stage = 3;
  setup.steps = 3;
  setup.zero = R"(, "zero_quantized_weights": true)";
  const TempFolder folder;
  const auto file = folder.file("activations");
  // Rank 0 passes its results to this process in a file, because ranks are separate processes.
  const auto measure = [&](const std::function<void(const Comm&)>& body) {
    const auto run_id = fresh_run_id();
    const int port = free_port();
    const auto ends = fork_ranks(setup.world, [&](int rank) {
      at::set_num_threads(1);
      auto identity = identity_of(run_id, rank, setup.world);
      identity.local_rank = 0, identity.local_size = 1;
      identity.master_addr = "127.0.0.1", identity.master_port = port;
      body(comm::make_communicator(comm::make_gloo(identity, std::chrono::seconds(60))));
    });
    if (const auto errors = errors_of(ends); !errors.empty()) throw std::runtime_error(errors);
  };
  measure([&](const Comm& comm) {
    const auto memory = train_stack(setup, comm);
    if (comm->rank() == 0)
      std::ofstream(file) << memory.peak(MemoryReport::Tier::Device, MemoryReport::Purpose::Activations);
  });
  std::int64_t activations = 0;
  std::ifstream(file) >> activations;
  ASSERT_GT(activations, 0);
  const auto train_with = [&](std::int64_t bytes) -> std::string {
    setup.extra =
        memory_keys("\"device\": " + std::to_string(bytes) + ", \"activations\": " + std::to_string(activations));
    try {
      measure([&](const Comm& comm) { train_stack(setup, comm); });
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto refused = train_with(1);
  const auto smallest = named(refused, "device");
  ASSERT_GT(smallest, 0) << refused;
  EXPECT_EQ(train_with(smallest), "");
}

}  // namespace
}  // namespace zero::test::budget_network_test
