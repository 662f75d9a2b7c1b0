// Every file of the corpora through its parser, and random changes of each: without a fuzzer, in every run.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "fuzz/targets.h"
#include "support/file_text.h"
#include "support/nightly.h"

namespace zero::test::replay_test {
namespace {
namespace fs = std::filesystem;

class Corpus : public testing::TestWithParam<FuzzTarget> {};

TEST_P(Corpus, IsReadWithoutAFault) {
  const auto folder = fs::path(ZERO_SOURCE_DIR) / "tests/fuzz/corpus" / GetParam().name;
  std::minstd_rand random(20261125);
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto whole = file_text(entry.path());
    GetParam().run(whole);
    ++files;
    for (int i = 0; i < (nightly() ? 300 : 60); ++i) {
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
      GetParam().run(changed);
    }
  }
  EXPECT_GT(files, 1) << folder;
}

INSTANTIATE_TEST_SUITE_P(Targets, Corpus, testing::ValuesIn(fuzz_targets()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zero::test::replay_test
