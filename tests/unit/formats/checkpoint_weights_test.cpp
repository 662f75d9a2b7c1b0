// Checkpoints of weights only among those that a run can be resumed from: which of them readers take, what older
// readers say, what a prune removes, and that a save of them that dies or fails at any call takes nothing away. Files
// for other libraries in a checkpoint.
#include <nlohmann/json.hpp>

#include <set>

#include "formats/exported_files.h"
#include "formats/prune.h"
#include "formats/safetensors.h"
#include "support/file_text.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"
#include "unit/formats/every_call.h"

namespace zero::test::checkpoint_weights_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;
using Fault = FaultyFiles::Fault;
using Names = std::set<std::string>;

void save_weights(const TempFolder& folder, const std::string& tag, int value) {
  save_sample_weights(system_files(), folder.text(), tag, value);
}
void save(const TempFolder& folder, const std::string& tag, int value) {
  save_sample(system_files(), folder.text(), tag, value);
}

std::string chosen(const TempFolder& folder, Needs needs) {
  return choose(system_files(), folder.text(), "", needs).tag;
}

Manifest manifest_in(const TempFolder& folder, const std::string& tag) {
  const auto choice = choose(system_files(), folder.text(), tag);
  return read_manifest(Folder::open(system_files(), folder.text()).folder(tag), choice.manifest_hash);
}

Names names_in(const fs::path& path) {
  Names names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  return names;
}

TEST(CheckpointWeights, TheManifestSaysSo) {
  TempFolder folder(TempFolder::On::Memory);
  save(folder, "a", 1);
  save_weights(folder, "w", 2);
  EXPECT_FALSE(manifest_in(folder, "a").weights_only);
  EXPECT_TRUE(manifest_in(folder, "w").weights_only);
  // Readers of version 4 read the first, and refuse the second by its version before anything else.
  const auto json_of = [&](const char* tag) {
    return nlohmann::json::parse(file_text(folder.path() / tag / "manifest.json"));
  };
  EXPECT_EQ(json_of("a")["min_reader"], 4);
  EXPECT_FALSE(json_of("a").contains("content"));
  auto json = json_of("w");
  EXPECT_EQ(json["min_reader"], 5);
  EXPECT_EQ(json["content"], "weights");
  EXPECT_EQ(code_of([&] { parse_manifest(json.dump(), "m"); }), 0);
  json["content"] = "something";
  std::string text;
  EXPECT_EQ(code_of([&] { parse_manifest(json.dump(), "m"); }, &text), kDamaged);
  EXPECT_NE(text.find("content"), std::string::npos) << text;
  json.erase("content");
  EXPECT_EQ(code_of([&] { parse_manifest(json.dump(), "m"); }), kDamaged);
  // One that says so must be so.
  json["content"] = "weights";
  json["tensors"][0]["kind"] = "opt.exp_avg";
  EXPECT_EQ(code_of([&] { parse_manifest(json.dump(), "m"); }, &text), kDamaged);
  EXPECT_NE(text.find("weights only"), std::string::npos) << text;
}

TEST(CheckpointWeights, ReadersTakeWhatTheyNeed) {
  TempFolder folder(TempFolder::On::Memory);
  save_weights(folder, "w1", 1);
  std::string text;
  EXPECT_EQ(code_of([&] { (void)chosen(folder, Needs::Training); }, &text), kDamaged);
  EXPECT_NE(text.find("w1 holds weights only"), std::string::npos) << text;
  EXPECT_NE(text.find("--weights-only"), std::string::npos) << text;
  EXPECT_FALSE(fs::exists(folder.path() / "latest"));
  EXPECT_EQ(chosen(folder, Needs::TrainingIfAny), "w1");
  save(folder, "a", 2);
  save_weights(folder, "w2", 3);
  save_weights(folder, "w3", 4);
  EXPECT_EQ(chosen(folder, Needs::Training), "a");
  EXPECT_EQ(chosen(folder, Needs::TrainingIfAny), "a");
  EXPECT_EQ(chosen(folder, Needs::Weights), "w3");
  EXPECT_EQ(choose(system_files(), folder.text(), "").notices.size(), 0u);
  EXPECT_EQ(choose(system_files(), folder.text(), "", Needs::Weights).notices.size(), 0u);
  EXPECT_EQ(load_sample(folder.text()).tag, "a");
  save(folder, "b", 5);
  EXPECT_EQ(chosen(folder, Needs::Weights), "b");
  // Fallback skips them, too.
  write_all(folder.path() / "b" / "manifest.json", "{}");
  EXPECT_EQ(chosen(folder, Needs::Training), "a");
  EXPECT_EQ(chosen(folder, Needs::Weights), "w3");
}

