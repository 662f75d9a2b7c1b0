// The block `activation_checkpointing` and libzero.activation_offload from outside: `zero train` prints the same
// numbers with them, and `zero bench activations` finds larger batches.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test::activations_command_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

struct Trained {
  int code;
  std::vector<double> losses;
  std::string err;
};

Trained train(const std::string& text, const std::string& folder, const Words& more, int ranks) {
  static int runs = 0;
  Process process({Words{kZero,
                         "run",
                         "-n",
                         std::to_string(ranks),
                         "--no-prefix",
                         kZero,
                         "train",
                         ZERO_SOURCE_DIR "/configs/stage3-fp32.json",
                         "--text",
                         text,
                         "--steps",
                         "3",
                         "--sample",
                         "0",
                         "--json",
                         "--out",
                         folder + "/run" + std::to_string(runs++),
                         "--set",
                         "libzero.model.layers=4",
                         "--set",
                         "libzero.model.hidden=48",
                         "--set",
                         "libzero.model.heads=3",
                         "--set",
                         "libzero.model.seq_length=32",
                         "--set",
                         "libzero.data.eval_batches=1"} +
                       more,
                   {"OMP_NUM_THREADS=1"},
                   "",
                   -1});
  Trained result{process.wait(120), {}, ""};
  result.err = process.err;
  for (const auto& line : lines(process.out))
    if (const json step = json::parse(line, nullptr, false); step.is_object() && step.contains("loss"))
      result.losses.push_back(step["loss"]);
  return result;
}

TEST(TrainActivations, TheSameNumbersHoweverTheyAreKept) {
  const auto folder = temporary_folder(), text = folder + "/text.txt";
  {
    std::ofstream out(text);
    for (int i = 0; i < 4000; ++i) out << "the king of " << i * 7919 % 1000 << " rivers\n";
  }
  const auto plain = train(text, folder, {}, 2);
  ASSERT_EQ(plain.code, 0) << plain.err;
  ASSERT_EQ(plain.losses.size(), 3u) << plain.err;
  EXPECT_EQ(plain.err.find("activation checkpointing"), std::string::npos);
  const auto set = [](const std::string& setting) { return Words{"--set", setting}; };
  const std::vector<std::pair<Words, std::string>> ways = {
      {set("activation_checkpointing.number_checkpoints=2"), "2 segments of 4 layers"},
      {set("activation_checkpointing.number_checkpoints=9") +
           set("activation_checkpointing.contiguous_memory_optimization=true"),
       "4 segments of 4 layers"},
      {set("activation_checkpointing.cpu_checkpointing=true") + set("activation_checkpointing.profile=true"),
       "inputs wait in host memory"},
      {set("activation_checkpointing.partition_activations=true"),
       "no effect: tensor_parallel.autotp_size is not above 1"},
      {set("libzero.activation_file_path=" + folder), "inputs wait in a file in " + folder},
      {set("libzero.activation_offload.device=cpu") + set("libzero.activation_offload.min_bytes=1024"), ""},
  };
  for (const auto& [settings, says] : ways) {
    SCOPED_TRACE(settings.back());
    const auto run = train(text, folder, settings, 2);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.losses, plain.losses);
    EXPECT_NE(run.err.find(says), std::string::npos) << run.err;
    if (settings.back().find("profile") != std::string::npos)
      EXPECT_NE(run.err.find("activation checkpointing: 4 segments, ms forward + again:"), std::string::npos)
          << run.err;
  }
}

TEST(BenchActivations, LargerBatchesTheLessIsKept) {
  Process process({Words{kZero, "bench", "activations", "--budget", "12", "--layers", "6", "--hidden", "64",
                         "--sequence", "64", "--most", "32", "--quiet", "--json"},
                   {"OMP_NUM_THREADS=2"},
                   "",
                   -1});
  ASSERT_EQ(process.wait(240), 0) << process.err;
  const auto document = json::parse(process.out);
  EXPECT_EQ(document["schema"], "zero.bench.activations/1");
  EXPECT_TRUE(document["equal_state"].get<bool>());
  std::map<std::string, json> ways;
  for (const auto& way : document["ways"]) ways[way["name"]] = way;
  ASSERT_EQ(ways.size(), 6u);
  const auto batch = [&](const std::string& name) { return ways.at(name)["largest_batch"].get<int>(); };
  EXPECT_GE(batch("kept"), 1);
  EXPECT_GT(batch("computed again"), batch("kept"));
  EXPECT_GE(batch("computed again, inputs in host memory"), batch("computed again"));
  EXPECT_GT(batch("away in host memory"), batch("kept"));
  EXPECT_GT(batch("away in a file"), batch("kept"));
  for (const auto& [name, way] : ways) {
    EXPECT_LE(way["device_peak_bytes"].get<std::int64_t>(), document["budget_bytes"].get<std::int64_t>()) << name;
    EXPECT_EQ(way["host_peak_bytes"].get<std::int64_t>() > 0,
              name.find("host") != std::string::npos || name.find("file") != std::string::npos)
        << name;
    EXPECT_EQ(way["file_peak_bytes"].get<std::int64_t>() > 0, name.find("file") != std::string::npos) << name;
  }
}

}  // namespace
}  // namespace zero::test::activations_command_test
