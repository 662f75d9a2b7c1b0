// A whole checkpoint under damage: changed bytes, other lengths, and files that belong elsewhere. Each is found, and
// the error names the file.
#include <random>
#include <set>

#include <zero/checkpoint_tools.h>

#include "support/file_text.h"
#include "support/nightly.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::checkpoint_damage_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;

constexpr const char* kRankName = "rank-00000.safetensors";
const std::vector<std::string> kNames{kRankName, kBlocksName, kManifestName, kSumsName};

// All bits of the files that say what is right, one bit of each byte of the data.
TEST(CheckpointDamage, EveryByteOfEveryFile) {
  TempFolder folder(TempFolder::On::Memory);
  save_sample(system_files(), folder.text(), "t", 5);
  const auto seed = std::random_device{}();
  std::minstd_rand random(seed);
  int seen = 0;
  std::set<std::size_t> harmless;
  for (const auto& name : kNames) {
    const auto path = folder.path() / "t" / name;
    const auto whole = file_text(path);
    // The manifest's own hash is the last line of SUMS: which of the two was damaged, nothing can tell.
    const auto of_manifest = name == kSumsName ? whole.rfind('\n', whole.size() - 2) + 1 : whole.size();
    for (std::size_t i = 0; i < whole.size(); i += nightly() ? 1 : 3) {
      // Of the padding between header and data a part is enough.
      if (name == kRankName && i > 800 && i < 4000 && i % 16 != 0) continue;
      const auto one = random() % 8;
      for (unsigned bit = 0; bit < 8; ++bit) {
        if (name == kRankName && bit != one) continue;
        auto other = whole;
        other[i] = static_cast<char>(other[i] ^ (1 << bit));
        write_all(path, other);
        std::string text;
        const int code = code_of([&] { EXPECT_EQ(load_sample(folder.text(), "t").value, 5); }, &text);
        const auto label = name + " byte " + std::to_string(i) + " bit " + std::to_string(bit) + " seed " +
                           std::to_string(seed) + ": " + text;
        ++seen;
        // Only damage to fields that the loader does not use may be undetected: the file's notes.
        if (code == 0) {
          EXPECT_EQ(name, kBlocksName) << label;
          harmless.insert(i);
          continue;
        }
        EXPECT_EQ(code, kDamaged) << label;
        const bool named = text.find(path.string() + ":") != std::string::npos;
        const bool manifest_named = text.find((folder.path() / "t" / kManifestName).string()) != std::string::npos;
        EXPECT_TRUE(named || (i >= of_manifest && manifest_named)) << label;
        EXPECT_TRUE(name != kRankName || text.find("offset 0 has the hash") != std::string::npos) << label;
      }
    }
    write_all(path, whole);
  }
  EXPECT_GT(seen, nightly() ? 12000 : 4000);
  EXPECT_LT(harmless.size(), 40u);
  for (const auto i : harmless) EXPECT_LT(i, 100u);
  EXPECT_EQ(load_sample(folder.text()).value, 5);
}

TEST(CheckpointDamage, EveryLengthOfEveryFile) {
  TempFolder folder(TempFolder::On::Memory);
  save_sample(system_files(), folder.text(), "t", 5);
  for (const auto& name : kNames) {
    const auto path = folder.path() / "t" / name;
    const auto whole = file_text(path);
    const auto refused = [&](const std::string& what) {
      std::string text;
      EXPECT_EQ(code_of([&] { load_sample(folder.text(), "t"); }, &text), kDamaged) << name << " " << what;
      EXPECT_NE(text.find(path.string()), std::string::npos) << name << " " << what << ": " << text;
    };
    // Of the data a part of the lengths is enough.
    for (std::size_t size = 0; size < whole.size(); size += name == kRankName ? 17 : 1) {
      write_all(path, whole.substr(0, size));
      refused(std::to_string(size));
    }
    for (const std::string& more : {std::string(1, '\0'), std::string("\n"), std::string(5000, 'x')}) {
      write_all(path, whole + more);
      refused("longer");
    }
    fs::remove(path);
    refused("missing");
    fs::create_symlink("/dev/zero", path);
    refused("a link");
    fs::remove(path);
    write_all(path, whole);
  }
  EXPECT_EQ(load_sample(folder.text()).value, 5);
}

// --- files that belong elsewhere ----------------------------------------------------------------