TEST(CheckpointWeights, DoNotReplaceWhatCanBeResumed) {
  TempFolder folder(TempFolder::On::Memory);
  save(folder, "a", 1);
  std::string text;
  EXPECT_EQ(code_of([&] { save_weights(folder, "a", 2); }, &text), static_cast<int>(ExitCode::kConfig));
  EXPECT_NE(text.find("/a can be resumed from"), std::string::npos) << text;
  EXPECT_EQ(load_sample(folder.text()).value, 1);
  EXPECT_EQ(names_in(folder.path()), (Names{".lock", "latest", "a"}));
  save_weights(folder, "w", 2);
  save_weights(folder, "w", 3);
  EXPECT_EQ(manifest_in(folder, "w").global_steps, 3);
  save(folder, "w", 4);
  EXPECT_EQ(load_sample(folder.text()).tag, "w");
}

TEST(CheckpointWeights, ArePrunedApart) {
  TempFolder folder(TempFolder::On::Memory);
  for (int step = 1; step <= 6; ++step) {
    save_weights(folder, "w" + std::to_string(step), step);
    if (step % 2 == 0) save(folder, "s" + std::to_string(step), step);
  }
  const auto after = [&](const PruneOptions& options) {
    (void)prune_checkpoints(folder.path(), options);
    auto left = names_in(folder.path());
    left.erase(".lock");
    left.erase("latest");
    return left;
  };
  EXPECT_EQ(after({.keep = 2, .also = {}}), (Names{"s4", "s6", "w1", "w2", "w3", "w4", "w5", "w6"}));
  EXPECT_EQ(after({.keep = 2, .keep_every = 2, .keep_weights = 1, .also = {"w1"}}),
            (Names{"s4", "s6", "w1", "w2", "w4", "w6"}));
  EXPECT_EQ(after({.keep = 1, .keep_weights = 2, .also = {}}), (Names{"s6", "w4", "w6"}));
  std::string text;
  EXPECT_EQ(
      code_of([&] { (void)prune_checkpoints(folder.path(), {.keep = 1, .keep_weights = -1, .also = {}}); }, &text),
      static_cast<int>(ExitCode::kConfig));
  EXPECT_NE(text.find("keep_weights: got -1"), std::string::npos) << text;
  // Weights alone count for nobody.
  const auto entries = list_checkpoints(folder.path());
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_TRUE(entries[0].latest && !entries[0].weights_only && entries[0].tag == "s6");
  EXPECT_TRUE(entries[1].weights_only && !entries[1].latest && entries[1].global_steps == 6);
}

// Whatever happens to the save: what could be resumed from still can be, with its pointer; weights are whole or not
// there; the next save removes what is left over.
void check_after(const TempFolder& folder, const std::string& label) {
  EXPECT_EQ(load_sample(folder.text()).tag, "a") << label;
  EXPECT_EQ(parse_latest(file_text(folder.path() / "latest"), "l").tag, "a") << label;
  for (const auto& entry : list_checkpoints(folder.path())) EXPECT_EQ(entry.fault, "") << label << ": " << entry.tag;
  save(folder, "b", 9);
  for (const auto& name : names_in(folder.path())) EXPECT_FALSE(name.starts_with(".tmp-")) << label << ": " << name;
}

TEST(CheckpointWeights, KilledOrFailingAtEveryCall) {
  for (const auto fault : {Fault::DieBefore, Fault::DieAfter, Fault::Error, Fault::Short}) {
    const int struck = strike_every_call(
        fault, ENOSPC,
        [](const TempFolder& folder) {
          save(folder, "a", 1);
          save_weights(folder, "w", 1);
        },
        [](FaultyFiles& files, const TempFolder& folder, int k) {
          save_sample_weights(files, folder.text(), k % 2 == 0 ? "w" : "new", 2);
        },
        check_after);
    EXPECT_GT(struck, 30);
  }
}

