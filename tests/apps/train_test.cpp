// `zero train`, alone and under `zero run`: every configuration of configs/ trains, all stages print the same numbers,
// a resumed run is bit-identical, and errors are reported.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/nightly.h"
#include "support/process.h"

namespace zero::test::train_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
const std::string kConfigs = ZERO_SOURCE_DIR "/configs/";
constexpr double kLimit = 120;

// Small enough that a step takes milliseconds.
const Words kSmall = {"--set", "libzero.model.layers=2",     "--set", "libzero.model.hidden=48",
                      "--set", "libzero.model.heads=3",      "--set", "libzero.model.seq_length=32",
                      "--set", "libzero.data.eval_batches=2"};

// A folder with a text of some structure, so that a loss can fall.
struct Place {
  Place() : folder(temporary_folder()), text(folder + "/text.txt") {
    const Words words = {"and ", "the ", "king ", "went ", "over ", "the river\n", "with ", "seven ", "horses ", "of "};
    std::ofstream out(text);
    for (unsigned i = 0, state = 7; i < 12000; ++i) {
      state = state * 1664525u + 1013904223u;
      out << words[(state >> 16) % words.size()];
    }
  }
  std::string folder, text;
};

struct Outcome {
  int code = 0;
  std::string out, err;
  std::vector<json> steps;
};

