// `zero bench checkpoint` as a user runs it: what is loaded is what was saved, and the document is consistent.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "support/folder.h"
#include "support/process.h"

namespace bench_checkpoint_test {
namespace {

using nlohmann::json;
using zero::test::run_to_end;
using zero::test::TempFolder;

TEST(BenchCheckpoint, LoadsHaveTheValuesOfTheirSaves) {
  const TempFolder folder;
  const auto run = run_to_end({{std::string(ZERO_BINARY_DIR) + "/bin/zero",
                                "bench",
                                "checkpoint",
                                "--json",
                                "--dir",
                                folder.text(),
                                "--layers",
                                "2",
                                "--hidden",
                                "32",
                                "--heads",
                                "2",
                                "--sequence",
                                "16",
                                "--vocabulary",
                                "64",
                                "--rounds",
                                "2",
                                "--steps",
                                "2",
                                "--world",
                                "2",
                                "--load-worlds",
                                "1,3"},
                               {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"},
                               {},
                               -1},
                              120);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "checkpoints are left";
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["schema"], "zero.bench.checkpoint/1");
  std::multiset<std::string> kinds;
  std::map<std::string, json> rounds;
  for (const auto& one : document["measurements"]) {
    const auto name = one["what"].get<std::string>() + " " + std::to_string(one["world"].get<int>());
    kinds.insert(name);
    rounds[name] = one["rounds"];
    ASSERT_EQ(one["rounds"].size(), 2u) << name;
  }
  EXPECT_EQ(kinds, (std::multiset<std::string>{"background 2", "disk 2", "load 1", "load 3", "save 2"}));
  const std::string zeros(32, '0');
  for (std::size_t round = 0; round < 2; ++round) {
    const auto of = [&](const char* name) { return rounds[name][round]["digest"].get<std::string>(); };
    EXPECT_EQ(of("save 2").size(), 32u);
    EXPECT_NE(of("save 2"), zeros);
    for (const char* name : {"load 1", "load 3"}) {
      EXPECT_EQ(of(name), of("save 2")) << name;
      const auto& loaded = rounds[name][round];
      for (std::size_t r = 0; r < loaded["read_bytes"].size(); ++r)
        EXPECT_GE(loaded["read_bytes"][r].get<double>(), loaded["needed_bytes"][r].get<double>()) << name;
    }
    EXPECT_GT(rounds["save 2"][round]["bytes"].get<double>(), 0);
  }
}

}  // namespace
}  // namespace bench_checkpoint_test
