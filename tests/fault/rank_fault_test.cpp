// A rank is killed, exits or sleeps in every phase of a step: no rank hangs, and every other rank ends in time with an
// error that names it.
#include <gtest/gtest.h>

#include <filesystem>

#include "support/folder.h"
#include "support/spawn.h"

namespace zero::test::rank_fault_test {
namespace {

const std::string kProgram = std::string(ZERO_BINARY_DIR) + "/tests/parity_rank_program";

struct Fault {
  const char *transport, *fault, *at;
  int stage;
};

class RankFault : public ::testing::TestWithParam<Fault> {};

TEST_P(RankFault, EndsEveryRankAndNamesTheRightOne) {
  const auto p = GetParam();
  SpawnOptions options;
  options.world = 3;
  options.transport = p.transport;
  options.timeout_s = 3;
  options.limit = std::chrono::seconds(std::string(p.fault) == "sleep" ? 25 : 15);
  if (std::string(p.fault) == "sleep") options.sleeper = 1;
  const TempFolder directory;
  std::vector<std::string> arguments{std::string("fault=") + p.fault, std::string("at=") + p.at, "rank=1",
                                     "stage=" + std::to_string(p.stage)};
  if (std::string(p.at) == "save") arguments.push_back("save=" + directory.text());
  const auto results = spawn_ranks(options, kProgram, arguments);
  for (const int rank : {0, 2}) {
    const auto& result = results[static_cast<std::size_t>(rank)];
    EXPECT_FALSE(result.timed_out) << "rank " << rank << " hung: " << result.err;
    EXPECT_EQ(result.exit_code, 6) << "rank " << rank << ": " << result.err;
    EXPECT_NE(result.err.find("rank 1"), std::string::npos) << "rank " << rank << " said: " << result.err;
  }
  const auto& culprit = results[1];
  if (!culprit.timed_out) {
    for (const int rank : {0, 2})
      EXPECT_LE((results[static_cast<std::size_t>(rank)].ended - culprit.ended).count(), 5000) << "rank " << rank;
  }
  if (std::string(p.fault) == "kill") EXPECT_EQ(culprit.signal, 9);
  if (std::string(p.fault) == "exit") EXPECT_EQ(culprit.exit_code, 3);
  if (std::string(p.fault) == "sleep") EXPECT_TRUE(culprit.timed_out);
}

std::vector<Fault> faults() {
  std::vector<Fault> all;
  for (const char* transport : {"shm", "gloo"})
    for (const char* fault : {"kill", "exit", "sleep"})
      for (const char* at : {"forward", "backward", "reduce", "step", "save"})
        all.push_back({transport, fault, at, at == std::string("save") ? 2 : 3});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, RankFault, ::testing::ValuesIn(faults()), [](const auto& info) {
  return std::string(info.param.transport) + "_" + info.param.fault + "_" + info.param.at;
});

}  // namespace
}  // namespace zero::test::rank_fault_test