TEST(CheckpointWeights, EveryByteCounts) {
  TempFolder folder(TempFolder::On::Memory);
  save_weights(folder, "w", 2);
  for (const char* name : {"manifest.json", "SUMS", "blocks-00000.safetensors", "rank-00000.safetensors"}) {
    const auto path = folder.path() / "w" / name;
    const auto whole = file_text(path);
    for (std::size_t i = 0; i<whole.size(); i += whole.size()> 2000 ? 7 : 1) {
      auto other = whole;
      other[i] = static_cast<char>(other[i] ^ 1 << i % 8);
      write_all(path, other);
      EXPECT_EQ(code_of([&] { (void)inspect_checkpoint(folder.path(), "w", true); }), kDamaged) << name << " at " << i;
    }
    write_all(path, whole);
  }
  EXPECT_EQ(code_of([&] { (void)inspect_checkpoint(folder.path(), "w", true); }), 0);
  EXPECT_TRUE(inspect_checkpoint(folder.path()).weights_only);
}

// --- every file, before anything is loaded ----------------------------------------------------------

TEST(CheckpointVerify, ReadersShareEveryByte) {
  TempFolder folder;
  // Three files of several blocks each.
  constexpr std::size_t kFloats = 300'000;
  std::vector<float> values(kFloats);
  for (std::size_t i = 0; i < kFloats; ++i) values[i] = static_cast<float>(i);
  Manifest manifest;
  {
    const auto made = Folder::make(system_files(), folder.text() + "/t");
    std::vector<std::pair<std::string, std::string>> rows;
    for (int rank = 0; rank < 3; ++rank) {
      const std::vector<Source> sources{{"master",
                                         "w",
                                         "F32",
                                         {3 * kFloats},
                                         true,
                                         rank * static_cast<std::int64_t>(kFloats),
                                         kFloats,
                                         from(values),
                                         true}};
      auto file = write_rank_file(made, rank_file_name(rank), sources);
      rows.emplace_back(file.file.name, file.rows);
      manifest.files.push_back(file.file);
    }
    manifest.files.push_back(write_blocks(made, rows));
    manifest.blocks = kBlocksName;
  }
  struct Counting : FsOps {
    std::uint64_t bytes = 0;
    ssize_t pread(int fd, void* out, std::size_t n, std::uint64_t offset) override {
      bytes += n;
      return FsOps::pread(fd, out, n, offset);
    }
  };
  std::uint64_t total = 0;
  for (const auto& file : manifest.files) total += static_cast<std::uint64_t>(file.bytes);
  for (const int readers : {1, 2, 5, 40}) {
    std::uint64_t sum = 0, most = 0;
    for (int reader = 0; reader < readers; ++reader) {
      Counting files;
      verify_share(Folder::open(files, folder.text() + "/t"), manifest, reader, readers);
      sum += files.bytes;
      most = std::max(most, files.bytes);
    }
    EXPECT_GE(sum, total);
    // A block at each border, and the file of rows, which every reader reads.
    EXPECT_LE(most, total / static_cast<std::uint64_t>(readers) + 2 * kBlockBytes + 16384) << readers;
  }
  // A byte anywhere is found by one of the readers.
  for (const auto& file : manifest.files)
    for (const std::size_t at :
         {std::size_t{0}, static_cast<std::size_t>(file.bytes) / 2, static_cast<std::size_t>(file.bytes) - 1}) {
      const auto path = folder.path() / "t" / file.name;
      const auto whole = file_text(path);
      auto other = whole;
      other[at] = static_cast<char>(other[at] ^ 4);
      write_all(path, other);
      int found = 0;
      std::string text;
      for (int reader = 0; reader < 3; ++reader)
        found += code_of([&] { verify_share(Folder::open(system_files(), folder.text() + "/t"), manifest, reader, 3); },
                         &text) == kDamaged;
      EXPECT_GE(found, 1) << file.name << " at " << at;
      EXPECT_NE(text.find(file.name), std::string::npos) << text;
      write_all(path, whole);
    }
}

// --- weights for other libraries --------------------------------------------------------------------

struct Held {
  const char *name, *dtype;
  std::vector<std::int64_t> shape;
};

std::string file_with(const std::vector<Held>& tensors) {
  Header header;
  std::uint64_t end = 0;
  for (const auto& tensor : tensors) {
    const auto bytes = static_cast<std::uint64_t>(numel_of(tensor.shape) * bits_of(tensor.dtype) / 8);
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + bytes});
    end += bytes;
  }
  return header_bytes(header, 8) + std::string(end, '\1');
}

