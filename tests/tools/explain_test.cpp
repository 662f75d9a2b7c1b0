// `zero explain` as a user runs it: tables that fit the terminal, one JSON document, error messages, and --live, which
// compares the prediction with a run and fails if they differ.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/nightly.h"
#include "support/process.h"
#include "support/require.h"

namespace zero::test::explain_test {
namespace {

using nlohmann::json;

Ended explain(const Words& words, const std::vector<std::string>& environment = {}, double seconds = 30) {
  std::vector<std::string> variables{"OMP_NUM_THREADS=1", "NO_COLOR=1"};
  variables.insert(variables.end(), environment.begin(), environment.end());
  if (environment.empty()) variables.emplace_back("COLUMNS=80");
  return run_to_end({Words{ZERO_BINARY_DIR "/bin/zero", "explain"} + words, variables, "", -1}, seconds);
}

json document(const Words& words, double seconds = 30) {
  const auto outcome = explain(words + Words{"--json"}, {}, seconds);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  auto parsed = json::parse(outcome.out, nullptr, false);
  EXPECT_FALSE(parsed.is_discarded()) << outcome.out.substr(0, 500);
  return parsed;
}

bool is_collective(const json& event) {
  static const std::set<std::string> kAll{"all-gather", "reduce-scatter", "all-reduce", "broadcast", "mapped in place"};
  return kAll.count(event["how"]) != 0;
}

TEST(Explain, HelpEndsWithAnExampleAndFits) {
  const auto help = explain({"--help"});
  EXPECT_EQ(help.code, 0);
  const auto all = lines(help.out);
  ASSERT_FALSE(all.empty());
  EXPECT_NE(all.back().find("zero explain"), std::string::npos);
  for (const auto& line : all) EXPECT_LE(line.size(), 80u) << line;
}

TEST(Explain, MistakesAreNamed) {
  const std::vector<std::pair<Words, std::string>> cases{
      {{"ofload"}, "did you mean \"offload\""},
      {{"infinty"}, "did you mean \"infinity\""},
      {{"stge", "3"}, "did you mean \"stage\""},
      {{"stage"}, "stage without a number"},
      {{"stage", "4"}, "stage 4"},
      {{"stage", "1", "stage", "2"}, "two stages"},
      {{"stage", "0", "offload"}, "offload at stage 0"},
      {{"stage", "2", "infinity"}, "infinity at stage 2"},
      {{"stage", "3", "--wrold", "2"}, "--world"},
      {{"stage", "3", "--transport", "nccl"}, "--transport"},
      {{"stage", "3", "--dtype", "fp23"}, "--dtype"},
      {{"stage", "3", "--hidden", "63"}, "hidden"},
      {{"stage", "3", "--model", "gpt22"}, "gpt2"},
      {{"--config", "/does/not/exist.json"}, "/does/not/exist.json"},
      {{"stage", "3", "--set", "zero_optimization.stagee=2"}, "stage"},
      {{"stage", "3", "--live", "--device", "cuda"}, "--live"},
      {{"stage", "3", "--live", "--model", "gpt2-xl"}, "--live"},
  };
  for (const auto& [words, expected] : cases) {
    const auto outcome = explain(words);
    std::string text;
    for (const auto& word : words) text += word + " ";
    EXPECT_TRUE(outcome.code == 2 || outcome.code == 5) << text << outcome.code;
    EXPECT_EQ(outcome.out, "") << text;
    EXPECT_NE(outcome.err.find(expected), std::string::npos) << text << outcome.err;
  }
}

TEST(Explain, TablesFit) {
  for (const int columns : {60, 80, 100, 132})
    for (const Words& words :
         {Words{"stage", "0"}, Words{"stage", "1", "offload"},
          Words{"stage", "3", "--world", "8", "--accumulation", "4"}, Words{"infinity", "--layers", "12"},
          Words{"stage", "3", "--device", "cuda", "--model", "gpt2"},
          Words{"stage", "3", "--world", "8", "--tensor-parallel", "2", "--sequence-parallel", "2"}}) {
      const auto outcome = explain(words, {"COLUMNS=" + std::to_string(columns)});
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      EXPECT_GT(lines(outcome.out).size(), 15u);
      for (const auto& line : lines(outcome.out)) {
        EXPECT_LE(line.size(), static_cast<std::size_t>(columns)) << line;
        EXPECT_EQ(line.find_last_not_of(' ') + 1, line.size()) << "trailing spaces: " << line;
      }
    }
}

// What each stage shards, as fields of the document.
TEST(Explain, WhoHoldsAndWhoSendsWhat) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto d = document(
        {"stage", std::to_string(stage), "--world", "4", "--transport", "gloo", "--layers", "4", "--hidden", "128"});
    EXPECT_EQ(d["schema"], "zero.explain/1");
    EXPECT_EQ(d["stage"], stage);
    std::map<std::string, bool> sharded;
    for (const auto& holding : d["holdings"]) sharded[holding["state"]] = holding["sharded"];
    EXPECT_EQ(sharded["optimizer states"], stage >= 1) << stage;
    EXPECT_EQ(sharded["master parameters"], stage >= 1) << stage;
    EXPECT_EQ(sharded["gradients"], stage >= 2) << stage;
    EXPECT_EQ(sharded["parameters"], stage == 3) << stage;
    std::map<std::string, std::set<std::string>> moved;  // "forward parameters" -> how
    for (const auto& event : d["events"])
      if (is_collective(event))
        moved[event["phase"].get<std::string>() + " " + event["what"].get<std::string>()].insert(event["how"]);
    for (const auto& [key, ways] : moved)
      EXPECT_EQ(key.find("optimizer states"), std::string::npos) << "never sent, at any stage";
    using Ways = std::set<std::string>;
    EXPECT_EQ(moved["forward parameters"], stage == 3 ? Ways{"all-gather"} : Ways{}) << stage;
    EXPECT_EQ(moved["backward parameters"], stage == 3 ? Ways{"all-gather"} : Ways{}) << stage;
    EXPECT_EQ(moved["backward gradients"], stage == 0 ? (Ways{"reduce-scatter", "all-gather"}) : Ways{"reduce-scatter"})
        << stage;
    EXPECT_EQ(moved["step parameters"], stage == 1 || stage == 2 ? Ways{"all-gather"} : Ways{}) << stage;
    EXPECT_EQ(moved["step gradients"], Ways{}) << stage;
    EXPECT_NEAR(d["volume"]["times_parameters"].get<double>(), stage == 3 ? 3 : 2, 0.01) << stage;
    EXPECT_DOUBLE_EQ(d["volume"]["padded_bytes"].get<double>(), d["volume"]["sent_bytes"].get<double>()) << stage;
  }
}

