// The output of `zero train` during a run: files for TensorBoard and CSV with DeepSpeed's tags, times and bytes of the
// parts of a step, and a progress line on terminals only.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::train_monitor_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

struct Place {
  Place() : folder(temporary_folder()) {
    std::ofstream text(folder + "/text.txt");
    for (int i = 0; i < 3000; ++i) text << "over the river went seven horses " << i * 7919 % 1000 << "\n";
  }
  Words train(int steps) const {
    return {kZero,
            "train",
            ZERO_SOURCE_DIR "/configs/stage2-bf16.json",
            "--text",
            folder + "/text.txt",
            "--steps",
            std::to_string(steps),
            "--sample",
            "0",
            "--out",
            folder + "/out",
            "--set",
            "libzero.model.layers=2",
            "--set",
            "libzero.model.hidden=48",
            "--set",
            "libzero.model.heads=3",
            "--set",
            "libzero.model.seq_length=32",
            "--set",
            "libzero.data.eval_batches=2"};
  }
  std::string folder;
};

TEST(TrainMonitor, FilesHaveTheTagsAndTheNumbersOfTheLog) {
  const Place place;
  Process process(Process::Settings{Words{kZero, "run", "-n", "2", "--no-prefix"} + place.train(6) +
                                        Words{"--json",
                                              "--set",
                                              "gradient_accumulation_steps=2",
                                              "--set",
                                              "train_micro_batch_size_per_gpu=3",
                                              "--set",
                                              "tensorboard.enabled=true",
                                              "--set",
                                              "tensorboard.output_path=" + place.folder,
                                              "--set",
                                              "tensorboard.job_name=board",
                                              "--set",
                                              "csv_monitor.enabled=true",
                                              "--set",
                                              "csv_monitor.output_path=" + place.folder,
                                              "--set",
                                              "csv_monitor.job_name=sheets",
                                              "--set",
                                              "wall_clock_breakdown=true",
                                              "--set",
                                              "memory_breakdown=true",
                                              "--set",
                                              "steps_per_print=3"},
                                    {"OMP_NUM_THREADS=1"},
                                    "",
                                    -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  std::vector<json> steps;
  for (const std::string& line : lines(process.out)) steps.push_back(json::parse(line));
  ASSERT_EQ(steps.size(), 6u);

  const auto check = [&](const std::string& tag, auto value_of) {
    const auto rows = lines(file_text(place.folder + "/sheets/Train_Samples_" + tag + ".csv"));
    ASSERT_EQ(rows.size(), 7u) << tag;
    EXPECT_EQ(rows[0], "step," + tag);
    for (std::size_t i = 0; i < 6; ++i) {
      const auto comma = rows[i + 1].find(',');
      EXPECT_EQ(rows[i + 1].substr(0, comma), std::to_string(12 * (i + 1))) << "samples of both ranks";
      const double expected = value_of(steps[i]);
      EXPECT_NEAR(std::stod(rows[i + 1].substr(comma + 1)), expected, 1e-6 * std::abs(expected) + 1e-6)
          << tag << " " << i;
    }
  };
  const auto field = [](const char* name) { return [name](const json& step) { return step.at(name).get<double>(); }; };
  check("train_loss", field("loss"));
  check("lr", field("lr"));
  check("loss_scale", field("loss_scale"));
  check("grad_norm", field("grad_norm"));
  check("elapsed_time_ms_forward", field("forward_ms"));
  check("elapsed_time_ms_backward", field("backward_ms"));
  check("elapsed_time_ms_backward_allreduce", field("reduce_ms"));
  check("elapsed_time_ms_backward_inner",
        [](const json& step) { return step.at("backward_ms").get<double>() - step.at("reduce_ms").get<double>(); });
  check("elapsed_time_ms_step", field("update_ms"));
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(place.folder + "/board")) {
    ++files;
    EXPECT_GT(entry.file_size(), 6u * 9 * 20);
    EXPECT_NE(file_text(entry.path()).find("Train/Samples/elapsed_time_ms_backward_allreduce"), std::string::npos);
  }
  EXPECT_EQ(files, 1u) << "rank 0 writes, the others do not";

  for (std::size_t i = 0; i < 6; ++i) {
    const json& step = steps[i];
    const auto ms = [&](const char* name) { return step.at(name).get<double>(); };
    EXPECT_LE(ms("reduce_ms"), ms("backward_ms"));
    EXPECT_LE(ms("forward_ms") + ms("backward_ms") + ms("update_ms"), ms("step_ms"));
    EXPECT_GT(ms("bytes_sent"), 0);
    EXPECT_EQ(step.contains("memory"), i % 3 == 2) << "with the lines that are printed";
  }
  const json& memory = steps[2]["memory"];
  for (const char* after : {"after_forward", "after_backward", "after_step"}) {
    EXPECT_GT(memory[after]["bytes"], 0) << after;
    EXPECT_GE(memory[after]["peak_bytes"], memory[after]["bytes"]) << after;
  }
  EXPECT_GT(memory["after_forward"]["bytes"], memory["after_step"]["bytes"]) << "activations";
}

TEST(TrainMonitor, PlainLinesCarryTheBreakdowns) {
  const Place place;
  Process process(Process::Settings{place.train(4) + Words{"--set", "wall_clock_breakdown=true", "--set",
                                                           "memory_breakdown=true", "--set", "steps_per_print=2"},
                                    {"OMP_NUM_THREADS=1"},
                                    "",
                                    -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  std::size_t with_times = 0, with_bytes = 0;
  for (const std::string& line : lines(process.out)) {
    if (line.rfind("step ", 0) == 0)
      for (const char* part : {" forward ", " backward ", " reduce ", " update "})
        with_times += line.find(part) != std::string::npos;
    with_bytes += line.rfind("  memory  after forward ", 0) == 0 && line.find("after step ") != std::string::npos;
  }
  EXPECT_EQ(with_times, 2u * 4);
  EXPECT_EQ(with_bytes, 2u);
}

TEST(TrainMonitor, WithoutTheKeysNothingIsMeasured) {
  const Place place;
  Process process(Process::Settings{place.train(2) + Words{"--json"}, {"OMP_NUM_THREADS=1"}, place.folder, -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  for (const std::string& line : lines(process.out)) {
    EXPECT_FALSE(json::parse(line).contains("forward_ms"));
    EXPECT_FALSE(json::parse(line).contains("memory"));
  }
  EXPECT_FALSE(fs::exists(place.folder + "/DeepSpeedJobName"));
}

TEST(TrainMonitor, AFolderThatCannotBeWrittenIsAnIoError) {
  const Place place;
  std::ofstream(place.folder + "/taken") << "x";
  Process process(Process::Settings{place.train(2) + Words{"--set", "csv_monitor.enabled=true", "--set",
                                                           "csv_monitor.output_path=" + place.folder + "/taken"},
                                    {"OMP_NUM_THREADS=1"},
                                    "",
                                    -1});
  EXPECT_EQ(process.wait(120), 5) << process.err;
  EXPECT_NE(process.err.find("csv_monitor.output_path"), std::string::npos) << process.err;
}

TEST(TrainMonitor, OnATerminalOneLineRedrawsItself) {
  if (std::system("script --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "no program script (package bsdutils)";
  const Place place;
  std::string command = "stty cols 110 2>/dev/null; exec";
  // Enough steps for a fast machine too to pass the second after which the time left is known.
  for (const std::string& word : place.train(600)) command += " '" + word + "'";
  const std::string typed = place.folder + "/typed";
  Process process(Process::Settings{{"/usr/bin/script", "-qec", command, typed},
                                    {"OMP_NUM_THREADS=1", "TERM=xterm", "LC_ALL=C.UTF-8", "COLUMNS"},
                                    "",
                                    -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  const std::string shown = process.out;
  // Redraws begin with a carriage return and end with "erase to the end of the line", never with a new one.
  std::size_t redraws = 0;
  bool named = false;
  for (std::size_t at = shown.find("\033[K"); at != std::string::npos; at = shown.find("\033[K", at + 1)) {
    const std::size_t begin = shown.rfind('\r', at);
    ASSERT_NE(begin, std::string::npos);
    const std::string line = shown.substr(begin + 1, at - begin - 1);
    if (line.empty()) continue;  // a wipe
    ++redraws;
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    const bool all = line.find("step ") != std::string::npos && line.find("/600") != std::string::npos &&
                     line.find("loss ") != std::string::npos && line.find(" tok/s") != std::string::npos &&
                     line.find("  mem ") != std::string::npos;
    EXPECT_TRUE(all) << line;
    named = named || line.find("  eta ") != std::string::npos;
  }
  EXPECT_GE(redraws, 3u);
  EXPECT_TRUE(named) << "time left";
  EXPECT_EQ(shown.find("step 10/600 loss 5"), std::string::npos) << "no step lines in addition";
  const std::size_t last = shown.rfind("\033[K");
  EXPECT_LT(last, shown.find("memory of rank 0")) << "wiped before the results";
}

}  // namespace
}  // namespace zero::test::train_monitor_test