TEST(CheckpointExported, FilesHaveWhatTheManifestAndTheIndexSay) {
  TempFolder folder(TempFolder::On::Memory);
  const std::string first = "model-00001-of-00002.safetensors", second = "model-00002-of-00002.safetensors";
  struct Contents {
    std::vector<Held> first{{"a", "BF16", {2, 3}}}, second{{"b", "BF16", {4}}, {"c", "F32", {1}}};
    nlohmann::json index{{"metadata", {{"total_size", 24}}},
                         {"weight_map",
                          {{"a", "model-00001-of-00002.safetensors"},
                           {"b", "model-00002-of-00002.safetensors"},
                           {"c", "model-00002-of-00002.safetensors"}}}};
  };
  Manifest manifest;
  manifest.parameter_dtype = "BF16";
  manifest.tensors = {{"master", "a", "F32", {2, 3}, true, {}},
                      {"opt.exp_avg", "a", "F32", {2, 3}, true, {}},
                      {"param", "b", "BF16", {4}, false, {}}};
  manifest.ranks = {{{"buffer", "c", "F32", {1}, false, {}}, {"rank", "generator", "U8", {5}, false, {}}}, {}};
  const auto check = [&](const Contents& contents, std::string* text = nullptr) {
    write_all(folder.path() / first, file_with(contents.first));
    write_all(folder.path() / second, file_with(contents.second));
    write_all(folder.path() / kExportedIndexName, contents.index.dump());
    manifest.files.clear();
    for (const auto& name : {first, second, std::string(kExportedIndexName)})
      manifest.files.push_back({name, static_cast<std::int64_t>(fs::file_size(folder.path() / name)), ""});
    return code_of([&] { require_exported(Folder::open(system_files(), folder.text()), manifest); }, text);
  };
  std::string text;
  EXPECT_EQ(check({}, &text), 0) << text;
  const auto refused = [&](const std::function<void(Contents&)>& change, const char* part) {
    Contents contents;
    change(contents);
    EXPECT_EQ(check(contents, &text), kDamaged) << part;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  refused([](Contents& c) { c.second.pop_back(); }, "exported weights without c");
  refused(
      [](Contents& c) {
        c.second.push_back({"a", "BF16", {2, 3}});
      },
      "the tensor a, which the manifest does not, or twice");
  refused([](Contents& c) { c.first[0].name = "stray"; }, "the tensor stray");
  refused([](Contents& c) { c.first[0].dtype = "F16"; }, "has a as F16");
  refused([](Contents& c) { c.first[0].shape = {3, 2}; }, "has a as BF16 or in a shape");
  refused([](Contents& c) { c.index["weight_map"]["a"] = "model-00002-of-00002.safetensors"; },
          "does not say which file");
  refused([](Contents& c) { c.index["weight_map"].erase("b"); }, "does not say which file");
  refused([](Contents& c) { c.index = 3; }, "is not an object");
  // Parameters that stay fp32: by a name or an alias of a trained one, by the dtype of a frozen one.
  const auto kept = [](Contents& c) { c.first[0].dtype = "F32", c.second[0].dtype = "F32"; };
  manifest.tensors[2].dtype = "F32";
  manifest.aliases = {{"tied.a", "a"}};
  for (const char* patterns : {R"(["other", "a"])", R"(["tied.*"])"}) {
    manifest.config["libzero.keep_fp32"] = patterns;
    Contents contents;
    kept(contents);
    EXPECT_EQ(check(contents, &text), 0) << patterns << ": " << text;
    refused([](Contents& c) { c.second[0].dtype = "F32"; }, "has a as BF16");
    refused([](Contents& c) { c.first[0].dtype = "F32"; }, "has b as BF16");
  }
  manifest.config["libzero.keep_fp32"] = "[\"b\"]";
  refused(kept, "has a as F32");
  // Nothing of the checkpoint lies in them.
  EXPECT_TRUE(is_exported_file(first) && is_exported_file("model.safetensors") && is_exported_file(kExportedIndexName));
  EXPECT_FALSE(is_exported_file("rank-00000.safetensors") || is_exported_file("model.bin"));
}

}  // namespace
}  // namespace zero::test::checkpoint_weights_test
