// A rank of zero/fake_communicator.h holds and sends what a rank among real ones does.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include <zero/fake_communicator.h>

#include "parity/training.h"

namespace zero::test::fake_communicator_test {
namespace {

struct Seen {
  std::uint64_t held = 0, sent = 0, calls = 0;
  std::map<std::string, std::uint64_t> sent_by_op;
  bool finite = true;
  bool operator==(const Seen& other) const {
    return held == other.held && sent == other.sent && calls == other.calls && sent_by_op == other.sent_by_op;
  }
};

std::ostream& operator<<(std::ostream& out, const Seen& seen) {
  out << seen.held << " bytes held, " << seen.sent << " sent in " << seen.calls << " calls:";
  for (const auto& [op, bytes] : seen.sent_by_op) out << " " << op << " " << bytes;
  return out;
}

// Two steps; the second one's traffic.
Seen train(const Training& setup, const std::shared_ptr<Communicator>& comm) {
  const auto& task = problem(setup.problem);
  auto module = make_module(task);
  Engine engine(module, Options::from_json(json_of(setup)), comm);
  Seen seen;
  for (int step = 0; step < 2; ++step) {
    comm->reset_stats();
    const auto loss = loss_of(task, *module, comm->rank(), step, dtype_of(setup));
    engine.backward(loss);
    engine.step();
    seen.finite = seen.finite && std::isfinite(loss.item<double>());
  }
  for (const auto& [op, row] : comm->stats().by_op) {
    seen.sent_by_op[op] = row.bytes_sent;
    seen.calls += row.calls;
    seen.sent += row.bytes_sent;
  }
  seen.held = engine.memory().current(MemoryReport::Tier::Device);
  return seen;
}

TEST(FakeCommunicator, HoldsAndSendsWhatARankAmongRealOnesDoes) {
  for (const char* recipe : {"fp32", "bf16"})
    for (int stage = 0; stage <= 3; ++stage)
      for (const int world : {2, 4}) {
        Training setup;
        setup.recipe = recipe;
        setup.stage = stage;
        Seen real;
        std::mutex mutex;
        run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
          at::set_num_threads(1);
          const auto seen = train(setup, comm);
          const std::lock_guard lock(mutex);
          if (comm->rank() == 0) real = seen;
        });
        const auto fake = train(setup, fake_communicator(0, world));
        EXPECT_EQ(fake, real) << recipe << ", stage " << stage << ", world " << world;
        EXPECT_TRUE(fake.finite);
        EXPECT_GT(fake.sent, 0u);
      }
}

// More ranks than this machine could run: 16 bytes a parameter in bf16, of which a rank holds its share.
TEST(FakeCommunicator, ARankOfManyHoldsItsShare) {
  for (const int world : {8, 64, 1024}) {
    Training setup;
    setup.recipe = "bf16";
    auto module = make_module(problem(setup.problem));
    const auto comm = fake_communicator(world - 1, world);
    EXPECT_EQ(comm->size(), world);
    EXPECT_EQ(comm->rank(), world - 1);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    std::uint64_t shard = 0;
    for (const auto& [name, numel] : engine.units())
      shard += (static_cast<std::uint64_t>(numel) + static_cast<std::uint64_t>(world) - 1) /
               static_cast<std::uint64_t>(world);
    const auto report = engine.memory();
    const auto masters = report.current(MemoryReport::Tier::Device, MemoryReport::Purpose::MasterParameters);
    EXPECT_EQ(report.current(MemoryReport::Tier::Device, MemoryReport::Purpose::OptimizerStates), 2 * masters);
    EXPECT_EQ(report.current(MemoryReport::Tier::Device, MemoryReport::Purpose::Parameters) * 2, masters);
    // Shards are rounded up to whole cache lines.
    EXPECT_GE(masters, shard * 4);
    EXPECT_LE(masters, shard * 4 + engine.units().size() * 512);
  }
}

TEST(FakeCommunicator, ARankOutsideIsRefused) {
  EXPECT_THROW(fake_communicator(2, 2), ConfigError);
  EXPECT_THROW(fake_communicator(-1, 2), ConfigError);
  EXPECT_THROW(fake_communicator(0, 0), ConfigError);
}

}  // namespace
}  // namespace zero::test::fake_communicator_test
