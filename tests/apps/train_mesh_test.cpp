// `zero train` with tensor and sequence parallelism learns as one rank does.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/train_command.h"

namespace zero::test::train_mesh_test {
namespace {

using Words = std::vector<std::string>;

const TrainedRun& of_one_rank() {
  static const TrainedRun run = train_command(1, {});
  return run;
}

void expect_as_one_rank(int ranks, const Words& options) {
  const auto& wanted = of_one_rank();
  ASSERT_EQ(wanted.code, 0) << wanted.err;
  ASSERT_EQ(wanted.losses.size(), 12u);
  const auto got = train_command(ranks, options);
  ASSERT_EQ(got.code, 0) << got.err;
  ASSERT_EQ(got.losses.size(), wanted.losses.size());
  for (std::size_t i = 0; i < wanted.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], wanted.losses[i], 2e-4) << "step " << i;
  EXPECT_LT(wanted.losses.back(), wanted.losses.front() - 0.5);
  EXPECT_NEAR(got.heldout, wanted.heldout, 2e-4);
  EXPECT_NE(wanted.heldout, 0);
}

// Over 4, 2 and 1 ranks, and with another cut, a run takes the samples of one that stays at 4: none twice, none
// skipped.
TEST(TrainMesh, ResumesOnOtherRanks) {
  const Words save{"--checkpoint-dir", "saved", "--save-every", "4"};
  const auto whole = train_command(4, save);
  ASSERT_EQ(whole.code, 0) << whole.err;
  ASSERT_EQ(whole.losses.size(), 12u);
  struct Part {
    int ranks, end;
    Words options;
  };
  const Words from_8{"--resume", "global_step8", "--set", "gradient_accumulation_steps=2", "--tensor-parallel", "2"};
  for (const auto& [ranks, end, options] :
       std::vector<Part>{{2, 8, {"--resume", "global_step4", "--set", "gradient_accumulation_steps=2"}},
                         {1, 12, {"--resume", "global_step8", "--set", "gradient_accumulation_steps=4"}},
                         {4, 12, from_8}}) {
    auto words = save;
    words.insert(words.end(), options.begin(), options.end());
    const auto part = train_command(ranks, words, end, whole.folder);
    ASSERT_EQ(part.code, 0) << part.err;
    EXPECT_NE(part.err.find("loading the checkpoint of "), std::string::npos) << part.err;
    EXPECT_NE(part.err.find("sample " + std::to_string((end == 8 ? 4 : 8) * 16)), std::string::npos) << part.err;
    ASSERT_GE(part.losses.size(), 4u);
    for (std::size_t k = 0; k < 4; ++k) {
      const auto wanted = whole.losses[static_cast<std::size_t>(end) - 4 + k];
      EXPECT_NEAR(part.losses[part.losses.size() - 4 + k], wanted, 2e-5 * wanted) << ranks << " ranks, step " << k;
    }
  }
}

TEST(TrainMesh, TensorParallel) { expect_as_one_rank(2, {"--tensor-parallel", "2"}); }

TEST(TrainMesh, SequenceParallel) { expect_as_one_rank(2, {"--sequence-parallel", "2"}); }

TEST(TrainMesh, Both) {
  expect_as_one_rank(4, {"--tensor-parallel", "2", "--sequence-parallel", "2", "--set",
                         "activation_checkpointing.partition_activations=true"});
}

// The bytes of the recorded step by kind of parallelism are those of the plan, at every stage and for every mesh, also
// where a group is the whole world and counts under plain names. Samples and tokens are of data-parallel ranks.
TEST(TrainMesh, BytesAreThePlans) {
  // A second run of segments that end with an uncut product does not end before the last sum.
  const char* const attention =
      R"(tensor_parallel.partition_config={"use_default_specs": false, "layer_specs": [)"
      R"({"patterns": [".*qkv\\.weight"], "partition_type": "column", "shape": [3, -1], "multiple": 10},)"
      R"({"patterns": [".*projection\\.weight"], "partition_type": "row", "multiple": 10}]})";
  const char* const gathered = R"(tensor_parallel.partition_config={"use_default_specs": false, "layer_specs": [)"
                               R"({"patterns": [".*up\\.weight"], "partition_type": "column", "gather_output": true},)"
                               R"({"patterns": [".*down\\.weight"], "partition_type": "row", "scatter_input": true}]})";
  const struct {
    int ranks, tensor, sequence, stage;
    const char *setting, *plan = "";  // empty: none
  } cases[] = {{2, 2, 1, 3, ""},
               {2, 1, 2, 0, ""},
               {2, 1, 2, 3, ""},
               {4, 2, 1, 0, ""},
               {4, 2, 1, 1, "activation_checkpointing.partition_activations=true"},
               {4, 2, 1, 2, "activation_checkpointing.number_checkpoints=2"},
               {4, 2, 1, 3, "tensor_parallel.vocab_parallel_lm_head=true"},
               {4, 1, 2, 2, "activation_checkpointing.number_checkpoints=1"},
               {2, 2, 1, 1, "activation_checkpointing.number_checkpoints=2", attention},
               {2, 2, 1, 1, "activation_checkpointing.number_checkpoints=2", gathered},
               {4, 2, 2, 1, ""},
               {4, 2, 2, 3, "gradient_accumulation_steps=2"}};
  for (const auto& c : cases) {
    const std::string degrees[] = {std::to_string(c.tensor), std::to_string(c.sequence), std::to_string(c.stage)};
    SCOPED_TRACE("t " + degrees[0] + ", u " + degrees[1] + ", stage " + degrees[2] + ", " + std::to_string(c.ranks) +
                 " ranks " + c.setting);
    Words options{"--tensor-parallel", degrees[0], "--sequence-parallel",   degrees[1], "--stage",
                  degrees[2],          "--set",    "libzero.model.heads=4", "--set",    "libzero.model.seq_length=32"};
    for (const char* setting : {c.setting, c.plan})
      if (*setting) options.insert(options.end(), {"--set", setting});
    const auto run = train_command(c.ranks, options, 3);
    ASSERT_EQ(run.code, 0) << run.err;
    const int data = c.ranks / c.tensor / c.sequence, steps = std::string(c.setting).starts_with("gradient") ? 2 : 1;
    EXPECT_EQ(run.record["mesh"]["dp"], data);
    EXPECT_EQ(run.record["mesh"]["tp"], c.tensor);
    EXPECT_EQ(run.record["mesh"]["sp"], c.sequence);
    EXPECT_EQ(run.record["samples_per_step"], 4 * steps * data);
    EXPECT_EQ(run.record["tokens_per_step"], 4 * steps * data * 32);
    const auto& last = run.log.at(2);
    EXPECT_NEAR(last["tokens_per_s"].get<double>() * last["step_ms"].get<double>() / 1000, 4 * steps * data * 32, 0.01);
    const auto& recorded = run.record["recorded"];
    std::uint64_t zero = 0, tensor = 0, sequence = 0;
    for (const auto& row : recorded["traffic"]) {
      const auto operation = row["operation"].get<std::string>();
      if (operation == "control") continue;
      (operation.starts_with("tp.")   ? tensor
       : operation.starts_with("sp.") ? sequence
                                      : zero) += row["bytes_sent"].get<std::uint64_t>();
    }
    const auto& planned = recorded["planned"]["sent_bytes"];
    EXPECT_EQ(planned["zero"], zero);
    EXPECT_EQ(planned["tensor_parallel"], tensor);
    EXPECT_EQ(planned["sequence_parallel"], sequence);
    EXPECT_EQ(zero > 0, data * c.sequence > 1);
    EXPECT_EQ(tensor > 0, c.tensor > 1);
    EXPECT_EQ(sequence > 0, c.sequence > 1);
    EXPECT_EQ(last["zero_bytes_sent"], zero);
    EXPECT_EQ(last["tensor_parallel_bytes_sent"], tensor);
    EXPECT_EQ(last["sequence_parallel_bytes_sent"], sequence);
    EXPECT_EQ(last["bytes_sent"], zero + tensor + sequence);
    EXPECT_EQ(run.result["sent_per_step"]["tensor_parallel"], tensor);
    ASSERT_EQ(recorded["ranks"].size(), static_cast<std::size_t>(c.ranks));
    for (int rank = 0; rank < c.ranks; ++rank) {
      const auto& row = recorded["ranks"][static_cast<std::size_t>(rank)];
      EXPECT_EQ(row["rank"], rank);
      EXPECT_EQ(row["tp"], rank % c.tensor);
      EXPECT_EQ(row["sp"], rank / c.tensor % c.sequence);
      EXPECT_EQ(row["dp"], rank / c.tensor / c.sequence);
      EXPECT_EQ(row["sent_bytes"]["tensor_parallel"], tensor);
      EXPECT_GT(row["at_rest_bytes"], 0);
      EXPECT_GE(row["peak_bytes"], row["at_rest_bytes"]);
    }
  }
}

// A budget leaves room for the activations of a rank's part, not for those of the whole model.
TEST(TrainMesh, BudgetsLeaveRoomForTheirOwnActivations) {
  const auto room = [](const Words& degrees) {
    Words options{"--stage", "1",
                  "--set",   "memory.device=20000000",
                  "--set",   "memory.host=20000000",
                  "--set",   "libzero.model.heads=4",
                  "--set",   "libzero.model.seq_length=32"};
    options.insert(options.end(), degrees.begin(), degrees.end());
    const auto run = train_command(4, options, 3);
    EXPECT_EQ(run.code, 0) << run.err;
    for (const auto& row : run.record["configuration"])
      if (row["key"] == "memory.activations") return row["value"].get<double>();
    ADD_FAILURE() << "no memory.activations";
    return 0.0;
  };
  const auto whole = room({}), parts = room({"--tensor-parallel", "2", "--sequence-parallel", "2"});
  EXPECT_LT(parts, 0.5 * whole);
  EXPECT_GT(parts, 0.25 * whole);
}

// Parts of different sizes: every rank has its own row, and the plan is of the largest part.
TEST(TrainMesh, UnevenParts) {
  const auto run = train_command(2, {"--tensor-parallel", "2", "--stage", "1"}, 3);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto& ranks = run.record["recorded"]["ranks"];
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_LT(ranks[0]["at_rest_bytes"], ranks[1]["at_rest_bytes"]);  // 2 and 3 of 5 heads
  EXPECT_EQ(run.log.at(0).contains("sequence_parallel_bytes_sent"), true);
  EXPECT_FALSE(of_one_rank().log.at(0).contains("zero_bytes_sent")) << "as before, without a mesh";
  EXPECT_FALSE(of_one_rank().record["recorded"].contains("ranks"));
}

TEST(TrainMesh, LogitsDividedOverTheVocabulary) {
  expect_as_one_rank(2, {"--tensor-parallel", "2", "--set", "tensor_parallel.vocab_parallel_lm_head=true"});
}

TEST(TrainMesh, WrongDegrees) {
  const auto ranks = train_command(3, {"--tensor-parallel", "2"});
  EXPECT_EQ(ranks.code, 2);
  EXPECT_NE(ranks.err.find("3 ranks are no multiple of tensor_parallel.autotp_size 2"), std::string::npos) << ranks.err;
  const auto heads = train_command(2, {"--tensor-parallel", "2", "--sequence-parallel", "3"});
  EXPECT_EQ(heads.code, 2);
  EXPECT_NE(heads.err.find("5 heads, expected at least one head for each rank"), std::string::npos) << heads.err;
}

}  // namespace
}  // namespace zero::test::train_mesh_test
