// `zero bench step` with tensor and sequence parallelism: what it says of the mesh is what docs/parallelism.md says.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/process.h"

namespace zero::test::bench_mesh_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

constexpr double kLayers = 2, kTokens = 16, kHidden = 32, kVocabulary = 64, kBytes = 4;  // fp32
constexpr double kActivation = kTokens * kHidden * kBytes;

Ended bench_step(const Words& words) {
  Words all{ZERO_BINARY_DIR "/bin/zero",
            "bench",
            "step",
            "--layers",
            "2",
            "--hidden",
            "32",
            "--heads",
            "4",
            "--sequence",
            "16",
            "--vocabulary",
            "64",
            "--rounds",
            "1",
            "--steps",
            "3",
            "--warmup",
            "1",
            "--quiet"};
  all.insert(all.end(), words.begin(), words.end());
  return run_to_end({all, {"COLUMNS=100", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1}, 120);
}

json document(Words words) {
  words.push_back("--json");
  const auto run = bench_step(words);
  EXPECT_EQ(run.code, 0) << run.err;
  return json::parse(run.out, nullptr, false);
}

TEST(BenchMesh, TensorParallelStepsSendWhatTheFormulaSays) {
  const auto found = document({"--tensor-parallel", "2", "--stages", "0,3", "--recipes", "fp32"});
  EXPECT_EQ(found["mesh"], json({{"dp", 1}, {"sp", 1}, {"tp", 2}}));
  EXPECT_EQ(found["equal_losses"]["fp32"], true);
  const double floor = found["compute"][0]["floor_s"];
  ASSERT_EQ(found["runs"].size(), 2u);
  for (const auto& one : found["runs"]) {
    // Two sums in forward and two in backward a block, one each at the embedding and the head; f = 1/2.
    const auto& sums = one["operations"]["tp.all_reduce"];
    EXPECT_EQ(sums["calls"], 4 * kLayers + 2);
    EXPECT_EQ(sums["bytes_sent"], (4 * kLayers + 2) * kActivation);
    EXPECT_EQ(one["operations"]["tp.all_gather"]["bytes_sent"], kTokens * kVocabulary * kBytes / 2);
    EXPECT_EQ(one["bytes_by_axis"]["tensor_parallel"], one["bytes_sent_per_step"]);
    EXPECT_EQ(one["bytes_by_axis"]["zero"], 0);
    EXPECT_EQ(one["bytes_by_axis"]["sequence_parallel"], 0);
    const double alone = one["collectives_alone_s"];
    EXPECT_GT(alone, 0);
    EXPECT_NEAR(alone, sums["alone_s"].get<double>() + one["operations"]["tp.all_gather"]["alone_s"].get<double>(),
                1e-12);
    EXPECT_DOUBLE_EQ(one["step_over_floor_and_collectives"], one["step_s"]["median"].get<double>() / (floor + alone));
  }
}

// Ranks send different numbers of bytes. Over TCP, calls of different sizes would wait for each other until the
// timeout.
TEST(BenchMesh, TimesCollectivesOfUnevenParts) {
  const auto found = document({"--world", "3", "--tensor-parallel", "3", "--transport", "gloo", "--stages", "0",
                               "--recipes", "fp32", "--no-compute"});
  const auto& operations = found["runs"][0]["operations"];
  ASSERT_TRUE(operations.contains("tp.all_to_all")) << operations.dump();
  for (const auto& [name, row] : operations.items()) EXPECT_GT(row.value("alone_s", 0.0), 0) << name;
}

TEST(BenchMesh, ComputeAloneComputesItsPart) {
  const auto elements = [](const Words& words) {
    Words all{"--stages", "0", "--recipes", "fp32"};
    all.insert(all.end(), words.begin(), words.end());
    return document(all)["compute"][0]["parameters_elements"].get<double>();
  };
  const double h = kHidden, norms = 2 * h, cut = 3 * h * (h + 1) + h * h + 4 * h * (h + 1) + 4 * h * h, biases = 2 * h,
               outside = kTokens * h + norms, vocabulary = kVocabulary * h;
  const auto part = [&](double t) { return outside + vocabulary / t + kLayers * (2 * norms + biases + cut / t); };
  EXPECT_EQ(elements({"--tensor-parallel", "2"}), part(2));
  EXPECT_EQ(elements({"--sequence-parallel", "2"}), part(1));
}

TEST(BenchMesh, SamplesAreSharedByTheRanksOfAMesh) {
  const auto losses = [](const Words& words) {
    Words all{"--stages", "2", "--recipes", "fp32", "--no-compute"};
    all.insert(all.end(), words.begin(), words.end());
    const auto found = document(all)["runs"][0];
    return std::pair<double, double>(found["first_loss"], found["last_loss"]);
  };
  const auto alone = losses({"--world", "1"}), tensor = losses({"--tensor-parallel", "2"});
  EXPECT_NEAR(tensor.first, alone.first, 1e-5);
  EXPECT_NEAR(tensor.second, alone.second, 1e-4);
  // Rank 0's, of the first half of the tokens.
  EXPECT_NEAR(losses({"--sequence-parallel", "2"}).first, alone.first, 0.2);
  EXPECT_GT(std::abs(losses({"--world", "2"}).second - alone.second), 1e-3) << "data-parallel ranks read other samples";
}

TEST(BenchMesh, BothKindsTogether) {
  const auto found = document({"--world", "4", "--tensor-parallel", "2", "--sequence-parallel", "2", "--stages", "0,3",
                               "--recipes", "fp32,bf16"});
  EXPECT_EQ(found["mesh"], json({{"dp", 1}, {"sp", 2}, {"tp", 2}}));
  EXPECT_EQ(found["equal_losses"], json({{"fp32", true}, {"bf16", true}}));
  for (const auto& one : found["runs"]) {
    double sum = 0;
    for (const char* axis : {"zero", "tensor_parallel", "sequence_parallel"}) {
      EXPECT_GT(one["bytes_by_axis"][axis], 0) << axis;
      sum += one["bytes_by_axis"][axis].get<double>();
    }
    EXPECT_EQ(sum, one["bytes_sent_per_step"]);
    // 4 x the whole sequence's activation x (u - 1) / u^2 a layer and pass, of half of the heads.
    const double bytes = one["recipe"] == "fp32" ? 1 : 0.5;
    EXPECT_EQ(one["bytes_by_axis"]["sequence_parallel"], bytes * 2 * kLayers * 4 * kActivation / 4 / 2);
  }
}

TEST(BenchMesh, CheckpointedSegmentsAndTheirPartition) {
  const Words common{"--tensor-parallel", "2", "--stages", "0", "--recipes", "fp32", "--no-compute"};
  const auto with = [&](const Words& more) {
    Words all = common;
    all.insert(all.end(), more.begin(), more.end());
    return document(all);
  };
  const auto plain = with({}), segments = with({"--segments", "2"}),
             parts = with({"--segments", "2", "--set", "activation_checkpointing.partition_activations=true"});
  EXPECT_FALSE(plain.contains("segments"));
  EXPECT_EQ(segments["segments"], 2);
  const auto sent = [](const json& found, const char* operation) {
    return found["runs"][0]["operations"][operation]["bytes_sent"].get<double>();
  };
  EXPECT_EQ(sent(segments, "tp.all_reduce"), (5 * kLayers + 2) * kActivation);
  EXPECT_EQ(sent(parts, "tp.all_reduce"), sent(segments, "tp.all_reduce"));
  EXPECT_EQ(sent(parts, "tp.all_gather") - sent(segments, "tp.all_gather"), 2 * kActivation / 2);
  for (const auto* found : {&segments, &parts})
    for (const char* loss : {"first_loss", "last_loss"})
      EXPECT_EQ((*found)["runs"][0][loss], plain["runs"][0][loss]) << loss;
}

TEST(BenchMesh, Tables) {
  const auto run = bench_step({"--sequence-parallel", "2", "--stages", "3", "--recipes", "bf16", "--segments", "2"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text : {"1 x 16 tokens a data-parallel rank", "mesh 1 dp x 2 sp x 1 tp", "2 checkpointed segments",
                           "sent by ZeRO", "tp, sp alone ms", "/(floor + alone)", "losses equal"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  for (const auto& line : lines(run.out)) EXPECT_LE(line.size(), 100u) << line;
}

TEST(BenchMesh, NothingIsSaidOfAMeshThatIsNotThere) {
  const auto found = document({"--stages", "0", "--recipes", "fp32"});
  for (const char* key : {"mesh", "segments"}) EXPECT_FALSE(found.contains(key)) << key;
  for (const char* key : {"bytes_by_axis", "operations", "collectives_alone_s"})
    EXPECT_FALSE(found["runs"][0].contains(key)) << key;
}

TEST(BenchMesh, WrongDegrees) {
  const auto refused = [](const Words& words, const std::string& text) {
    const auto run = bench_step(words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  };
  refused({"--world", "3", "--tensor-parallel", "2"},
          "3 ranks are no multiple of tensor_parallel.autotp_size 2 x sequence_parallel_size 1");
  refused({"--world", "6", "--tensor-parallel", "2", "--sequence-parallel", "2"}, "6 ranks are no multiple of");
  refused(
      {"--world", "8", "--tensor-parallel", "4", "--sequence-parallel", "2"},
      "got tensor_parallel.autotp_size 4 x sequence_parallel_size 2 and 4 heads, expected at least one head for each "
      "rank. Hint: choose degrees whose product is at most 4.");
  refused({"--world", "5", "--sequence-parallel", "5"}, "sequence_parallel_size 5 and 4 heads");
  refused({"--segments", "0"}, "--segments");
}

}  // namespace
}  // namespace zero::test::bench_mesh_test
