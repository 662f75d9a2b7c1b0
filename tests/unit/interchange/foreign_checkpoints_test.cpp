// Checkpoints of torch, DeepSpeed and torch.distributed, against the tensors that their own tools read in them
// (script/make-interchange-fixtures).
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "interchange/source.h"
#include "support/folder.h"
#include "unit/interchange/source_samples.h"

namespace foreign_checkpoints_test {
namespace {

using zero::interchange::open_source;
using zero::interchange::SourceOptions;
using zero::interchange::TensorSource;
using zero::test::contents_of;
using zero::test::expect_tensors;
using zero::test::golden;
using zero::test::TempFolder;

std::unique_ptr<TensorSource> open(const std::string& path, const SourceOptions& options = {}) {
  return open_source(zero::formats::system_files(), path, options);
}

std::string error_of(const std::string& path, const SourceOptions& options = {}) {
  try {
    const auto source = open(path, options);
    (void)contents_of(*source);
  } catch (const zero::Error& error) {
    return error.what();
  }
  return "";
}

void expect_error(const std::string& name, const std::string& part, const SourceOptions& options = {}) {
  const auto error = error_of(golden(name), options);
  EXPECT_NE(error.find(part), std::string::npos) << name << ": " << error;
}

TEST(TorchFiles, DictionariesOfTensorsOfEveryType) {
  for (const char* const name : {"dict", "state_dict", "parameter", "strided", "opaque"}) {
    const auto source = open(golden(std::string("torch/") + name + ".pt"));
    EXPECT_EQ(source->format(), "torch");
    expect_tensors(*source, golden(std::string("torch/") + name + ".safetensors"), "weight/");
  }
  for (const char* const name : {"protocol3", "protocol4", "protocol5"})
    expect_tensors(*open(golden(std::string("torch/") + name + ".pt")), golden("torch/protocol.safetensors"),
                   "weight/");
}

TEST(TorchFiles, SeveralWithAnIndex) {
  expect_tensors(*open(golden("torch/index")), golden("torch/index/expected.safetensors"), "weight/");
  expect_tensors(*open(golden("torch/index/pytorch_model.bin.index.json")), golden("torch/index/expected.safetensors"),
                 "weight/");
}

TEST(TorchFiles, AKeyChoosesANestedDictionary) {
  SourceOptions options;
  options.key = "model";
  expect_tensors(*open(golden("torch/nested.pt"), options), golden("torch/state_dict.safetensors"), "weight/");
  expect_error("torch/nested.pt", "got dictionaries model, expected tensors. Hint: --key model");
  options.key = "weights";
  expect_error("torch/nested.pt", "got the key \"weights\"", options);
  options.key = "model";
  expect_error("deepspeed-1-fp32", "got the key \"model\", expected none", options);
}

TEST(TorchFiles, APrefixIsRemoved) {
  SourceOptions options;
  options.prefix = "up.";
  expect_error("torch/state_dict.pt", "does not begin with the prefix \"up.\"", options);
  options.prefix = "wei";
  const auto source = open(golden("torch/protocol3.pt"), options);
  ASSERT_EQ(source->tensors().size(), 1u);
  EXPECT_EQ(source->tensors()[0].name, "ght");
}

TEST(TorchFiles, WhatIsNoTensorIsShownAsText) {
  const auto source = open(golden("torch/opaque.pt"));
  ASSERT_EQ(source->remarks().size(), 1u);
  EXPECT_TRUE(source->remarks()[0].starts_with("array: numpy.")) << source->remarks()[0];
}

TEST(TorchFiles, WhatCannotBeReadIsRefusedByName) {
  expect_error("torch/old_format.pt", "was written by torch before 1.6");
  expect_error("torch/module.pt", "expected a dictionary of tensors. Hint: in a program that trusts the file");
  expect_error("torch/sparse.pt", "is a tensor of torch._utils._rebuild_sparse_tensor, expected a dense one");
  expect_error("torch/quantized.pt", "is a tensor of torch._utils._rebuild_qtensor, expected a dense one");
  expect_error("torch/subclass.pt", "is a tensor of the class __main__.Tagged, expected torch.Tensor");
  expect_error("torch/no_crc.pt", "Hint: --ignore-crc");
  SourceOptions options;
  options.ignore_crc = true;
  expect_tensors(*open(golden("torch/no_crc.pt"), options), golden("torch/protocol.safetensors"), "weight/");
}

TEST(DeepSpeedFiles, AllStagesAndRecipes) {
  for (const char* const stage : {"0", "1", "2", "3"})
    for (const char* const recipe : {"bf16", "fp32"}) {
      const auto name = std::string("deepspeed-") + stage + "-" + recipe;
      const auto source = open(golden(name));
      EXPECT_EQ(source->format(), "deepspeed");
      expect_tensors(*source, golden(name + "/expected.safetensors"));
      ASSERT_TRUE(source->progress());
      EXPECT_EQ(source->progress()->optimizer, "AdamW");
      expect_tensors(*open(golden(name + "/step3")), golden(name + "/expected.safetensors"));
    }
}

TEST(DeepSpeedFiles, Universal) {
  for (const char* const name : {"universal-2", "universal-3"})
    expect_tensors(*open(golden(name)), golden(std::string(name) + "/expected.safetensors"));
}

TEST(DeepSpeedFiles, ClientStateIsShownAsText) {
  const auto source = open(golden("deepspeed-2-bf16"));
  std::string all;
  for (const auto& remark : source->remarks()) all += remark + "\n";
  for (const char* const part : {"epoch: 4\n", "note: 'client'\n", "curve: [0.5, 0.25]\n", "lr_scheduler: {"})
    EXPECT_NE(all.find(part), std::string::npos) << all;
}

TEST(DeepSpeedFiles, MissingAndForeignFilesAreNamed) {
  namespace fs = std::filesystem;
  for (const char* const name : {"deepspeed-1-bf16", "deepspeed-3-fp32"}) {
    const TempFolder folder;
    fs::copy(golden(name), folder.path(), fs::copy_options::recursive);
    const auto tag = folder.path() / "step3";
    EXPECT_EQ(error_of(folder.text()), "");
    for (const auto& entry : fs::directory_iterator(tag)) {
      const auto away = folder.path() / "away";
      fs::rename(entry.path(), away);
      EXPECT_NE(error_of(folder.text()), "") << entry.path();
      fs::rename(away, entry.path());
    }
    for (const char* const other :
         {"mp_rank_01_model_states.pt", "layer_00-model_states.pt", "expert_1_mp_rank_00_optim_states.pt",
          "zero_pp_rank_9_mp_rank_00_optim_states.pt"}) {
      fs::copy(golden("torch/dict.pt"), tag / other);
      EXPECT_NE(error_of(folder.text()), "") << other;
      fs::remove(tag / other);
    }
    fs::remove(tag / ".." / "latest");
    EXPECT_NE(error_of(folder.text()), "");
    SourceOptions options;
    options.tag = "step3";
    EXPECT_EQ(error_of(folder.text(), options), "");
  }
}

TEST(DcpFiles, OfFsdp2) {
  const auto source = open(golden("dcp/step3"));
  EXPECT_EQ(source->format(), "dcp");
  expect_tensors(*source, golden("dcp/expected.safetensors"));
  SourceOptions options;
  options.tag = "step3";
  expect_tensors(*open(golden("dcp"), options), golden("dcp/expected.safetensors"));
  std::string all;
  for (const auto& remark : source->remarks()) all += remark + "\n";
  EXPECT_NE(all.find("epoch: 4\n"), std::string::npos) << all;
}

// FSDP1 writes ShardedTensors of flat parameters, DDP whole tensors of which each rank stores some.
TEST(DcpFiles, OfFsdp1AndDdp) {
  for (const char* const name : {"dcp-fsdp1", "dcp-ddp"}) {
    SCOPED_TRACE(name);
    const auto folder = golden(std::string(name) + "/step3");
    const auto source = open(folder);
    EXPECT_EQ(source->format(), "dcp");
    expect_tensors(*source, golden(std::string(name) + "/expected.safetensors"));
    for (const char* const rank : {"0", "1"})
      EXPECT_TRUE(std::filesystem::exists(folder + "/__" + rank + "_0.distcp")) << "both ranks have a part";
  }
}

TEST(DcpFiles, SafetensorsOfEveryRank) {
  for (const char* const name : {"one", "two", "states", "whole"}) {
    const auto source = open(golden(std::string("dcp-safetensors/") + name));
    EXPECT_EQ(source->format(), name == std::string("whole") ? "safetensors" : "dcp") << "joined files are plain ones";
    expect_tensors(*source, golden(std::string("dcp-safetensors/") + name + ".safetensors"));
  }
  SourceOptions options;
  options.tag = "two";
  expect_tensors(*open(golden("dcp-safetensors"), options), golden("dcp-safetensors/two.safetensors"));
  options = {};
  options.prefix = "up.";
  const auto source = open(golden("dcp-safetensors/one"), options);
  EXPECT_EQ(source->tensors().size(), 2u);
}

TEST(DcpFiles, SafetensorsThatDoNotMakeWholeTensors) {
  namespace fs = std::filesystem;
  const std::string first = "shard-00001-model-00001-of-00001.safetensors", second = "shard-00002" + first.substr(11);
  EXPECT_NE(error_of(golden("dcp-safetensors/one/" + first)).find("Hint: pass the directory."), std::string::npos);
  const TempFolder folder;
  const auto make = [&](const std::string& name, const std::string& from, const std::string& old = "",
                        const std::string& text = "") {
    auto bytes = zero::test::bytes_of_file(golden("dcp-safetensors/one/" + from));
    if (!old.empty()) {
      const auto at = bytes.find(old);
      EXPECT_NE(at, std::string::npos) << old;
      EXPECT_EQ(old.size(), text.size());
      bytes.replace(at, old.size(), text);
    }
    std::ofstream(folder.file(name), std::ios::binary) << bytes;
  };
  const auto expect = [&](const std::string& part) {
    const auto error = error_of(folder.text());
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  make(second, second);
  expect("has files of 1 shards, expected all up to number 2");
  make(first, second);
  expect("boxes");
  make(first, first);
  EXPECT_EQ(error_of(folder.text()), "");
  const auto box = [](const std::string& numbers) { return R"(\"columns\": {\"saved_offsets\": )" + numbers; };
  make(second, second, box("[0, 4]"), box("[0, 3]"));
  expect("tensor columns has boxes of 35 elements, expected 30");
  make(second, second, box("[0, 4]"), box("[0, 5]"));
  expect("tensor columns has boxes of 35 elements, expected 40");
  make(second, second, box("[0, 4]"), box("[00,4]"));
  expect("DCP_SHARDING_INFO");
  make(second, second, box("[0, 4]"), box("[   4]"));
  expect("does not say where the tensor columns begins");
  make(second, second, box("[0, 4]"), box("[-1,4]"));
  expect("saved_offsets");
  make(second, second, "saved_offsets", "saved_offzets");
  expect("saved_off");
  make(second, second, "DCP_SHARDING_INFO", "DCP_SHARDING_INFA");
  expect("has no DCP_SHARDING_INFO in __metadata__");
  make(second, second, R"("1.0")", R"("2.0")");
  expect("has DCP_VERSION 2.0, expected 1.0");
}

}  // namespace
}  // namespace foreign_checkpoints_test