// A checkpoint of two ranks, whose files have the same size and other values.
void save_two(const std::string& root, const std::string& tag, int value) {
  Commit commit(system_files(), root, tag);
  const auto folder = Folder::open(system_files(), root).folder(commit.folder_name());
  const Sample first(value), second(value + 100);
  const auto file = write_rank_file(folder, rank_file_name(0), sources_of(first));
  auto sources = sources_of(second);
  sources[0].name = "layer.second";
  sources[1].name = "musk";
  auto other = write_rank_file(folder, rank_file_name(1), sources);
  ASSERT_EQ(other.file.bytes, file.file.bytes);
  const auto blocks = write_blocks(folder, {{file.file.name, file.rows}, {other.file.name, other.rows}});
  auto manifest = sample_manifest(value, file, blocks);
  manifest.world = 2;
  manifest.files.insert(manifest.files.begin() + 1, other.file);
  for (auto& tensor : other.tensors)
    for (auto& part : tensor.parts) part.file = 1;
  manifest.tensors.insert(manifest.tensors.end(), other.tensors.begin(), other.tensors.begin() + 2);
  manifest.ranks.push_back({other.tensors[2]});
  commit.publish(std::move(manifest));
}

// All bytes of all tensors; the text of an error.
std::string load_two(const std::string& root, const std::string& tag, std::string* error) {
  std::string bytes;
  const int code = code_of(
      [&] {
        const auto choice = choose(system_files(), root, tag);
        const auto folder = Folder::open(system_files(), root).folder(choice.tag);
        const auto manifest = read_manifest(folder, choice.manifest_hash);
        for (const auto& tensor : manifest.tensors)
          if (!tensor.parts.empty()) bytes += bytes_in(folder, manifest, tensor);
        for (const auto& own : manifest.ranks)
          for (const auto& tensor : own) bytes += bytes_in(folder, manifest, tensor);
      },
      error);
  EXPECT_TRUE(code == 0 || code == kDamaged) << *error;
  return code == 0 ? bytes : "";
}

TEST(CheckpointDamage, FilesOfOtherRanksAndCheckpoints) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = folder.text();
  save_two(root, "a", 1);
  save_two(root, "b", 2);
  const auto a = folder.path() / "a", b = folder.path() / "b";
  std::string text;
  const auto good = load_two(root, "b", &text);
  EXPECT_GT(good.size(), 2400u) << text;
  EXPECT_NE(load_two(root, "a", &text), good);
  // What is put into `b`, by name of the file that it replaces.
  const auto expect_found = [&](const std::map<std::string, std::string>& files, const std::string& what) {
    std::map<std::string, std::string> kept;
    for (const auto& [name, bytes] : files) {
      kept[name] = file_text(b / name);
      EXPECT_NE(kept[name], bytes) << what;
      EXPECT_EQ(kept[name].size(), bytes.size()) << what << ": the size alone would tell";
      write_all(b / name, bytes);
    }
    std::string seen;
    EXPECT_TRUE(load_two(root, "b", &seen).empty()) << what;
    std::string verified;
    EXPECT_EQ(code_of([&] { (void)inspect_checkpoint(root, "b", true); }, &verified), kDamaged) << what;
    for (const auto& error : {seen, verified}) {
      bool named = false;
      for (const auto& [name, bytes] : files) named = named || error.find((b / name).string()) != std::string::npos;
      // SUMS says another hash of the manifest, so that the manifest is the one that differs.
      named = named || (files.contains(kSumsName) && error.find((b / kManifestName).string()) != std::string::npos);
      // Of several that fit each other, the rest may be the wrong ones.
      named = named || (files.size() > 1 && error.find(b.string() + "/") != std::string::npos);
      EXPECT_TRUE(named) << what << ": " << error;
    }
    for (const auto& [name, bytes] : kept) write_all(b / name, bytes);
    EXPECT_TRUE(load_two(root, "b", &seen) == good) << what;
  };
  const auto first = rank_file_name(0), second = rank_file_name(1);
  expect_found({{first, file_text(b / second)}, {second, file_text(b / first)}}, "two files swapped");
  expect_found({{first, file_text(b / second)}}, "the second file twice");
  expect_found({{second, file_text(b / first)}}, "the first file twice");
  for (const std::string name : {first.c_str(), second.c_str(), kBlocksName, kManifestName, kSumsName})
    expect_found({{name, file_text(a / name)}}, name + " of another checkpoint");
  expect_found({{first, file_text(a / first)}, {kBlocksName, file_text(a / kBlocksName)}}, "a file with its hashes");
  expect_found({{kManifestName, file_text(a / kManifestName)}, {kSumsName, file_text(a / kSumsName)}},
               "the manifest with its sums");
  expect_found(
      {{first, file_text(a / first)}, {second, file_text(a / second)}, {kBlocksName, file_text(a / kBlocksName)}},
      "all data with their hashes");
}

}  // namespace
}  // namespace zero::test::checkpoint_damage_test