Outcome run(int ranks, const Words& arguments, const Words& environment = {}) {
  Words words = {kZero};
  if (ranks > 0) words = words + Words{"run", "-n", std::to_string(ranks), "--no-prefix", kZero};
  Process process(
      Process::Settings{words + Words{"train"} + arguments, environment + Words{"OMP_NUM_THREADS=1"}, "", -1});
  Outcome outcome;
  outcome.code = process.wait(kLimit);
  outcome.out = process.out;
  outcome.err = process.err;
  for (const std::string& line : lines(process.out)) {
    const json step = json::parse(line, nullptr, false);
    if (step.is_object()) outcome.steps.push_back(step);
  }
  return outcome;
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// The output that must not depend on the machine or on interruptions: everything except times.
Words numbers(const std::vector<json>& steps) {
  Words all;
  for (const json& step : steps)
    all.push_back(step["step"].dump() + " " + step["loss"].dump() + " " + step["grad_norm"].dump() + " " +
                  step["lr"].dump() + " " + step["loss_scale"].dump());
  return all;
}

class Configs : public testing::TestWithParam<std::string> {};

TEST_P(Configs, TrainsThreeSteps) {
  const Place place;
  const Outcome o =
      run(2, {kConfigs + GetParam() + ".json", "--text", place.text, "--steps", "3", "--json", "--sample", "8",
              "--micro-batch-size", "2", "--set", "libzero.data.eval_batches=1", "--out", place.folder + "/out"});
  ASSERT_EQ(o.code, 0) << o.err;
  ASSERT_EQ(lines(o.out).size(), 3u) << o.out;  // stdout is the steps' alone
  ASSERT_EQ(o.steps.size(), 3u) << o.out;
  for (std::size_t i = 0; i < 3; ++i) {
    const json& step = o.steps[i];
    EXPECT_EQ(step["step"], i + 1);
    for (const char* key : {"loss", "lr", "loss_scale", "step_ms", "tokens_per_s"})
      EXPECT_TRUE(step[key].is_number()) << key;
    EXPECT_TRUE(step.contains("grad_norm"));
    EXPECT_GT(step["loss"], 0.5);
    EXPECT_LT(step["loss"], 7.0);
  }
  const json result = json::parse(file_text(place.folder + "/out/result.json"));
  EXPECT_EQ(result["steps"], 3);
  EXPECT_TRUE(result["heldout_nats_per_byte"].is_number());
  EXPECT_EQ(result["curve"].size(), 3u);
  EXPECT_GT(result["memory"]["after_backward"]["total_bytes"], 0);
  EXPECT_EQ(lines(file_text(place.folder + "/out/log.jsonl")), lines(o.out));
  EXPECT_EQ(file_text(place.folder + "/out/sample.txt").size(), 40u + 8 + 1);
}

INSTANTIATE_TEST_SUITE_P(All, Configs, testing::ValuesIn([] {
                           Words names;
                           for (const auto& entry : fs::directory_iterator(kConfigs))
                             if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
                           std::sort(names.begin(), names.end());
                           return names;
                         }()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(Train, WithoutStandardStreamsFilesHaveTheirOwnContentsAlone) {
  Place place;
  for (const std::string closed : {">&-", "2>&-", "<&- >&- 2>&-"}) {
    const std::string out = place.folder + "/out";
    std::string command = "exec " + kZero + " train " + kConfigs + "stage3-bf16.json --text " + place.text + " --out " +
                          out + " --steps 4 --trace " + place.folder + "/trace.json --trace-steps 1:3";
    for (const std::string& word : kSmall) command += " " + word;
    Process p(Process::Settings{{"/bin/sh", "-c", command + " " + closed}, {"OMP_NUM_THREADS=1"}, place.folder, -1});
    EXPECT_EQ(p.wait(kLimit), 0) << closed << p.err;
    const auto log = lines(file_text(out + "/log.jsonl"));
    EXPECT_GE(log.size(), 4u) << closed;
    EXPECT_TRUE(json::accept(file_text(place.folder + "/trace.json"))) << closed;
    for (const std::string& line : log) EXPECT_TRUE(json::accept(line)) << closed << ": " << line;
    fs::remove_all(out);
  }
}

TEST(Train, StagesPrintTheSameNumbers) {
  const Place place;
  OneIn part(2);
  for (const std::string dtype : {"bf16", "fp32"}) {
    if (!part.take()) continue;
    Words first;
    for (int stage = 0; stage < 4; ++stage) {
      const Outcome o =
          run(2, Words{kConfigs + "stage3-fp32.json", "--text", place.text, "--steps", "4", "--json", "--sample", "4",
                       "--dtype", dtype, "--stage", std::to_string(stage), "--out", place.folder + "/out"} +
                     kSmall);
      ASSERT_EQ(o.code, 0) << o.err;
      ASSERT_EQ(o.steps.size(), 4u);
      const json result = json::parse(file_text(place.folder + "/out/result.json"));
      const Words now =
          numbers(o.steps) + Words{result["heldout_nats_per_byte"].dump(), file_text(place.folder + "/out/sample.txt")};
      if (stage == 0) first = now;
      EXPECT_EQ(now, first) << dtype << " stage " << stage;
    }
    EXPECT_NE(first[0], first[3]);
  }
}

TEST(Train, RunsAloneAndLearns) {
  const Place place;
  const Outcome o =
      run(0, Words{kConfigs + "stage2-bf16.json", "--text", place.text, "--steps", "60", "--json", "--lr", "0.01",
                   "--set", "scheduler.params.warmup_max_lr=0.01", "--sample", "0", "--out", place.folder + "/out"} +
                 kSmall);
  ASSERT_EQ(o.code, 0) << o.err;
  ASSERT_EQ(o.steps.size(), 60u);
  const json result = json::parse(file_text(place.folder + "/out/result.json"));
  EXPECT_GT(o.steps.front()["loss"], 5.0);
  EXPECT_LT(result["final_loss"], 2.5);
  EXPECT_LT(result["heldout_nats_per_byte"], 2.5);
  EXPECT_FALSE(fs::exists(place.folder + "/out/sample.txt"));
  EXPECT_EQ(o.err.find('\033'), std::string::npos);
  EXPECT_EQ(o.err.find('\r'), std::string::npos);
}

TEST(Train, PlainOutputHasStepLinesAndASummary) {
  const Place place;
  const Outcome o = run(2,
                        Words{kConfigs + "stage1-bf16.json", "--text", place.text, "--steps", "6", "--set",
                              "steps_per_print=2", "--sample", "5", "--out", place.folder + "/out"} +
                            kSmall,
                        {"COLUMNS=80"});
  ASSERT_EQ(o.code, 0) << o.err;
  for (const char* step : {"step 2/6 loss ", "step 4/6 loss ", "step 6/6 loss "})
    EXPECT_EQ(count(o.out, step), 1u) << o.out;
  EXPECT_EQ(count(o.out, "step 3/6"), 0u);
  for (const char* part : {"held-out ", "memory of rank 0", "sample, after", "files in "})
    EXPECT_EQ(count(o.out, part), 1u) << part;
  EXPECT_EQ(count(o.err, "ranks: 2 from "), 1u) << o.err;
  const json config = json::parse(file_text(place.folder + "/out/config.json"));
  EXPECT_EQ(config["values"]["zero_optimization.stage"], 1);
  EXPECT_EQ(config["values"]["libzero.model.hidden"], 48);
  EXPECT_EQ(config["values"]["seed"], 1234);
  EXPECT_EQ(config["command"][0], "train");
}

TEST(Train, AResumedRunContinuesBitByBit) {
  const Place place;
  OneIn part(3);
  for (const std::string recipe : {"stage3-bf16", "stage2-bf16", "stage3-fp16"}) {
    if (!part.take()) continue;
    const Words common = Words{kConfigs + recipe + ".json",
                               "--text",
                               place.text,
                               "--json",
                               "--sample",
                               "4",
                               "--set",
                               "libzero.model.dropout=0.1",
                               "--set",
                               "gradient_accumulation_steps=2"} +
                         kSmall;
    const std::string dir = place.folder + "/" + recipe;
    const Outcome whole = run(2, common + Words{"--steps", "7", "--out", dir + "-whole"});
    ASSERT_EQ(whole.code, 0) << whole.err;
    const Outcome first =
        run(2, common + Words{"--steps", "4", "--checkpoint-dir", dir, "--save-every", "3", "--out", dir + "-cut"});
    ASSERT_EQ(first.code, 0) << first.err;
    const Outcome rest =
        run(2, common + Words{"--steps", "7", "--checkpoint-dir", dir, "--resume", "auto", "--out", dir + "-cut"});
    ASSERT_EQ(rest.code, 0) << rest.err;
    ASSERT_EQ(rest.steps.size(), 3u) << rest.err;
    EXPECT_EQ(numbers(first.steps) + numbers(rest.steps), numbers(whole.steps)) << recipe;
    // The one log of both parts.
    EXPECT_EQ(lines(file_text(dir + "-cut/log.jsonl")).size(), 7u);
    const json a = json::parse(file_text(dir + "-whole/result.json")),
               b = json::parse(file_text(dir + "-cut/result.json"));
    EXPECT_EQ(a["heldout_nats_per_byte"], b["heldout_nats_per_byte"]);
    EXPECT_EQ(file_text(dir + "-whole/sample.txt"), file_text(dir + "-cut/sample.txt"));
    // From the named one before the newest.
    const Outcome tagged = run(
        2, common + Words{"--steps", "5", "--checkpoint-dir", dir, "--resume", "global_step3", "--out", dir + "-tag"});
    ASSERT_EQ(tagged.code, 0) << tagged.err;
    ASSERT_EQ(tagged.steps.size(), 2u);
    EXPECT_EQ(numbers(tagged.steps)[0], numbers(whole.steps)[3]) << recipe;
  }
}

// After each save the old checkpoints go; what the run was resumed from stays.
TEST(Train, KeepsTheNewestCheckpoints) {
  const Place place;
  const std::string dir = place.folder + "/ck";
  const Words common =
      Words{kConfigs + "stage3-bf16.json", "--text",       place.text, "--json",           "--sample", "0", "--out",
            place.folder + "/out",         "--save-every", "1",        "--checkpoint-dir", dir} +
      kSmall;
  const Words words = common + Words{"--keep", "2"};
  const auto names = [&] {
    std::vector<std::string> tags;
    for (const auto& entry : std::filesystem::directory_iterator(dir))
      if (entry.is_directory()) tags.push_back(entry.path().filename());
    std::sort(tags.begin(), tags.end());
    return tags;
  };
  const Outcome first = run(2, words + Words{"--steps", "5"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(names(), (Words{"global_step4", "global_step5"}));
  const Outcome rest = run(1, words + Words{"--steps", "8", "--resume", "global_step4", "--keep-every", "3"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_EQ(names(), (Words{"global_step4", "global_step6", "global_step7", "global_step8"}));
  const Outcome unwritable = run(1, Words{kConfigs + "stage3-bf16.json", "--text", place.text, "--steps", "1", "--out",
                                          place.folder + "/out", "--checkpoint-dir", place.text} +
                                        kSmall);
  EXPECT_EQ(unwritable.code, 5) << unwritable.err;
  EXPECT_TRUE(unwritable.steps.empty()) << "found before training";
  EXPECT_NE(unwritable.err.find("[--checkpoint-dir] cannot write to"), std::string::npos) << unwritable.err;
  const Outcome alone = run(1, common + Words{"--steps", "8", "--keep-every", "3"});
  EXPECT_EQ(alone.code, 2) << alone.err;
}

// A bit of the newest checkpoint has changed: the run continues from the one before, and says which file it was and
// where.
TEST(Train, RotInTheNewestIsNamedAndSkipped) {
  const Place place;
  const std::string dir = place.folder + "/ck", older = place.folder + "/older";
  const Words common = Words{kConfigs + "stage3-bf16.json", "--text", place.text, "--json", "--sample", "0"} + kSmall +
                       Words{"--set", "libzero.model.hidden=96"};
  const auto resume = [&](const std::string& from) {
    return run(4, common + Words{"--steps", "6", "--resume", "auto", "--checkpoint-dir", from, "--out", from + "-out"});
  };
  const Outcome first = run(
      4, common + Words{"--steps", "4", "--save-every", "2", "--checkpoint-dir", dir, "--out", place.folder + "/out"});
  ASSERT_EQ(first.code, 0) << first.err;
  fs::create_directory(older);
  fs::copy(dir + "/global_step2", older + "/global_step2");
  const std::string file = dir + "/global_step4/rank-00002.safetensors";
  auto bytes = file_text(file);
  ASSERT_GT(bytes.size(), 600000U) << "blocks of 256 KiB";
  bytes[300000] ^= 16;
  std::ofstream(file, std::ios::binary) << bytes;
  const Outcome rotten = resume(dir), undamaged = resume(older);
  ASSERT_EQ(rotten.code, 0) << rotten.err;
  ASSERT_EQ(undamaged.code, 0) << undamaged.err;
  EXPECT_NE(rotten.err.find("skipped global_step4: "), std::string::npos) << rotten.err;
  EXPECT_NE(rotten.err.find(file + ": the block at offset 262144 has the hash "), std::string::npos) << rotten.err;
  EXPECT_NE(rotten.err.find("resumed from " + dir + "/global_step2 at step 2"), std::string::npos) << rotten.err;
  EXPECT_EQ(undamaged.steps.size(), 4U);
  EXPECT_EQ(numbers(rotten.steps), numbers(undamaged.steps));
}

// Saves of weights alone: what a run can be resumed from is what other runs have, they are kept apart, and another
// optimizer begins with them.
TEST(Train, WeightsAloneBeginAnotherRun) {
  const Place place;
  const std::string dir = place.folder + "/ck";
  const Words common = Words{kConfigs + "stage3-bf16.json", "--text", place.text, "--json", "--sample", "0", "--out",
                             place.folder + "/out"} +
                       kSmall;
  const Words words = common + Words{"--checkpoint-dir", dir};
  const auto names = [&] {
    std::vector<std::string> tags;
    for (const auto& entry : fs::directory_iterator(dir))
      if (entry.is_directory()) tags.push_back(entry.path().filename());
    std::sort(tags.begin(), tags.end());
    return tags;
  };
  const Words saving = {"--weights-only-every", "2", "--keep-weights", "2", "--save-every", "3", "--keep", "1"};
  const Outcome first = run(2, words + saving + Words{"--steps", "7", "--save-async"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(names(), (Words{"global_step7", "weights_step4", "weights_step6"}));
  EXPECT_NE(first.err.find("saved the weights in " + dir + "/weights_step6"), std::string::npos) << first.err;
  // The newest of all are weights alone, and are not resumed from.
  const Outcome more = run(2, words + Words{"--steps", "8", "--weights-only-every", "8", "--resume", "auto"});
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_EQ(more.steps.size(), 1u);
  fs::remove_all(dir + "/global_step8");
  const Outcome resumed = run(1, words + Words{"--steps", "8", "--resume", "auto"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("resumed from " + dir + "/global_step7"), std::string::npos) << resumed.err;
  const Outcome refused = run(1, words + Words{"--steps", "9", "--resume", "weights_step6"});
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_NE(refused.err.find("weights_step6 holds weights only"), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("--weights-only"), std::string::npos) << refused.err;
  // The same numbers as a run that imports them: step 1, the first sample, no states.
  const Words lion = {"--optimizer", "Lion"}, three = {"--steps", "3"};
  const Outcome other = run(2, words + lion + three + Words{"--resume", "weights_step6", "--weights-only"});
  ASSERT_EQ(other.code, 0) << other.err;
  const Outcome import = run(2, common + lion + three + Words{"--init-from", dir + "/weights_step6"});
  ASSERT_EQ(import.code, 0) << import.err;
  ASSERT_EQ(other.steps.size(), 3u);
  EXPECT_EQ(numbers(other.steps), numbers(import.steps));
  const Outcome states = run(2, words + lion + three + Words{"--resume", "global_step7"});
  EXPECT_EQ(states.code, 2) << states.err;
  EXPECT_NE(states.err.find("--weights-only"), std::string::npos) << states.err;
  // A run that was started again by the launcher continues from what it has saved itself.
  const Words again = words + lion + Words{"--resume", "auto", "--weights-only"};
  const auto launched = [&](const char* id, const char* count, const char* steps) {
    return run(0, again + Words{"--steps", steps},
               {std::string("ZERO_RUN_ID=") + id, std::string("ZERO_RESTART_COUNT=") + count});
  };
  const auto lengths = [&](const Outcome& outcome) { return std::make_pair(outcome.code, outcome.steps.size()); };
  EXPECT_EQ(lengths(launched("one", "0", "3")), std::make_pair(0, std::size_t{3}));
  EXPECT_EQ(lengths(launched("one", "1", "5")), std::make_pair(0, std::size_t{2}));
  EXPECT_EQ(lengths(launched("two", "1", "3")), std::make_pair(0, std::size_t{3}));
}

// Without one that can be resumed from, auto begins at the beginning, as without any.
TEST(Train, WeightsAloneAreNothingToResume) {
  const Place place;
  const std::string dir = place.folder + "/ck";
  const Words words = Words{kConfigs + "stage3-bf16.json",
                            "--text",
                            place.text,
                            "--json",
                            "--sample",
                            "0",
                            "--checkpoint-dir",
                            dir,
                            "--out",
                            place.folder + "/out"} +
                      kSmall;
  ASSERT_EQ(run(1, words + Words{"--steps", "2", "--weights-only-every", "1"}).code, 0);
  fs::remove_all(dir + "/global_step2");
  const Outcome fresh = run(1, words + Words{"--steps", "2", "--resume", "auto"});
  EXPECT_EQ(fresh.code, 0) << fresh.err;
  EXPECT_EQ(fresh.steps.size(), 2u) << fresh.err;
  // More layers than the checkpoint has: all that is missing in one error, or named by --partial.
  const Words deeper =
      words + Words{"--set", "libzero.model.layers=3", "--steps", "1", "--resume", "weights_step1", "--weights-only"};
  const Outcome missing = run(1, deeper);
  EXPECT_EQ(missing.code, 2) << missing.err;
  EXPECT_NE(missing.err.find("blocks.2.norm1.weight: not in the checkpoint"), std::string::npos) << missing.err;
  const Outcome partial = run(1, deeper + Words{"--partial", "blocks.2.*"});
  EXPECT_EQ(partial.code, 0) << partial.err;
  EXPECT_NE(partial.err.find("left as they were (partial): blocks.2."), std::string::npos) << partial.err;
}

TEST(Train, AutoStartsAfreshAndAMissingTagIsACheckpointError) {
  const Place place;
  const Words common = Words{kConfigs + "stage3-bf16.json",
                             "--text",
                             place.text,
                             "--steps",
                             "2",
                             "--json",
                             "--sample",
                             "0",
                             "--out",
                             place.folder + "/out",
                             "--checkpoint-dir",
                             place.folder + "/ck"} +
                       kSmall;
  const Outcome missing = run(1, common + Words{"--resume", "nothing"});
  EXPECT_EQ(missing.code, 3) << missing.err;
  // What a kill inside the first save leaves is no checkpoint.
  std::filesystem::create_directories(place.folder + "/ck/.tmp-0123456789abcdef0123456789abcdef");
  const Outcome fresh = run(1, common + Words{"--resume", "auto"});
  EXPECT_EQ(fresh.code, 0) << fresh.err;
  EXPECT_EQ(fresh.steps.size(), 2u);
  // Another text: the position does not apply.
  std::ofstream(place.folder + "/other.txt") << file_text(place.text).substr(0, 50000);
  const Outcome other =
      run(1, common + Words{"--resume", "auto", "--set", "libzero.data.text=" + place.folder + "/other.txt"});
  EXPECT_EQ(other.code, 0) << "--text wins over the key\n" << other.err;
  Words changed = common + Words{"--resume", "auto"};
  *std::find(changed.begin(), changed.end(), place.text) = place.folder + "/other.txt";
  const Outcome refused = run(1, changed);
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_NE(refused.err.find("same text"), std::string::npos) << refused.err;
}

TEST(Train, AStopSignalSavesAndAsksToBeStartedAgain) {
  const Place place;
  const Words train =
      Words{kZero, "train", kConfigs + "stage3-bf16.json", "--text", place.text, "--steps", "100000", "--sample",
            "0",   "--out", place.folder + "/out"} +
      kSmall;
  const Words ranks = {kZero, "run", "-n", "2", "--no-prefix"};
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const std::string dir = place.folder + "/ck" + std::to_string(signal);
    // An evaluation between steps is of an earlier step than the last one.
    Process p(Process::Settings{
        ranks + train + Words{"--checkpoint-dir", dir, "--eval-every", "2"}, {"OMP_NUM_THREADS=1"}, "", -1});
    ASSERT_TRUE(p.wait_for("step 3/", 60)) << p.err;
    p.signal(signal);
    EXPECT_EQ(p.wait(60), 75) << p.err;
    EXPECT_NE(p.err.find("--resume auto"), std::string::npos) << p.err;
    const json result = json::parse(file_text(place.folder + "/out/result.json"));
    const std::int64_t reached = result["steps"];
    EXPECT_TRUE(result["heldout_nats_per_byte"].is_null());
    EXPECT_NE(file_text(place.folder + "/out/log.jsonl").find("{\"step\": 2, \"heldout_loss\": "), std::string::npos);
    EXPECT_TRUE(fs::exists(dir + "/global_step" + std::to_string(reached)));
    const Outcome rest = run(
        2, Words{kConfigs + "stage3-bf16.json", "--text", place.text, "--steps", std::to_string(reached + 1), "--json",
                 "--sample", "0", "--out", place.folder + "/rest", "--checkpoint-dir", dir, "--resume", "auto"} +
               kSmall);
    ASSERT_EQ(rest.code, 0) << rest.err;
    ASSERT_EQ(rest.steps.size(), 1u);
    EXPECT_EQ(rest.steps[0]["step"], reached + 1);
  }
  // Nothing to save to.
  Process p(Process::Settings{ranks + train, {"OMP_NUM_THREADS=1"}, "", -1});
  ASSERT_TRUE(p.wait_for("step 3/", 60)) << p.err;
  p.signal(SIGTERM);
  EXPECT_EQ(p.wait(60), 143) << p.err;
  Process alone(Process::Settings{train, {"OMP_NUM_THREADS=1"}, "", -1});
  ASSERT_TRUE(alone.wait_for("step 3/", 60)) << alone.err;
  alone.signal(SIGINT);
  EXPECT_EQ(alone.wait(60), 130) << alone.err;
}

TEST(Train, MistakesAreNamedOnce) {
  const Place place;
  const std::string config = kConfigs + "stage3-bf16.json";
  const Words out = {"--out", place.folder + "/out"};
  std::ofstream(place.folder + "/empty.txt");
  std::ofstream(place.folder + "/short.txt") << "too short";
  const struct {
    Words words;
    std::string says;
  } cases[] = {
      {{config, "--text", place.text, "--stpes", "3"}, "--steps"},
      {{config, "--text", place.text, "--steps", "-1"}, "from 0"},
      {{config, "--text", place.text, "--dtype", "bf61"}, "bf16"},
      {{config, "--text", place.text, "--stage", "4"}, "from 0 to 3"},
      {{config, "--text", place.text, "--set", "zero_optimization.stge=2"}, "stage"},
      {{config, "--text", place.text, "--set", "libzero.model.heads=7"}, "heads 7"},
      {{config, "--text", place.text, "--save-every", "2"}, "--checkpoint-dir"},
      {{config, "--text", place.text, "--weights-only"}, "--resume"},
      {{config, "--text", place.text, "--partial", "*"}, "neither --resume nor --init-from"},
      {{config, "--text", place.text, "--optimizer", "AdamX"}, "AdamW"},
      {{}, "CONFIG.json"},
      {{config, config, "--text", place.text}, "no further word"},
      {{config, "--text", place.folder + "/none.txt"}, "No such file"},
      {{config, "--text", place.folder + "/empty.txt"}, "empty"},
      {{config, "--text", place.folder + "/short.txt"}, "9 bytes"},
  };
  OneIn part(2);
  for (const auto& c : cases) {
    if (!part.take()) continue;
    const Outcome o = run(0, c.words + out);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_NE(o.err.find(c.says), std::string::npos) << o.err;
    EXPECT_EQ(count(o.err, "zero train: error: "), 1u) << o.err;
    EXPECT_EQ(o.out, "");
  }
  EXPECT_FALSE(fs::exists(place.folder + "/out"));
  // Both ranks fail with the same error; only one of them prints it.
  for (const Words& words : {cases[0].words, cases[4].words, cases[13].words}) {
    const Outcome o = run(2, words + out);
    EXPECT_EQ(o.code, 2) << o.err;
    // The launcher repeats the last lines of the rank that failed.
    EXPECT_EQ(count(o.err.substr(0, o.err.find("--- last lines")), "zero train: error: "), 1u) << o.err;
  }
}

TEST(Train, WithoutATextItSaysWhichOneItTakes) {
  const Place place;
  const Outcome o = run(0, Words{kConfigs + "stage3-bf16.json", "--steps", "1", "--json", "--sample", "0", "--out",
                                 place.folder + "/out"} +
                               kSmall);
  const std::string stand_in = "/usr/share/common-licenses/GPL-3";
  EXPECT_EQ(o.code, fs::exists(stand_in) ? 0 : 2) << o.err;
  EXPECT_EQ(count(o.err, fs::exists(stand_in) ? "text " + stand_in : "--text FILE"), 1u) << o.err;
}

TEST(Train, HelpFitsATerminalAndNamesEveryOption) {
  Process p({kZero, "train", "--help"});
  EXPECT_EQ(p.wait(), 0);
  for (const std::string& line : lines(p.out)) EXPECT_LE(line.size(), 80u) << line;
  for (const char* name :
       {"--steps", "--stage", "--json", "--set", "--warmup-steps", "--micro-batch-size", "--optimizer", "--lr",
        "--weight-decay", "--dtype", "--text", "--checkpoint-dir", "--save-every", "--resume", "--sample", "--out"})
    EXPECT_NE(p.out.find(name), std::string::npos) << name;
}

}  // namespace
}  // namespace zero::test::train_test
