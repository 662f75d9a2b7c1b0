// Saves in the background that fail while libzero.save_errors is "warn", on a disk that is full: what `zero train` says
// was saved is on disk, a failed save is repeated, and the exit code tells whether the last state was saved.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test::failed_saves_test {
namespace {

// Runs its arguments with a small file system at ./ck, which a file nearly fills until ./room exists; passes SIGTERM
// on. Then verifies the checkpoints.
constexpr const char* kOnAFullDisk = R"(
mount -t tmpfs -o size=4m none ck || exit 77
head -c 4000000 /dev/zero > ck/filling
(while kill -0 $$ && [ ! -e room ]; do sleep 0.02; done; rm -f ck/filling) 2> /dev/null &
trap 'kill -TERM $run' TERM
"$@" &
run=$!
wait $run
wait $run
code=$?
echo "ended with $code" >&2
ls ck >&2
"$1" checkpoint verify ck
echo "verified with $?" >&2
exit $code
)";

class TrainingOnAFullDisk : public Process {
 public:
  TrainingOnAFullDisk(const std::string& folder, int save_every)
      : Process(Settings{
            Words{"/usr/bin/env",
                  "unshare",
                  "-rm",
                  "sh",
                  "-c",
                  kOnAFullDisk,
                  "sh",
                  ZERO_BINARY_DIR "/bin/zero",
                  "run",
                  "-n",
                  "2",
                  "zero",
                  "train",
                  ZERO_SOURCE_DIR "/configs/stage3-bf16.json",
                  "--text",
                  text_in(folder),
                  "--checkpoint-dir",
                  "ck",
                  "--save-async",
                  "--save-every",
                  std::to_string(save_every),
                  "--keep",
                  "1",
                  "--steps",
                  "1000000",
                  "--sample",
                  "0"} +
                Words{"--set", "libzero.save_errors=warn", "--set", "steps_per_print=1", "--set",
                      "libzero.model.layers=2", "--set", "libzero.model.hidden=48", "--set", "libzero.model.heads=3",
                      "--set", "libzero.model.seq_length=32", "--set", "libzero.data.eval_batches=1"},
            {"OMP_NUM_THREADS=1"},
            folder,
            -1}) {}

  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }

 private:
  static std::string text_in(const std::string& folder) {
    std::filesystem::create_directory(folder + "/ck");
    std::ofstream out(folder + "/text.txt");
    for (int i = 0; i < 12000; ++i) out << i * 7919 % 1000 << (i % 9 ? " " : "\n");
    return folder + "/text.txt";
  }
};

// Whether it ended because nothing can be mounted here.
bool has_no_mounts(TrainingOnAFullDisk& training) { return training.wait(5) == 77 || training.says("unshare: "); }

TEST(FailedSaves, AStopSaysThatNothingWasSaved) {
  const TempFolder folder;
  TrainingOnAFullDisk training(folder.text(), 1000000);
  if (!training.wait_for("loss", 60) && has_no_mounts(training)) GTEST_SKIP() << "no mounts here";
  training.signal(SIGTERM);
  EXPECT_EQ(training.wait(60), 5) << training.err;
  EXPECT_TRUE(training.says("failed, 1 in a row") && training.says("failed, 2 in a row")) << training.err;
  EXPECT_TRUE(training.says("No space left on device")) << training.err;
  EXPECT_FALSE(training.says("saved ck/")) << training.err;
  EXPECT_FALSE(training.says("state saved")) << training.err;
}

TEST(FailedSaves, AreRepeatedAndNotReported) {
  const TempFolder folder;
  TrainingOnAFullDisk training(folder.text(), 50);
  if (!training.wait_for("failed, 1 in a row", 90) && has_no_mounts(training)) GTEST_SKIP() << "no mounts here";
  std::ofstream(folder.file("room")) << "now";
  EXPECT_TRUE(training.wait_for("saved ck/global_step", 60)) << training.err;
  training.signal(SIGTERM);
  EXPECT_EQ(training.wait(60), 75) << training.err;
  EXPECT_FALSE(training.says("saved ck/global_step50 ")) << training.err;
  EXPECT_TRUE(training.says("verified with 0")) << training.err << training.out;
  // The last one that it says is the one that is there.
  const std::string line = "state saved in ck/";
  const auto at = training.err.find(line);
  ASSERT_NE(at, std::string::npos) << training.err;
  const auto tag = training.err.substr(at + line.size(), training.err.find(':', at) - at - line.size());
  EXPECT_TRUE(training.says("\n" + tag + "\n")) << tag << ": " << training.err;
}

}  // namespace
}  // namespace zero::test::failed_saves_test
