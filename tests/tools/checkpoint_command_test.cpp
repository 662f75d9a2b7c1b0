// `zero checkpoint` as a user sees it: what it shows of a directory, the exit codes, the streams.
#include <gtest/gtest.h>

#include <filesystem>

#include <nlohmann/json.hpp>

#include "support/file_text.h"
#include "support/process.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::checkpoint_command_test {
namespace {

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";

Ended ask(std::vector<std::string> words) {
  words.insert(words.begin(), {kZero, "checkpoint"});
  return run_to_end({words, {}, {}, -1}, 60);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(CheckpointCommand, InspectShowsTheManifest) {
  TempFolder folder;
  save_sample(formats::system_files(), folder.text(), "one", 1);
  save_sample(formats::system_files(), folder.text(), "two", 2);
  auto answer = ask({"inspect", folder.text()});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_EQ(answer.err, "");
  EXPECT_TRUE(contains(answer.out, folder.text() + "/two") && contains(answer.out, "layer.weight") &&
              contains(answer.out, "[30,10]"))
      << answer.out;
  for (const auto& line : lines(answer.out)) EXPECT_LE(line.size(), 80u) << line;
  answer = ask({"inspect", folder.text(), "--tag", "one"});
  EXPECT_TRUE(contains(answer.out, folder.text() + "/one")) << answer.out;
  // One checkpoint by its own path, as JSON.
  answer = ask({"inspect", folder.text() + "/one/", "--json"});
  const auto json = nlohmann::json::parse(answer.out);
  EXPECT_EQ(json["tag"], "one");
  EXPECT_EQ(json["manifest"], nlohmann::json::parse(file_text(folder.path() / "one" / "manifest.json")));
}

TEST(CheckpointCommand, ListTellsWholeFromDamaged) {
  TempFolder folder;
  for (int i = 1; i <= 3; ++i) save_sample(formats::system_files(), folder.text(), "t" + std::to_string(i), i);
  std::filesystem::remove(folder.path() / "t3" / "SUMS");
  const auto answer = ask({"inspect", folder.text(), "--list", "--json"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  const auto list = nlohmann::json::parse(answer.out)["checkpoints"];
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0]["tag"], "t2");
  EXPECT_TRUE(list[0]["newest"].get<bool>());
  EXPECT_EQ(list[2]["tag"], "t3");
  EXPECT_FALSE(list[2]["whole"].get<bool>());
  EXPECT_TRUE(contains(list[2]["fault"], "SUMS"));
  EXPECT_TRUE(contains(ask({"inspect", folder.text(), "--list"}).out, "whole, newest"));
}

TEST(CheckpointCommand, WeightsOnlyIsSaid) {
  TempFolder folder;
  save_sample(formats::system_files(), folder.text(), "all", 1);
  save_sample_weights(formats::system_files(), folder.text(), "w1", 2);
  save_sample_weights(formats::system_files(), folder.text(), "w2", 3);
  auto answer = ask({"inspect", folder.text(), "--list", "--json"});
  const auto list = nlohmann::json::parse(answer.out)["checkpoints"];
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0]["tag"], "w2");
  EXPECT_EQ(list[0]["content"], "weights");
  EXPECT_FALSE(list[0]["newest"].get<bool>());
  EXPECT_EQ(list[2]["content"], "training");
  EXPECT_TRUE(list[2]["newest"].get<bool>());
  EXPECT_TRUE(contains(ask({"inspect", folder.text(), "--list"}).out, "weights only"));
  EXPECT_TRUE(contains(ask({"inspect", folder.text()}).out, folder.text() + "/all"));
  EXPECT_TRUE(contains(ask({"inspect", folder.text() + "/w1"}).out, "no run can be resumed"));
  answer = ask({"verify", folder.text()});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_TRUE(contains(answer.out, "w1: whole") && contains(answer.out, "; weights only")) << answer.out;
  // An export takes the newest weights.
  ASSERT_EQ(ask({"export", folder.text(), (folder.path() / "hf").string(), "--to", "hf"}).code, 0);
  float first = 0;
  const auto tensors = plain_tensors(folder.path() / "hf" / "model.safetensors");
  std::memcpy(&first, tensors.at("layer.weight").bytes.data(), sizeof first);
  EXPECT_EQ(first, 3.f);
  answer = ask({"prune", folder.text(), "--keep", "1", "--json"});
  EXPECT_EQ(nlohmann::json::parse(answer.out)["removed"].size(), 0u) << answer.out;
  answer = ask({"prune", folder.text(), "--keep", "1", "--keep-weights", "1", "--json"});
  EXPECT_EQ(nlohmann::json::parse(answer.out)["removed"][0]["tag"], "w1") << answer.out;
}

