// `zero train`: the order in which it loads CUDA and seeds, a sample that is complete while another rank is ahead, and
// messages with external names.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <string>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::train_program_test {
namespace {

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";
const std::string kText = std::string(ZERO_SOURCE_DIR) + "/LICENSE";
const std::string kConfig = std::string(ZERO_SOURCE_DIR) + "/configs/gpt-demo.json";
const std::string kAsked = "spy: libtorch was asked about CUDA";

Ended train(const Words& options, const Words& environment) {
  Process::Settings settings;
  settings.arguments = Words{kZero,
                             "train",
                             kConfig,
                             "--text",
                             kText,
                             "--steps",
                             "1",
                             "--sample",
                             "1",
                             "--set",
                             "libzero.model.hidden=32",
                             "--set",
                             "libzero.data.eval_batches=1"} +
                       options;
  settings.environment = Words{"LD_PRELOAD=" ZERO_BINARY_DIR "/tests/libcuda_spy.so"} + environment;
  settings.folder = temporary_folder();
  return run_to_end(settings, 120);
}

// libtorch decides at the first query whether it has CUDA. Seeding is a query, so the CUDA library must be loaded
// before. The fake driver reports two GPUs and nothing else, so loading fails; the test checks the queries until then.
TEST(TrainProgram, OpensTheGpuBeforeAnythingAsksLibtorchForOne) {
  if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr) GTEST_SKIP() << "this machine has a CUDA driver";
  const auto cpu = train({}, {});
  EXPECT_EQ(cpu.code, 0) << cpu.err;
  EXPECT_NE(cpu.err.find(kAsked), std::string::npos) << "the spy sees nothing:\n" << cpu.err;
  const auto gpu = train({"--device", "cuda"}, {"LD_LIBRARY_PATH=" ZERO_BINARY_DIR "/tests/fake_cuda"});
  EXPECT_EQ(gpu.code, 2) << gpu.err;
  EXPECT_NE(gpu.err.find("[--device] got cuda, but "), std::string::npos) << gpu.err;
  EXPECT_EQ(gpu.err.find(kAsked), std::string::npos) << gpu.err;
}

// The sample is complete even if rank 0, which writes it, is far behind the other rank.
std::string sample_of(const char* stage) {
  const std::string folder = temporary_folder();
  Process::Settings settings;
  settings.arguments =
      Words{kZero,
            "run",
            "-n",
            "2",
            "--no-prefix",
            "sh",
            "-c",
            "[ \"$RANK\" = 0 ] && exec taskset -c \"$CORE\" nice -n 19 \"$@\"; exec taskset -c \"$CORE\" \"$@\"",
            "sh",
            kZero,
            "train",
            kConfig,
            "--text",
            kText,
            "--stage",
            stage,
            "--steps",
            "2",
            "--sample",
            "300",
            "--out",
            "out",
            "--set",
            "libzero.data.eval_batches=1"};  // the demo's size: less than 4 MiB would not be given back
  settings.environment = {"CORE=" + std::to_string(sched_getcpu())};
  settings.folder = folder;
  const auto ended = run_to_end(settings, 200);
  EXPECT_EQ(ended.code, 0) << ended.err;
  return file_text(folder + "/out/sample.txt");
}

TEST(TrainProgram, TheSampleIsWholeWhenAnotherRankIsAhead) {
  const std::string whole = sample_of("0");
  ASSERT_GT(whole.size(), 300u);
  EXPECT_EQ(sample_of("3"), whole);  // every stage has the same bits
}

TEST(ConfigProgram, ExplainEndsWithTwoWhereNothingCanStart) {
  const auto config = [](const Words& words) {
    Process::Settings settings;
    settings.arguments = Words{kZero, "config"} + words;
    settings.folder = temporary_folder();
    return run_to_end(settings);
  };
  const std::string file = std::string(ZERO_SOURCE_DIR) + "/configs/stage3-bf16.json";
  auto none =
      config({"explain", file, "--set", "train_batch_size=auto", "--set", "train_micro_batch_size_per_gpu=auto"});
  EXPECT_EQ(none.code, 2) << none.out;
  EXPECT_NE(none.err.find("zero config explain: error: cannot start: batch sizes: got neither"), std::string::npos)
      << none.err;
  EXPECT_EQ(none.out.find("cannot start"), std::string::npos) << none.out;
  EXPECT_NE(none.out.find("zero_optimization.stage"), std::string::npos) << "the values are shown all the same:\n"
                                                                         << none.out;
  const Words eight{"--set", "train_batch_size=8", "--set", "train_micro_batch_size_per_gpu=4"};
  EXPECT_EQ(config(Words{"explain", file, "--world", "2"} + eight).code, 0);
  EXPECT_EQ(config(Words{"explain", file} + eight).code, 0) << "two ranks can";
  EXPECT_EQ(config(Words{"explain", file, "--world", "3"} + eight).code, 2);
}

TEST(ConfigProgram, NoErrorCommandsTheTerminal) {
  for (const Words& words :
       {Words{"config", "\x1b]0;title\x07"}, Words{"config", "check", "/no/\x1b[2J\u202e.json"}, Words{"--\x1b[31mx"},
        Words{"config", "explain", kConfig, "--set", "\x1b[31m=\u009b"}, Words{"run", "/no/\x1b[2Jprogram"}}) {
    const auto ended = run_to_end({Words{kZero} + words, {}, temporary_folder(), -1});
    EXPECT_EQ(ended.code, 2) << ended.err;
    EXPECT_EQ((ended.out + ended.err).find_first_of("\x1b\x07"), std::string::npos) << words.back();
    EXPECT_EQ((ended.out + ended.err).find("\u202e"), std::string::npos);
    EXPECT_NE(ended.err.find("\\u001b"), std::string::npos) << ended.err;
  }
}

}  // namespace
}  // namespace zero::test::train_program_test
