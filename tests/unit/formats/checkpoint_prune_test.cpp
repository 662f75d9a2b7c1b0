// Which checkpoints a prune removes, and that one that is killed or fails at any of its calls leaves whole checkpoints.
#include <set>

#include "formats/prune.h"
#include "support/nightly.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/formats/every_call.h"

namespace zero::test::checkpoint_prune_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;
using Fault = FaultyFiles::Fault;

std::set<std::string> names_in(const fs::path& path) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  return names;
}

// Checkpoints s1, s2, ... of 1, 2, ... steps.
void save_some(const TempFolder& folder, int count) {
  for (int step = 1; step <= count; ++step)
    save_sample(system_files(), folder.text(), "s" + std::to_string(step), step);
}

std::set<std::string> after(const TempFolder& folder, const PruneOptions& options) {
  std::set<std::string> removed;
  for (const auto& entry : prune_checkpoints(folder.path(), options)) removed.insert(entry.tag);
  auto left = names_in(folder.path());
  for (const auto& tag : removed) EXPECT_EQ(left.contains(tag), options.dry_run) << tag;
  left.erase(".lock");
  left.erase("latest");
  return left;
}

using Names = std::set<std::string>;

TEST(CheckpointPrune, KeepsTheNewestAndTheNamed) {
  TempFolder folder(TempFolder::On::Memory);
  save_some(folder, 8);
  EXPECT_EQ(after(folder, {.keep = 2, .keep_every = 3, .also = {"s1"}, .dry_run = true}).size(), 8u);
  EXPECT_EQ(after(folder, {.keep = 2, .keep_every = 3, .also = {"s1"}}), (Names{"s1", "s3", "s6", "s7", "s8"}));
  EXPECT_EQ(after(folder, {.keep = 9, .also = {}}), (Names{"s1", "s3", "s6", "s7", "s8"}));
  EXPECT_EQ(after(folder, {.keep = 1, .also = {}}), (Names{"s8"}));
  EXPECT_EQ(load_sample(folder.text()).value, 8);
}

// Damaged checkpoints are no reason to remove a whole one, and nothing that is no checkpoint is touched.
TEST(CheckpointPrune, CountsWholeCheckpoints) {
  TempFolder folder(TempFolder::On::Memory);
  save_some(folder, 5);
  fs::remove(folder.path() / "s5" / "SUMS");
  fs::create_directory(folder.path() / "notes");
  write_all(folder.path() / "file", "text");
  EXPECT_EQ(after(folder, {.keep = 2, .also = {}}), (Names{"s3", "s4", "s5", "notes", "file"}));
}

TEST(CheckpointPrune, RefusesNumbersAndAHeldLock) {
  TempFolder folder(TempFolder::On::Memory);
  save_some(folder, 2);
  std::string text;
  EXPECT_EQ(code_of([&] { (void)prune_checkpoints(folder.path(), {.keep = 0, .also = {}}); }, &text), 2) << text;
  EXPECT_NE(text.find("keep: got 0, expected 1 or more"), std::string::npos) << text;
  const Commit save(system_files(), folder.text(), "s3");
  EXPECT_EQ(code_of([&] { (void)prune_checkpoints(folder.path(), {.keep = 1, .also = {}}); }, &text), 2) << text;
  EXPECT_NE(text.find("[prune_checkpoints]"), std::string::npos) << text;
  EXPECT_NE(text.find("held by another writer"), std::string::npos) << text;
}

// The newest loads whole; what stays of others is whole too; the next save removes what a dead prune left.
void check_after(const TempFolder& folder, const std::string& label) {
  EXPECT_EQ(load_sample(folder.text()).value, 4) << label;
  for (const auto& name : names_in(folder.path()))
    if (name[0] == 's') EXPECT_EQ("s" + std::to_string(load_sample(folder.text(), name).value), name) << label;
  save_sample(system_files(), folder.text(), "s5", 5);
  for (const auto& name : names_in(folder.path())) EXPECT_FALSE(name.starts_with(".del-")) << label << ": " << name;
  EXPECT_EQ(after(folder, {.keep = 2, .also = {}}), (Names{"s4", "s5"})) << label;
}

TEST(CheckpointPrune, KilledOrFailingAtEveryCall) {
  OneIn part(3);
  for (const auto fault : {Fault::DieBefore, Fault::DieAfter, Fault::Error}) {
    if (!part.take()) continue;
    const int struck = strike_every_call(
        fault, EIO, [](const TempFolder& folder) { save_some(folder, 4); },
        [](FaultyFiles& files, const TempFolder& folder, int) {
          (void)prune(files, folder.text(), {.keep = 1, .also = {}});
        },
        check_after);
    EXPECT_GT(struck, 30);
  }
}

}  // namespace
}  // namespace zero::test::checkpoint_prune_test