TEST(CheckpointCommand, VerifyReadsEveryByte) {
  TempFolder folder;
  save_sample(formats::system_files(), folder.text(), "t", 1);
  EXPECT_EQ(ask({"verify", folder.text()}).code, 0);
  const auto file = folder.path() / "t" / "rank-00000.safetensors";
  auto bytes = file_text(file);
  bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 1);
  write_all(file, bytes);
  EXPECT_EQ(ask({"inspect", folder.text()}).code, 0) << "sizes and the manifest are right";
  const auto answer = ask({"verify", folder.text()});
  EXPECT_EQ(answer.code, 3);
  EXPECT_EQ(answer.out, "");
  EXPECT_TRUE(contains(answer.err, "rank-00000.safetensors") && contains(answer.err, "hash")) << answer.err;
}

// Without a tag all checkpoints count: a damaged newest one is not passed over for an older one.
TEST(CheckpointCommand, VerifyReadsAllCheckpoints) {
  TempFolder folder;
  for (int i = 1; i <= 3; ++i) save_sample(formats::system_files(), folder.text(), "t" + std::to_string(i), i);
  EXPECT_EQ(lines(ask({"verify", folder.text()}).out).size(), 3u);
  std::filesystem::remove(folder.path() / "t3" / "rank-00000.safetensors");
  const auto file = folder.path() / "t1" / "rank-00000.safetensors";
  auto bytes = file_text(file);
  bytes[bytes.size() - 5] ^= 1;
  write_all(file, bytes);
  auto answer = ask({"verify", folder.text()});
  EXPECT_EQ(answer.code, 3);
  EXPECT_TRUE(contains(answer.out, "t2: whole")) << answer.out;
  EXPECT_TRUE(contains(answer.err, "2 of 3 checkpoints") && contains(answer.err, "t1/rank-00000") &&
              contains(answer.err, "t3/rank-00000"))
      << answer.err;
  answer = ask({"verify", folder.text(), "--json"});
  EXPECT_EQ(nlohmann::json::parse(answer.out)["damaged"], 2);
  EXPECT_EQ(ask({"verify", folder.text(), "--tag", "t2"}).code, 0);
}

