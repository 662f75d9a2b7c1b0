// Checkpoints of libzero made of other programs' files: they hold what the files hold, appear whole or not at all, and
// what does not fit is refused by name.
#include "interchange/checkpoint_import.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include <zero/checkpoint_tools.h>

#include "interchange/source.h"
#include "support/cifar10_files.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "unit/formats/every_call.h"
#include "unit/interchange/source_samples.h"
#include "unit/interchange/zip_samples.h"

namespace checkpoint_import_test {
namespace {

namespace fs = std::filesystem;
using zero::CheckpointImport;
using zero::import_checkpoint;
using zero::interchange::open_source;
using zero::test::contents_of;
using zero::test::expect_tensors;
using zero::test::FaultyFiles;
using zero::test::golden;
using zero::test::TempFolder;
using namespace std::string_literals;

std::string error_of(const std::string& source, const fs::path& dir, const std::string& tag,
                     const CheckpointImport& options = {}) {
  try {
    (void)import_checkpoint(source, dir, tag, options);
  } catch (const zero::Error& error) {
    return error.what();
  }
  return "";
}

std::unique_ptr<zero::interchange::TensorSource> open(const fs::path& path) {
  return open_source(zero::formats::system_files(), path.string());
}

TEST(CheckpointImport, OfDeepSpeedHasMastersAndStates) {
  for (const char* const name :
       {"deepspeed-0-fp32", "deepspeed-1-bf16", "deepspeed-2-fp32", "deepspeed-3-bf16", "universal-2", "universal-3"}) {
    const TempFolder folder(TempFolder::On::Memory);
    const auto report = import_checkpoint(golden(name), folder.path(), "t");
    EXPECT_EQ(report.format, "deepspeed");
    EXPECT_EQ(report.masters, 8);
    EXPECT_EQ(report.states, 16);
    EXPECT_EQ(report.frozen, 2);
    EXPECT_EQ(report.buffers, 2);
    EXPECT_EQ(report.global_steps, 3);
    const auto source = open(folder.path());
    EXPECT_EQ(source->format(), "libzero");
    expect_tensors(*source, golden(std::string(name) + "/expected.safetensors"));
    EXPECT_EQ(zero::inspect_checkpoint(folder.path(), "t", true).world, 1) << "all hashes are right";
  }
}

// RMSprop's momentum is in some of its configurations only.
TEST(CheckpointImport, StatesThatARuleMayHaveAreKept) {
  const TempFolder folder(TempFolder::On::Memory);
  const auto copy = folder.path() / "universal";
  fs::copy(golden("universal-2"), copy, fs::copy_options::recursive);
  std::vector<fs::path> states;
  for (const auto& entry : fs::recursive_directory_iterator(copy)) states.push_back(entry.path());
  for (const auto& path : states) {
    if (path.filename() == "exp_avg.pt") fs::rename(path, path.parent_path() / "square_avg.pt");
    if (path.filename() == "exp_avg_sq.pt") fs::rename(path, path.parent_path() / "momentum_buffer.pt");
  }
  const auto report = import_checkpoint(copy.string(), folder.path(), "t");
  EXPECT_EQ(report.optimizer, "RMSprop");
  EXPECT_EQ(report.states, 16);
  std::set<std::string> kinds;
  const auto source = open(folder.path());
  for (const auto& tensor : source->tensors()) kinds.insert(tensor.kind);
  EXPECT_TRUE(kinds.contains("opt.square_avg") && kinds.contains("opt.momentum_buffer"));
}

TEST(CheckpointImport, OfATorchFileHasMastersAndStatesOfZero) {
  const TempFolder folder(TempFolder::On::Memory);
  CheckpointImport options;
  options.buffers = {"average"};
  options.frozen = {"frozen.*"};
  const auto report = import_checkpoint(golden("torch/state_dict.pt"), folder.path(), "t", options);
  EXPECT_EQ(report.masters, 8);
  EXPECT_EQ(report.states, 0);
  EXPECT_EQ(report.frozen, 2);
  EXPECT_EQ(report.buffers, 2);
  const auto source = open(folder.path()), torch = open(golden("torch/state_dict.pt"));
  EXPECT_EQ(source->aliases(), torch->aliases());
  std::map<std::string, std::string> all;
  for (const auto& tensor : source->tensors()) all[zero::test::key_of(tensor)] = zero::test::bytes_of(*source, tensor);
  EXPECT_EQ(all.size(), 28u);
  for (const auto& tensor : torch->tensors()) {
    const auto kind = tensor.name == "average" || tensor.name == "positions" ? "buffer"
                      : tensor.name.starts_with("frozen.")                   ? "param"
                                                                             : "master";
    EXPECT_EQ(all[std::string(kind) + "/" + tensor.name], zero::test::bytes_of(*torch, tensor)) << tensor.name;
    if (kind != std::string("master")) continue;
    EXPECT_EQ(all["opt.exp_avg_sq/" + tensor.name], std::string(zero::test::bytes_of(*torch, tensor).size(), '\0'));
  }
  options.optimizer = "Lion";
  EXPECT_EQ(import_checkpoint(golden("torch/state_dict.pt"), folder.path(), "lion", options).optimizer, "Lion");
  EXPECT_EQ(open(folder.path())->tensors().size(), 20u);
}

// There and back through a name map: transposed matrices, prefixes, ties.
TEST(CheckpointImport, UnderOtherNames) {
  const TempFolder folder(TempFolder::On::Memory);
  CheckpointImport options;
  options.names = "gpt2";
  const auto report = import_checkpoint(golden("hf-gpt2"), folder.path() / "ckpt", "t", options);
  EXPECT_EQ(report.format, "safetensors");
  EXPECT_GT(report.masters, 10);
  EXPECT_EQ(open(folder.path() / "ckpt")->aliases().count("output.weight"), 1u);
  zero::ExportOptions back;
  back.names = "gpt2";
  (void)zero::export_checkpoint(folder.path() / "ckpt", folder.path() / "hf", back);
  const auto difference = zero::diff_checkpoints(golden("hf-gpt2"), folder.path() / "hf");
  EXPECT_EQ(difference.tensors.size(), 0u);
  EXPECT_EQ(difference.compared, report.masters);
}

// A map ties two tensors that are stored with different values.
TEST(CheckpointImport, OneOfTwoTiedTensorsIsChosen) {
  const TempFolder folder(TempFolder::On::Memory);
  const auto source = zero::interchange::open_source(zero::formats::system_files(), golden("hf-llama"));
  const auto values = [](zero::interchange::TensorSource& from, const std::string& name) {
    for (const auto& tensor : from.tensors())
      if (tensor.name == name && !tensor.kind.starts_with("opt.")) return zero::test::bytes_of(from, tensor);
    return std::string();
  };
  const std::string head = "lm_head.weight", token = "model.embed_tokens.weight";
  CheckpointImport options;
  options.names = "llama";
  std::string remarks;
  for (const auto& remark : zero::import_checkpoint(golden("hf-llama"), folder.path(), "both", options).remarks)
    remarks += remark;
  EXPECT_NE(remarks.find(head + " and " + token + " are tied by the map and differ"), std::string::npos) << remarks;
  EXPECT_TRUE(open(folder.path() / "both")->aliases().empty());
  const auto both = open(folder.path() / "both");
  EXPECT_NE(values(*both, head), values(*both, token));
  for (const auto& chosen : {head, token}) {
    options.untie = {chosen};
    (void)zero::import_checkpoint(golden("hf-llama"), folder.path(), "one" + chosen, options);
    const auto one = open(folder.path() / ("one" + chosen));
    EXPECT_EQ(one->aliases(), (std::map<std::string, std::string>{{head, token}}));
    EXPECT_EQ(values(*one, token), values(*both, chosen)) << chosen;
    EXPECT_EQ(one->tensors().size() + 3, both->tensors().size()) << "a master and its states are gone";
  }
  options.untie = {head, token};
  EXPECT_NE(error_of(golden("hf-llama"), folder.path(), "t", options).find("expected one of them"), std::string::npos);
  options.untie = {"model.norm.weight"};
  EXPECT_NE(error_of(golden("hf-llama"), folder.path(), "t", options).find("got --untie model.norm.weight, expected"),
            std::string::npos);
}

TEST(CheckpointImport, OfADistributedCheckpoint) {
  const TempFolder folder(TempFolder::On::Memory);
  CheckpointImport options;
  options.buffers = {"average"};
  const auto report = import_checkpoint(golden("dcp/step3"), folder.path(), "t", options);
  EXPECT_EQ(report.masters, 8);
  EXPECT_EQ(report.states, 14) << "a parameter that was never used has none";
  EXPECT_EQ(report.global_steps, 3);
  bool said = false;
  for (const auto& remark : report.remarks)
    said = said || remark == "without states of the optimizer, which start at zero: unused";
  EXPECT_TRUE(said);
}

TEST(CheckpointImport, OtherFloatingTypesBecomeFp32) {
  const TempFolder folder(TempFolder::On::Memory);
  CheckpointImport options;
  options.buffers = {"*"};
  EXPECT_NE(error_of(golden("torch/dict.pt"), folder.path(), "t", options).find("got no trained parameter"),
            std::string::npos);
  options.buffers = {"complex64", "float8_e4m3fn", "int*", "uint*", "bool"};
  EXPECT_EQ(error_of(golden("torch/dict.pt"), folder.path(), "t", options), "");
  const auto source = open(folder.path());
  for (const auto& tensor : source->tensors())
    if (tensor.kind == "master" && tensor.name != "empty" && tensor.name != "scalar") {
      const float wanted[] = {0.5F, -2.0F, 3.25F};
      EXPECT_EQ(zero::test::bytes_of(*source, tensor), std::string(reinterpret_cast<const char*>(wanted), 12))
          << tensor.name;
    }
}

TEST(CheckpointImport, WhatDoesNotFitIsSaid) {
  const TempFolder folder(TempFolder::On::Memory);
  const auto source = golden("deepspeed-1-fp32");
  EXPECT_NE(error_of(source, folder.path(), "../t").find("got the tag \"../t\""), std::string::npos);
  EXPECT_EQ(error_of(source, folder.path(), "t"), "");
  EXPECT_NE(error_of(source, folder.path(), "t").find("/t exists, expected a new tag"), std::string::npos);
  CheckpointImport options;
  options.optimizer = "Muon";
  EXPECT_NE(error_of(source, folder.path(), "u", options).find("got the optimizer \"Muon\""), std::string::npos);
  EXPECT_NE(error_of(folder.file("none"), folder.path(), "u").find("none"), std::string::npos);
  // One that is not a number: nothing is committed.
  zero::test::write_file(
      folder.file("nan.pt"),
      zero::test::torch_sample("\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\n"
                               "FloatStorage\nX\x01\0\0\0"
                               "0X\x03\0\0\0cpuK\x01tQK\0K\x01\x85K\x01\x85\x89}tRs."s,
                               {std::string("\0\0\xc0\x7f", 4)}));
  EXPECT_NE(error_of(folder.file("nan.pt"), folder.path(), "u").find("is not finite"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder.path() / "u"));
  EXPECT_EQ(zero::list_checkpoints(folder.path()).size(), 1u);
}

// Every call of the file system fails once: the checkpoint is there, or nothing of it is.
TEST(CheckpointImport, AFailureLeavesNothing) {
  int failed = 0;
  for (int k = 1;; ++k) {
    const TempFolder folder(TempFolder::On::Memory);
    FaultyFiles files(FaultyFiles::Fault::Error, k);
    bool done = false;
    try {
      const auto source = open_source(files, golden("deepspeed-3-fp32"));
      (void)zero::interchange::import_checkpoint(files, *source, "it", folder.file("root"), "t", {});
      done = true;
    } catch (const zero::Error&) {
      ++failed;
    }
    const bool there = fs::exists(folder.path() / "root" / "t" / "manifest.json");
    if (done) EXPECT_TRUE(there) << k;
    if (there) expect_tensors(*open(folder.path() / "root"), golden("deepspeed-3-fp32/expected.safetensors"));
    if (!files.struck()) break;
    ASSERT_LT(k, 2000);
  }
  EXPECT_GT(failed, 50);
}

// Killed at every call: what can be loaded is whole, and else the next import makes it and removes what was left over.
TEST(CheckpointImport, KilledAtEveryCall) {
  const auto import = [](zero::formats::FsOps& files, const TempFolder& folder) {
    const auto source = open_source(zero::formats::system_files(), golden("deepspeed-3-fp32"));
    (void)zero::interchange::import_checkpoint(files, *source, "it", folder.file("root"), "t", {});
  };
  for (const auto fault : {FaultyFiles::Fault::DieBefore, FaultyFiles::Fault::DieAfter}) {
    const int calls = zero::test::strike_every_call(
        fault, 0, [](const TempFolder&) {},
        [&](FaultyFiles& files, const TempFolder& folder, int) { import(files, folder); },
        [&](const TempFolder& folder, const std::string& label) {
          const auto root = folder.path() / "root";
          if (!fs::exists(root / "t")) import(zero::formats::system_files(), folder);
          expect_tensors(*open(root), golden("deepspeed-3-fp32/expected.safetensors"));
          EXPECT_EQ(zero::inspect_checkpoint(root, "t", true).global_steps, 3) << label;
          // The next commit removes what a dead one has left.
          zero::test::save_sample(zero::formats::system_files(), root, "after", 1);
          for (const auto& entry : fs::directory_iterator(root))
            EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp-")) << label << ": " << entry.path();
        },
        zero::test::nightly() ? 1 : 3);
    EXPECT_GT(calls, 30);
  }
}

}  // namespace
}  // namespace checkpoint_import_test
