// Every input of the corpora through its parser, and random changes of each: without a fuzzer, in every run.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "fuzz/targets.h"
#include "support/file_text.h"
#include "support/nightly.h"

namespace zero::test::replay_test {
namespace {
namespace fs = std::filesystem;

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> paths;
  if (!fs::exists(folder)) return paths;  // the fuzzer has found nothing new
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  return paths;
}

void run_with_changes(const FuzzTarget& target, const std::string& whole, int count, std::minstd_rand& random) {
  target.run(whole);
  for (int i = 0; i < count; ++i) {
    auto changed = whole;
    for (auto changes = 1 + random() % 4; changes > 0 && !changed.empty(); --changes) {
      const auto at = random() % changed.size();
      switch (random() % 4) {
        case 0:
          changed[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          changed.erase(at, 1 + random() % 8);
          break;
        case 2:
          changed.insert(at, changed.substr(random() % changed.size(), 1 + random() % 16));
          break;
        default:
          changed.resize(at);
      }
    }
    target.run(changed);
  }
}

class Corpus : public testing::TestWithParam<FuzzTarget> {};

TEST_P(Corpus, IsReadWithoutAFault) {
  const std::string name = GetParam().name;
  const auto seeds = files_in(fs::path(ZERO_SOURCE_DIR) / "tests/fuzz/corpus" / name);
  EXPECT_GT(seeds.size(), 1U) << name;
  std::minstd_rand random(20261125);
  for (const auto& path : seeds) run_with_changes(GetParam(), file_text(path), nightly() ? 300 : 60, random);
  for (const auto& path : files_in(fs::path(ZERO_BINARY_DIR) / "tests/fuzz/found" / name))
    run_with_changes(GetParam(), file_text(path), nightly() ? 300 : 0, random);
}

INSTANTIATE_TEST_SUITE_P(Targets, Corpus, testing::ValuesIn(fuzz_targets()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zero::test::replay_test