TEST(CheckpointCommand, PruneRemovesOldOnes) {
  TempFolder folder;
  for (int i = 1; i <= 4; ++i) save_sample(formats::system_files(), folder.text(), "t" + std::to_string(i), i);
  const auto there = [&](int i) { return std::filesystem::exists(folder.path() / ("t" + std::to_string(i))); };
  auto answer = ask({"prune", folder.text(), "--keep", "1", "--keep-every", "2", "--dry-run", "--json"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  const auto json = nlohmann::json::parse(answer.out);
  ASSERT_EQ(json["removed"].size(), 2u);
  EXPECT_EQ(json["removed"][0]["tag"], "t3");
  EXPECT_EQ(json["removed"][1]["tag"], "t1");
  EXPECT_TRUE(json["dry_run"].get<bool>() && there(1) && there(3));
  answer = ask({"prune", folder.text(), "--keep", "1", "--keep-every", "2"});
  EXPECT_TRUE(contains(answer.out, "t3") && contains(answer.out, "removed 2 checkpoints")) << answer.out;
  EXPECT_TRUE(!there(1) && there(2) && !there(3) && there(4));
  answer = ask({"prune", folder.text()});
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(contains(answer.err, "got no --keep")) << answer.err;
  EXPECT_EQ(ask({"prune", folder.text(), "--keep", "0"}).code, 2);
}

TEST(CheckpointCommand, ExportConvertAndDiff) {
  TempFolder folder;
  for (int i = 1; i <= 2; ++i) save_sample(formats::system_files(), folder.file("run"), "t" + std::to_string(i), i);
  auto answer = ask({"export", folder.file("run"), folder.file("hf"), "--to", "hf", "--tag", "t1", "--dtype", "bf16"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_TRUE(contains(answer.out, "/hf: 3 tensors") && contains(answer.out, "in 1 file")) << answer.out;
  EXPECT_EQ(plain_folder(folder.path() / "hf").at("layer.weight").dtype, "BF16");
  answer = ask({"convert", folder.file("hf"), folder.file("b.pt"), "--to=pt", "--json"});
  auto json = nlohmann::json::parse(answer.out);
  EXPECT_TRUE(json["tensors"] == 3 && json["bytes"] == 670 && json["files"][0] == folder.file("b.pt")) << answer.out;
  EXPECT_EQ(file_text(folder.path() / "b.pt").substr(0, 4), "PK\3\4");
  // Equal, and not.
  EXPECT_EQ(ask({"diff", folder.file("run") + "/t1", folder.file("run") + "/t1"}).code, 0);
  answer = ask({"diff", folder.file("run") + "/t1", folder.file("run") + "/t2"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_EQ(answer.err, "");
  EXPECT_TRUE(contains(answer.out, "layer.weight: values; 300 elements, first [0]: 1 against 2\n") &&
              contains(answer.out, "3 tensors compared, 2 differences"))
      << answer.out;
  answer = ask({"diff", folder.file("run") + "/t1", folder.file("hf"), "--json"});
  json = nlohmann::json::parse(answer.out);
  EXPECT_EQ(answer.code, 1);
  ASSERT_EQ(json["different"].size(), 2u) << "dtypes";
  EXPECT_EQ(json["different"][1]["difference"], "dtype F32 against BF16");
  // Faults, with their codes.
  EXPECT_EQ(ask({"export", folder.file("run"), folder.file("hf"), "--to", "hf"}).code, 2) << "it exists";
  EXPECT_EQ(ask({"export", folder.file("none"), folder.file("x"), "--to", "hf"}).code, 3);
  EXPECT_EQ(ask({"diff", folder.file("run"), folder.file("none")}).code, 3);
  EXPECT_EQ(ask({"diff", folder.file("run")}).code, 2);
  EXPECT_EQ(ask({"export", folder.file("run"), folder.file("x")}).code, 2) << "no --to";
  EXPECT_EQ(ask({"export", folder.file("run"), folder.file("x"), "--to", "hf", "--shard-bytes", "many"}).code, 2);
  answer = ask({"export", folder.file("run"), folder.file("x"), "--to", "hf", "--names", "gpt2"});
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(contains(answer.err, "layer.weight: no rule")) << answer.err;
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "x"));
}

TEST(CheckpointCommand, RefusesWithTheRightCode) {
  TempFolder folder;
  EXPECT_EQ(ask({"inspect", folder.text()}).code, 3);
  EXPECT_EQ(ask({"inspect", folder.text() + "/none"}).code, 3);
  EXPECT_EQ(ask({"inspect"}).code, 2);
  EXPECT_EQ(ask({}).code, 2);
  EXPECT_EQ(ask({"--help"}).code, 0);
  const auto answer = ask({"reshard", folder.text()});
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(contains(answer.err, "none is needed")) << answer.err;
  EXPECT_TRUE(contains(ask({"inspct", folder.text()}).err, "did you mean \"inspect\""));
}

}  // namespace
}  // namespace zero::test::checkpoint_command_test