TEST(Explain, ATemporaryFolderThatCannotBeMadeIsNamed) {
  const std::string none = temporary_folder() + "/none";
  const auto outcome = explain({"stage", "3", "--live"}, {"TMPDIR=" + none});
  EXPECT_EQ(outcome.code, 5) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "[zero explain] cannot make the temporary folder " + none + "/zero-explain-"))
      << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "No such file or directory. Hint: set TMPDIR to a folder")) << outcome.err;
}

// Units that stay fp32 have runs of their own.
TEST(Explain, NumberedUnitsWithAMarkAreJoined) {
  const auto file = temporary_folder() + "/ds.json";
  std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": )"
                      << R"("AdamW"}, "zero_optimization": {"stage": 3}, "libzero": {"keep_fp32": "*norm*"}})";
  const auto outcome = explain({"--config", file, "--world", "4", "--model", "gpt2-xl"}, {"COLUMNS=200"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_LT(lines(outcome.out).size(), 60u) << outcome.out;
  for (const char* run :
       {"blocks.0 to blocks.47", "blocks.0 (fp32) to blocks.47 (fp32)", "blocks.47 (fp32) to blocks.0 (fp32)"})
    EXPECT_TRUE(contains(outcome.out, run)) << run << " in " << outcome.out;
}

TEST(Explain, OffloadAndInfinityArePlaces) {
  const auto offload = document({"offload"});
  EXPECT_EQ(offload["stage"], 2);
  for (const auto& holding : offload["holdings"])
    EXPECT_EQ(holding["tier"], holding["state"] == "parameters" ? "device" : "host") << holding.dump();
  const auto infinity = document({"infinity"});
  EXPECT_EQ(infinity["stage"], 3);
  for (const auto& holding : infinity["holdings"])
    EXPECT_EQ(holding["tier"], holding["state"] == "gradients" ? "host" : "file") << holding.dump();
  EXPECT_GT(infinity["totals"]["step"]["read_bytes"].get<std::int64_t>(), 0);
  EXPECT_EQ(document({"stage", "1", "offload"})["stage"], 1);
  // On a GPU what is offloaded crosses to the host and back.
  const auto gpu = document({"offload", "--device", "cuda"});
  std::set<std::string> ways;
  for (const auto& event : gpu["events"])
    if (event["how"] == "copy")
      ways.insert(event["what"].get<std::string>() + " " + event["from"].get<std::string>() + " " +
                  event["to"].get<std::string>());
  EXPECT_EQ(ways, (std::set<std::string>{"gradients device host", "parameters host device"}));
}

TEST(Explain, AConfigurationAsItIs) {
  const auto d = document({"--config", ZERO_SOURCE_DIR "/configs/stage3-bf16.json"});
  EXPECT_EQ(d["stage"], 3);
  EXPECT_EQ(d["recipe"], "bf16");
  EXPECT_EQ(
      document({"stage", "1", "--config", ZERO_SOURCE_DIR "/configs/stage3-bf16.json", "--dtype", "fp32"})["stage"], 1);
  // DeepSpeed's examples, each with a model and a world size.
  int read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ZERO_SOURCE_DIR "/configs/deepspeed-examples")) {
    if (entry.path().extension() != ".json") continue;
    const auto outcome = explain({"--config", entry.path().string(), "--world", "1", "--transport", "shm", "--set",
                                  "train_batch_size=auto", "--set", "train_micro_batch_size_per_gpu=1", "--set",
                                  "gradient_accumulation_steps=1"});
    EXPECT_EQ(outcome.code, 0) << entry.path() << outcome.err;
    ++read;
  }
  EXPECT_GE(read, 10);
}

