// `zero train` with tensor and sequence parallelism learns as one rank does.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test::train_mesh_test {
namespace {

using Words = std::vector<std::string>;

struct Run {
  int code = -1;
  std::string err;
  std::vector<double> losses;
  double heldout = 0;
};

// A GPT of 5 heads on sequences of 33 tokens, so that heads and tokens divide unevenly.
Run train(int ranks, const Words& options) {
  const std::string folder = temporary_folder();
  {
    std::ofstream text(folder + "/text.txt");
    for (unsigned i = 0, state = 7; i < 12000; ++i) {
      state = state * 1664525u + 1013904223u;
      text << (state >> 16) % 100 << (i % 9 ? " " : "\n");
    }
  }
  Words words{ZERO_BINARY_DIR "/bin/zero",
              "run",
              "-n",
              std::to_string(ranks),
              "zero",
              "train",
              ZERO_SOURCE_DIR "/configs/stage3-bf16.json",
              "--text",
              folder + "/text.txt",
              "--dtype",
              "fp32",
              "--steps",
              "12",
              "--micro-batch-size",
              "4",
              "--out",
              folder + "/out",
              "--sample",
              "20"};
  for (const char* setting : {"libzero.model.layers=2", "libzero.model.hidden=40", "libzero.model.heads=5",
                              "libzero.model.seq_length=33", "libzero.data.eval_batches=2"})
    words.insert(words.end(), {"--set", setting});
  words.insert(words.end(), options.begin(), options.end());
  Process process(Process::Settings{words, {"OMP_NUM_THREADS=1"}, folder, -1});
  Run run;
  run.code = process.wait(120);
  run.err = process.err;
  std::ifstream metrics(folder + "/out/log.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("loss")) run.losses.push_back(row["loss"]);
  }
  std::ifstream result(folder + "/out/result.json");
  const auto json = nlohmann::json::parse(result, nullptr, false);
  if (json.is_object()) run.heldout = json.value("heldout_nats_per_byte", 0.0);
  return run;
}

const Run& of_one_rank() {
  static const Run run = train(1, {});
  return run;
}

void expect_as_one_rank(int ranks, const Words& options) {
  const auto& wanted = of_one_rank();
  ASSERT_EQ(wanted.code, 0) << wanted.err;
  ASSERT_EQ(wanted.losses.size(), 12u);
  const auto got = train(ranks, options);
  ASSERT_EQ(got.code, 0) << got.err;
  ASSERT_EQ(got.losses.size(), wanted.losses.size());
  for (std::size_t i = 0; i < wanted.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], wanted.losses[i], 2e-4) << "step " << i;
  EXPECT_LT(wanted.losses.back(), wanted.losses.front() - 0.5);
  EXPECT_NEAR(got.heldout, wanted.heldout, 2e-4);
  EXPECT_NE(wanted.heldout, 0);
}

TEST(TrainMesh, TensorParallel) { expect_as_one_rank(2, {"--tensor-parallel", "2"}); }

TEST(TrainMesh, SequenceParallel) { expect_as_one_rank(2, {"--sequence-parallel", "2"}); }

TEST(TrainMesh, Both) {
  expect_as_one_rank(4, {"--tensor-parallel", "2", "--sequence-parallel", "2", "--set",
                         "activation_checkpointing.partition_activations=true"});
}

TEST(TrainMesh, LogitsDividedOverTheVocabulary) {
  expect_as_one_rank(2, {"--tensor-parallel", "2", "--set", "tensor_parallel.vocab_parallel_lm_head=true"});
}

TEST(TrainMesh, WrongDegrees) {
  const auto ranks = train(3, {"--tensor-parallel", "2"});
  EXPECT_EQ(ranks.code, 2);
  EXPECT_NE(ranks.err.find("3 ranks are no multiple of tensor_parallel.autotp_size 2"), std::string::npos) << ranks.err;
  const auto heads = train(2, {"--tensor-parallel", "2", "--sequence-parallel", "3"});
  EXPECT_EQ(heads.code, 2);
  EXPECT_NE(heads.err.find("5 heads, expected at least one head for each rank"), std::string::npos) << heads.err;
}

}  // namespace
}  // namespace zero::test::train_mesh_test
