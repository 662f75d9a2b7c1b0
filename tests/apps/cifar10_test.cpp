// The example cifar10: what each flag does, one loss curve at all stages, what the network learns, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include "support/cifar10_files.h"
#include "support/folder.h"
#include "support/process.h"

namespace zero::test::cifar10_test {
namespace {

struct Run {
  int code = 0;
  std::string out, err;
  Words losses, accuracies;  // lines

  double accuracy() const {
    std::smatch match;
    return std::regex_search(out, match, std::regex("test images: ([0-9.]+) %")) ? std::stod(match[1]) : -1;
  }
};

// 0 ranks: without a launcher.
Run run(int ranks, const Words& options, const std::string& folder = "", double seconds = 120) {
  Words words;
  if (ranks > 0) words = {ZERO_BINARY_DIR "/bin/zero", "run", "-n", std::to_string(ranks), "--no-prefix"};
  const auto ended = run_to_end({words + Words{ZERO_BINARY_DIR "/examples/cifar10"} + options,
                                 {"OMP_NUM_THREADS=1", "COLUMNS=200", "RANK", "WORLD_SIZE"},
                                 folder,
                                 -1},
                                seconds);
  Run run{ended.code, ended.out, "", {}, {}};
  for (const auto& line : lines(ended.err))
    if (line.find(": ranks: ") == std::string::npos) run.err += line + "\n";
  for (const auto& line : lines(ended.out)) {
    if (line.find("] loss: ") != std::string::npos) run.losses.push_back(line);
    if (line.starts_with("Accuracy")) run.accuracies.push_back(line);
  }
  return run;
}

const Words kFew{"--pictures", "160", "--epochs", "1", "--log-interval", "2"};
const Words kExperts = kFew + Words{"--moe", "--num-experts", "2"};

Words losses_of(const Words& options, int ranks = 0) {
  const auto ended = run(ranks, options);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.losses.size(), 5u) << ended.out;
  return ended.losses;
}

TEST(Cifar10, PrintsAsTheTutorialDoes) {
  const auto ended = run(2, {"--pictures", "170", "--epochs", "2", "--log-interval", "4", "--stage", "2"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const std::regex all(
      "drawn pictures \\(not CIFAR-10\\): 170 pictures for training, 34 for the test; 2 ranks, stage 2, fp32, 62006 "
      "parameters on each\n"
      "\\[1,     4\\] loss: 2\\.\\d{6}\n\\[1,     8\\] loss: 2\\.\\d{6}\n\\[1,    10\\] loss: 2\\.\\d{6}\n"
      "\\[2,     4\\] loss: 2\\.\\d{6}\n\\[2,     8\\] loss: 2\\.\\d{6}\n\\[2,    10\\] loss: 2\\.\\d{6}\n"
      "Finished Training\nAccuracy of the network on the 34 test images: +[0-9.]+ %\n"
      "(Accuracy of +[a-z]+: +[0-9.]+ % of \\d+\n)+");
  EXPECT_TRUE(std::regex_match(ended.out, all)) << ended.out;
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(run(0, {"--help"}).out.substr(0, 67),
            "cifar10: DeepSpeed's CIFAR-10 tutorial, alone or as one of many ran");
}

// Stages, and where experts are, change no bit.
TEST(Cifar10, OneLossCurveAtAllStages) {
  const Words options{"--pictures",    "320", "--epochs",   "2",        "--log-interval", "1", "--moe",
                      "--num-experts", "2",   "--mlp-type", "residual", "--top-k",        "1"};
  const auto wanted = run(2, options + Words{"--ep-world-size", "2", "--stage", "0"});
  ASSERT_EQ(wanted.code, 0) << wanted.err;
  ASSERT_EQ(wanted.losses.size(), 40u);
  for (const char* const stage : {"1", "2", "3"}) {
    const auto got = run(2, options + Words{"--ep-world-size", "2", "--stage", stage});
    EXPECT_EQ(got.code, 0) << got.err;
    EXPECT_EQ(got.losses, wanted.losses) << "stage " << stage;
    EXPECT_EQ(got.accuracies, wanted.accuracies) << "stage " << stage;
  }
  const auto whole = run(2, options + Words{"--ep-world-size", "1", "--stage", "3"});
  EXPECT_EQ(whole.losses, wanted.losses);
  EXPECT_EQ(whole.accuracies, wanted.accuracies);
}

TEST(Cifar10, EachFlagOfExpertsHasItsEffect) {
  const auto plain = losses_of(kExperts);
  for (const Words& more : std::vector<Words>{{"--mlp-type", "residual"},
                                              {"--top-k", "2"},
                                              {"--min-capacity", "16"},
                                              {"--noisy-gate-policy", "RSample"},
                                              {"--noisy-gate-policy", "Jitter"},
                                              {"--aux-loss", "0"},
                                              {"--num-experts", "2", "4"},
                                              {"--num-experts", "4"}}) {
    auto options = kExperts + more;
    if (more[0] == "--num-experts") options = kFew + Words{"--moe"} + more;
    EXPECT_NE(losses_of(options), plain) << more[0] << " " << more[1];
  }
  // Layers share nothing: 61,156 before them, a gate of 168 and two experts of 7,140 in each, 850 behind.
  const auto layers = run(0, kFew + Words{"--moe", "--num-experts", "2", "2"});
  EXPECT_NE(layers.out.find("fp32, 90902 parameters on each"), std::string::npos) << layers.out;
  for (const Words& same :
       std::vector<Words>{{"--mlp-type", "standard"}, {"--top-k=1"}, {"--noisy-gate-policy", "None"}})
    EXPECT_EQ(losses_of(kExperts + same), plain) << same[0];
  const auto notices = run(0, kExperts + Words{"--moe-param-group", "--local_rank=0", "--deepspeed"});
  EXPECT_EQ(notices.losses, plain);
  EXPECT_EQ(notices.err,
            "cifar10: warning: --moe-param-group has no effect: experts need no parameter groups of their own\n"
            "cifar10: warning: --local_rank has no effect: the environment says which rank this is\n"
            "cifar10: warning: --deepspeed has no effect: configurations are DeepSpeed's here in any case\n");
}

TEST(Cifar10, EachFlagOfTrainingHasItsEffect) {
  const auto plain = losses_of(kFew);
  EXPECT_EQ(losses_of(kFew + Words{"--dtype", "fp32", "--stage", "3", "--batch-size", "16"}), plain);
  for (const Words& more : std::vector<Words>{{"--dtype", "bf16"}, {"--dtype", "fp16"}, {"--seed", "2"}}) {
    const auto other = losses_of(kFew + more);
    EXPECT_NE(other, plain) << more[1];
    EXPECT_EQ(other[0].substr(0, 17), "[1,     2] loss: ") << more[1];
  }
  EXPECT_EQ(run(0, kFew + Words{"--batch-size", "32"}).losses.size(), 3u);
  EXPECT_EQ(run(0, {"--pictures", "160", "-e", "3"}).losses.size(), 3u);
}

TEST(Cifar10, AConfigurationReplacesTheProgramsOwn) {
  const auto folder = temporary_folder();
  const std::string config = R"({"train_batch_size": 16, "gradient_clipping": 1.0, "prescale_gradients": false,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "bf16": {"enabled": false}, "zero_optimization": {"stage": 1}})";
  write_file(folder + "/same.json", config);
  write_file(folder + "/bf16.json", std::regex_replace(config, std::regex("false}, \"zero"), "true}, \"zero"));
  const auto same = run(0, kFew + Words{"--deepspeed_config", folder + "/same.json"});
  EXPECT_EQ(same.losses, losses_of(kFew));
  EXPECT_NE(same.out.find("stage 1, fp32, 62006 parameters"), std::string::npos) << same.out;
  const auto bf16 = run(0, kFew + Words{"--deepspeed_config", folder + "/bf16.json"});
  EXPECT_EQ(bf16.losses, losses_of(kFew + Words{"--dtype", "bf16"}));
  EXPECT_NE(bf16.out.find("stage 1, bf16, 62006 parameters"), std::string::npos) << bf16.out;
  const auto flags = run(0, kFew + Words{"--deepspeed_config", folder + "/bf16.json", "--dtype", "fp32", "--stage=2"});
  EXPECT_EQ(flags.losses, same.losses);
  EXPECT_NE(flags.out.find("stage 2, fp32, 62006 parameters"), std::string::npos) << flags.out;
  // The program's own configuration gives no notice, in any dtype.
  EXPECT_EQ(run(0, kFew + Words{"--strict", "--dtype", "fp16"}).code, 0);
  write_file(folder + "/notice.json",
             R"({"train_batch_size": 16, "optimizer": {"type": "AdamW"}, "fp16": {"hysteresis": 2}})");
  const auto strict = run(0, kFew + Words{"--strict", "--deepspeed_config", folder + "/notice.json"});
  EXPECT_EQ(strict.code, 2);
  EXPECT_EQ(strict.err, "cifar10: error: [--strict] got notices, expected none; the first: " + folder +
                            "/notice.json:1:67: /fp16/hysteresis: no effect: fp16 is not enabled\n");
}

// Each rank tests its part of the pictures, whatever their number. Without an update, networks are equal for all ranks.
TEST(Cifar10, TheTestCountsEachPictureOnce) {
  const Words options{"--pictures",
                      "2630",
                      "--epochs",
                      "1",
                      "--batch-size",
                      "1200",
                      "--moe",
                      "--num-experts",
                      "2",
                      "--set",
                      "optimizer.params.lr=0",
                      "--set",
                      "scheduler.params.warmup_max_lr=0"};
  const auto one = run(1, options);
  ASSERT_EQ(one.code, 0) << one.err;
  double all = 0;
  for (const auto& line : one.accuracies)
    if (const auto of = line.find(" of "); line.find("% of ") != std::string::npos && of != std::string::npos)
      all += std::atof(line.substr(line.rfind(" of ") + 4).c_str());
  EXPECT_EQ(all, 526);
  for (const int ranks : {2, 3}) EXPECT_EQ(run(ranks, options).accuracies, one.accuracies) << ranks << " ranks";
}

TEST(Cifar10, LearnsTheDrawnPictures) {
  const Words options{"--epochs", "3", "--stage", "2"};
  for (const Words& more : std::vector<Words>{{}, {"--moe", "--num-experts", "4", "--ep-world-size", "2"}}) {
    const auto ended = run(2, options + more, "", 120);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_GE(ended.accuracy(), 85) << ended.out;
  }
}

TEST(Cifar10, ReadsTheFilesOfCifar10) {
  Words losses[2];
  for (const bool pickles : {false, true}) {
    const TempFolder folder;
    std::filesystem::create_directory(folder.file("cifar-10-batches-py"));
    write_cifar10(folder.file("cifar-10-batches-py"), pickles, 12, 30);
    const auto ended = run(2, {"--data", folder.text(), "--epochs", "2", "--log-interval", "1", "--stage", "3"});
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(lines(ended.out)[0],
              "CIFAR-10 from " + folder.text() +
                  ": 60 pictures for training, 30 for the test; 2 ranks, stage 3, fp32, 62006 parameters on each");
    EXPECT_NE(ended.out.find("Accuracy of the network on the 30 test images"), std::string::npos) << ended.out;
    EXPECT_NE(ended.out.find("Accuracy of      horse:"), std::string::npos) << ended.out;
    EXPECT_EQ(ended.losses.size(), 6u);
    losses[pickles] = ended.losses;
  }
  EXPECT_EQ(losses[0], losses[1]) << "the same pictures in both versions";
}

struct Fault {
  Words options;
  std::string text;
};

TEST(Cifar10, WrongFlagsAreOneErrorEach) {
  const auto folder = temporary_folder();
  write_file(folder + "/nothing.json", "{\"train_batch_size\": 16, \"optimiser\": {}}");
  const std::string experts = "expected it: without it the network has no experts";
  const std::vector<Fault> faults{
      {{"--epochs", "0"}, "[--epochs] got \"0\", expected a whole number from 1 to 2147483648"},
      {{"--epochs"}, "[--epochs] got no value, expected N"},
      {{"--epoch", "1"},
       "[--epoch] got an unknown option, expected one of `cifar10 --help`. Hint: did you mean --epochs?"},
      {{"--log-interval", "x"}, "[--log-interval] got \"x\", expected a whole number from 1 to 2147483648"},
      {{"--dtype", "bf61"}, "[--dtype] got \"bf61\", expected one of bf16, fp16, fp32. Hint: did you mean \"bf16\"?"},
      {{"--stage", "4"}, "[--stage] got \"4\", expected a whole number from 0 to 3"},
      {{"--moe", "--num-experts"}, "[--num-experts] got no value, expected E [E ...]"},
      {{"--moe", "--num-experts", "2", "four"},
       "[--num-experts] got \"four\", expected a whole number from 1 to 65536"},
      {{"--moe", "--num-experts", "2", "--num-experts", "4"}, "[--num-experts] got the option twice, expected it once"},
      {{"--moe", "--mlp-type", "dense"}, "[--mlp-type] got \"dense\", expected one of standard, residual"},
      {{"--moe", "--top-k", "3"}, "[--top-k] got \"3\", expected a whole number from 1 to 2"},
      {{"--moe", "--top-k", "2"},
       "[--top-k] got 2, expected at most the 1 experts of a layer (--num-experts). Hint: --num-experts 2, or more"},
      {{"--moe", "--min-capacity", "-1"}, "[--min-capacity] got \"-1\", expected a whole number from 0 to 2147483648"},
      {{"--moe", "--noisy-gate-policy", "rsample"},
       "[--noisy-gate-policy] got \"rsample\", expected one of None, RSample, Jitter. Hint: did you mean \"RSample\"?"},
      {{"--moe", "--num-experts", "2", "--top-k", "2", "--noisy-gate-policy", "RSample"},
       "[--noisy-gate-policy] got RSample and --top-k 2, expected --top-k 1. Hint: Jitter"},
      {{"--moe", "--num-experts", "3", "--ep-world-size", "2"},
       "[--ep-world-size] got 2, expected a divisor of the 3 experts of a layer (--num-experts)"},
      {{"--moe", "--num-experts", "6", "--ep-world-size", "3"},
       "[--ep-world-size] got 3, expected a divisor of the number of ranks, RANKS. Hint: zero run -n 3"},
      {{"--ep-world-size", "2"}, "[--ep-world-size] got no --moe, " + experts},
      {{"--num-experts", "2"}, "[--num-experts] got no --moe, " + experts},
      {{"--aux-loss", "-1"}, "[--aux-loss] got \"-1\", expected a number from 0 to 1000"},
      {{"--pictures", "9"}, "[--pictures] got \"9\", expected a whole number from 10 to 2147483648"},
      {{"--pictures", "10", "--data", "."},
       "[--pictures] got --data too, expected one of the two: pictures are drawn or read"},
      {{"--data", folder},
       "[CIFAR-10 " + folder +
           "] got no data_batch_1 and no data_batch_1.bin, expected data_batch_1 to data_batch_5 and test_batch, or "
           "the same "
           "with the ending .bin. Hint: get cifar-10-python.tar.gz or cifar-10-binary.tar.gz from "
           "https://www.cs.toronto.edu/~kriz/cifar.html and unpack it, or leave --data out for drawn pictures"},
      {{"extra"}, "[cifar10] got \"extra\", expected no further word. Hint: cifar10 --help"},
      {{"--json"}, "[--json] got an unknown option, expected one of `cifar10 --help`"},
  };
  for (const auto& [options, text] : faults) {
    std::string told;
    for (const auto& word : options) told += " " + word;
    const auto ended = run(0, options);
    EXPECT_EQ(ended.code, 2) << told;
    EXPECT_EQ(ended.out, "") << told;
    EXPECT_EQ(ended.err, "cifar10: error: " + std::regex_replace(text, std::regex("RANKS"), "1") + "\n") << told;
  }
  // Under the launcher the first rank says it, once; then the launcher reports.
  for (const auto& [options, text] : {faults[5], faults[16]}) {
    const auto ended = run(2, options);
    EXPECT_EQ(ended.code, 2);
    const auto report = std::min(ended.err.find("--- last lines"), ended.err.find("zero run: FAILED"));
    EXPECT_EQ(ended.err.substr(0, report),
              "cifar10: error: " + std::regex_replace(text, std::regex("RANKS"), "2") + "\n");
  }
  const auto odd = run(2, {"--batch-size", "15"});
  EXPECT_EQ(odd.code, 2);
  EXPECT_EQ(odd.err.find("cifar10: error: [batch sizes] "), 0u) << odd.err;
  const auto few = run(0, {"--pictures", "10"});
  EXPECT_EQ(few.code, 2);
  EXPECT_NE(few.err.find("[train_batch_size] got 16 pictures at once, expected at most the 10 for training"),
            std::string::npos);
  const auto unknown = run(0, {"--deepspeed_config", folder + "/nothing.json"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("optimizer"), std::string::npos) << unknown.err;
}

}  // namespace
}  // namespace zero::test::cifar10_test