// f and g of a layer's split products, and what they add up to. B: bytes of [1 sample, 32 tokens, 64 features] in fp32;
// each sum over 2 ranks sends B (docs/parallelism.md).
TEST(Explain, FAndGOfABlock) {
  constexpr std::int64_t kB = 32 * 64 * 4;
  const Words words{"stage", "2", "--dtype", "fp32", "--world", "4", "--tensor-parallel", "2"};
  const auto d = document(words);
  EXPECT_EQ(d["mesh"], "2 dp x 1 sp x 2 tp");
  EXPECT_EQ(d["sharded_over"], 2);
  const struct {
    const char *weight, *cut, *forward, *backward;
    std::vector<int> sizes;
  } products[] = {{"blocks.0.qkv.weight", "column", "", "f", {96, 64}},
                  {"blocks.0.projection.weight", "row", "g", "", {64, 32}},
                  {"blocks.0.up.weight", "column", "", "f", {128, 64}},
                  {"blocks.0.down.weight", "row", "g", "", {64, 128}}};
  ASSERT_EQ(d["split_products"].size(), std::size(products));
  for (std::size_t i = 0; i < std::size(products); ++i) {
    const auto& got = d["split_products"][i];
    const auto& expected = products[i];
    EXPECT_EQ(got["weight"], expected.weight);
    EXPECT_EQ(got["cut"], expected.cut);
    EXPECT_EQ(got["sizes_a_rank"], expected.sizes);
    for (const char* phase : {"forward", "backward"}) {
      const std::string name = phase[0] == 'f' ? expected.forward : expected.backward;
      EXPECT_EQ(got[phase].is_null(), name.empty()) << expected.weight << phase;
      if (name.empty()) continue;
      EXPECT_EQ(got[phase]["name"], name);
      EXPECT_EQ(got[phase]["operation"], "all-reduce");
      EXPECT_EQ(got[phase]["sent_bytes"], kB);
    }
  }
  const auto sent = [](const json& document, const std::string& phase) {
    std::int64_t sum = 0;
    for (const auto& e : document["activations_of_a_micro_batch"])
      if (e["phase"] == phase) sum += e["sent_bytes"].get<std::int64_t>();
    return sum;
  };
  // 2 layers, embedding and head; logits of 256 bytes are gathered.
  EXPECT_EQ(sent(d, "forward"), 5 * kB + 32 * 256 * 4 / 2);
  EXPECT_EQ(sent(d, "backward"), 5 * kB);
  // A segment's second run ends before its last g.
  const auto again = document(words + Words{"--set", "activation_checkpointing.number_checkpoints=2"});
  EXPECT_EQ(sent(again, "recomputation"), 2 * kB);
  // An own plan: only attention is cut, so a layer has one f and one g, and a second run ends after its g.
  const auto attention = document(
      words + Words{"--set", "activation_checkpointing.number_checkpoints=1", "--set",
                    R"(tensor_parallel.partition_config={"use_default_specs": false, "layer_specs": [)"
                    R"({"patterns": ["blocks\\.\\d+\\.qkv\\.weight"], "partition_type": "column", "shape": [3, -1]},)"
                    R"({"patterns": ["blocks\\.\\d+\\.projection\\.weight"], "partition_type": "row"}]})"});
  EXPECT_EQ(attention["split_products"].size(), 2u);
  EXPECT_EQ(sent(attention, "forward"), 2 * kB);
  EXPECT_EQ(sent(attention, "backward"), 2 * kB);
  EXPECT_EQ(sent(attention, "recomputation"), 2 * kB);
  // Llama's query, key and value have one f, as its gate and up.
  const auto llama = document({"stage", "3", "--model", "llama-3-8b", "--world", "16", "--tensor-parallel", "8"});
  std::string names;
  for (const auto& product : llama["split_products"])
    names += (product["backward"].is_null() ? "-" : product["backward"]["name"].get<std::string>()) +
             (product["forward"].is_null() ? "- " : product["forward"]["name"].get<std::string>() + " ");
  EXPECT_EQ(names, "f- -- -- -g f- -- -g ");
}

TEST(Explain, AMeshInWords) {
  const auto both = explain({"stage", "1", "--world", "4", "--tensor-parallel", "2", "--sequence-parallel", "2"});
  EXPECT_EQ(both.code, 0) << both.err;
  for (const char* part : {"4 ranks on CPUs = 1 dp x 2 sp x 2 tp", "blocks.0.down.weight", "g: all-reduce, 2.00KiB",
                           "sp.all_to_all", "sent by ZeRO", "of activations"})
    EXPECT_NE(both.out.find(part), std::string::npos) << part << both.out;
  // Ranks with different parts share no state: ZeRO has nothing to send.
  const auto alone = explain({"stage", "3", "--world", "2", "--tensor-parallel", "2"});
  EXPECT_NE(alone.out.find("ZeRO sends nothing"), std::string::npos) << alone.out;
  EXPECT_EQ(alone.out.find("With one rank"), std::string::npos);
  const auto odd = explain({"stage", "3", "--world", "3", "--tensor-parallel", "2"});
  EXPECT_EQ(odd.code, 2);
  EXPECT_NE(odd.err.find("3 ranks are no multiple of tensor_parallel.autotp_size 2"), std::string::npos) << odd.err;
}

// The words, and the document of a run that must agree with the schedule.
std::pair<std::string, json> live(const Words& words) {
  std::string text;
  for (const auto& word : words) text += word + " ";
  auto d = document(words + Words{"--live"}, 120);
  EXPECT_TRUE(d.contains("live")) << text;
  EXPECT_TRUE(d["live"]["agrees"].get<bool>()) << text << d["live"]["difference"];
  return {text, d};
}

TEST(Explain, LiveAgrees) {
  const std::vector<Words> cases{
      {"stage", "0"},
      {"stage", "1", "--accumulation", "2"},
      {"stage", "2", "--dtype", "fp32"},
      {"stage", "3"},
      {"stage", "3", "--world", "3", "--dtype", "fp16"},
      {"stage", "3", "--world", "1"},
      {"stage", "3", "--transport", "gloo", "--set", "zero_optimization.zero_quantized_weights=true"},
      {"stage", "2", "--transport", "gloo", "--accumulation", "2"},
      {"stage", "0", "--transport", "gloo"},
      {"offload"},
      {"offload", "--transport", "thread", "--set", "zero_optimization.delayed_update.enabled=true", "--set",
       "zero_optimization.delayed_update.start_step=1"},
      {"infinity"},
      {"infinity", "--transport", "thread", "--accumulation", "2"}};
  OneIn part(5);
  for (const auto& words : cases) {
    if (!part.take()) continue;
    const auto [text, d] = live(words);
    EXPECT_EQ(d["live"]["steps"], 3) << text;
    const bool one = d["world"] == 1;
    EXPECT_EQ(d["live"]["ranks"].size(), d["world"].get<std::size_t>()) << text;
    for (const auto& rank : d["live"]["ranks"]) {
      EXPECT_GT(rank["events"].size(), one ? 0u : 15u) << text;
      EXPECT_EQ(rank["sent"].empty(), one) << text;
    }
  }
}

// ZeRO's events on every rank, of parts that may be uneven, and what is sent of activations.
TEST(Explain, LiveAgreesOnAMesh) {
  const std::vector<Words> cases{
      {"stage", "3", "--world", "4", "--tensor-parallel", "2"},
      {"stage", "1", "--world", "4", "--tensor-parallel", "2", "--sequence-parallel", "2", "--accumulation", "2"},
      {"stage", "2", "--world", "2", "--sequence-parallel", "2", "--transport", "gloo"},
      {"stage", "2", "--world", "2", "--sequence-parallel", "2", "--heads", "3", "--hidden", "48", "--sequence", "33"},
      {"stage", "3", "--world", "2", "--tensor-parallel", "2", "--heads", "3", "--hidden", "48", "--vocabulary", "131"},
      {"offload", "--world", "4", "--tensor-parallel", "2", "--heads", "5", "--hidden", "40", "--vocabulary", "131",
       "--transport", "thread", "--set", "activation_checkpointing.number_checkpoints=2"},
      {"infinity", "--world", "4", "--tensor-parallel", "2", "--set", "tensor_parallel.vocab_parallel_lm_head=true"}};
  OneIn part(5);
  for (const auto& words : cases) {
    if (!part.take()) continue;
    const auto [text, d] = live(words);
    ASSERT_EQ(d["live"]["ranks"].size(), d["world"].get<std::size_t>()) << text;
    for (const auto& rank : d["live"]["ranks"])
      for (const char* axis : {"tp", "sp"}) {
        const auto sent = std::count_if(rank["sent"].begin(), rank["sent"].end(),
                                        [&](const json& row) { return row["operation"] == axis; });
        const bool has = text.find(*axis == 't' ? "--tensor" : "--sequence-parallel") != std::string::npos;
        EXPECT_EQ(sent, has ? 6 * (text.find("--accumulation 2") == std::string::npos ? 1 : 2) : 0) << text << axis;
      }
  }
}

// Units of experts on their own axis, in the engine's order, and as many all-to-alls.
TEST(Explain, LiveAgreesWithExperts) {
  const Words moe{"--moe", "--num-experts", "4", "--layers", "4", "--ep-world-size"};
  const std::vector<Words> cases{
      Words{"stage", "0", "--world", "2"} + moe + Words{"2"},
      Words{"stage", "1", "--world", "4"} + moe + Words{"2", "--accumulation", "2"},
      Words{"stage", "2", "--world", "4"} + moe + Words{"4", "--transport", "gloo"},
      Words{"stage", "3", "--world", "4"} + moe + Words{"2", "--set", "libzero.model.experts.use_residual=true"},
      Words{"stage", "3", "--world", "4"} + moe + Words{"2", "--set", "activation_checkpointing.number_checkpoints=2"},
      Words{"stage", "3", "--world", "2"} + moe + Words{"1"},
      Words{"offload", "--world", "2"} + moe + Words{"2", "--transport", "thread"}};
  OneIn part(5);
  for (const auto& words : cases)
    if (part.take()) live(words);
}

TEST(Explain, ExpertsHaveTheirOwnRanks) {
  const auto d = document({"stage", "2", "--world", "4", "--moe", "--num-experts", "8", "--ep-world-size", "2"});
  EXPECT_EQ(d["mesh"], "4 dp x 1 sp x 1 tp, experts over 2");
  int found = 0;
  for (const auto& unit : d["units"]) {
    const bool experts = unit["name"] == "blocks.1.mlp.experts";
    EXPECT_EQ(unit["ranks"], experts ? 2 : 4) << unit;
    if (!experts) continue;
    EXPECT_EQ(unit["elements"], 4 * (8 * 64 * 64 + 5 * 64));
    ++found;
  }
  EXPECT_EQ(found, 1);
  for (const auto& e : d["events"])
    if (e["how"] == "reduce-scatter" && e["unit"] == "blocks.1.mlp.experts") {
      EXPECT_EQ(e["sent_bytes"].get<double>() * 2, e["bytes"]);
    }
  std::int64_t calls = 0;
  for (const auto& row : d["activations_of_a_micro_batch"]) {
    EXPECT_EQ(row["operation"], "ep.all_to_all");
    calls += row["calls"].get<std::int64_t>();
  }
  EXPECT_EQ(calls, 5) << "numbers, there and back; there and back again in backward";
  const auto text = explain({"stage", "2", "--world", "4", "--moe", "--num-experts", "8", "--ep-world-size", "2"});
  EXPECT_NE(text.out.find("parameters of"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("ep: 2 consecutive ranks"), std::string::npos) << text.out;
  for (const auto& line : lines(text.out)) EXPECT_LE(line.size(), 80u) << line;
}

TEST(Explain, LiveInWords) {
  const auto outcome = explain({"stage", "3", "--live"}, {}, 60);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("The run agrees with the schedule"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("all_gather"), std::string::npos) << outcome.out;
  for (const auto& line : lines(outcome.out)) EXPECT_LE(line.size(), 80u) << line;
}

}  // namespace
}  // namespace zero::test::explain_test
