// The files of a checkpoint: what is written can be read, and changed, truncated, extended or forged files are
// rejected.
#include <sys/stat.h>

#include <cstring>
#include <random>

#include <nlohmann/json.hpp>

#include "support/file_text.h"
#include "support/nightly.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test::checkpoint_format_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::formats;

TEST(CheckpointNames, TagsAndFilesArePlainNames) {
  for (const char* tag : {"a", "step-000100", "0", "A.b_c-d", "best..1"}) EXPECT_TRUE(valid_tag(tag)) << tag;
  for (const char* tag : {"", "latest", ".", "..", ".x", "-x", "_x", "a/b", "a b", "a\n", "ü", "a\\b"})
    EXPECT_FALSE(valid_tag(tag)) << tag;
  EXPECT_TRUE(valid_tag(std::string(128, 'a')));
  EXPECT_FALSE(valid_tag(std::string(129, 'a')));
  EXPECT_FALSE(valid_tag(std::string("a\0b", 3)));
  for (const char* name : {"rank-00000.safetensors", "_x", "a.b"}) EXPECT_TRUE(valid_file_name(name)) << name;
  for (const char* name : {"", "..", "a..b", "/etc/passwd", "../x", "a/b", ".x", "-rf", "a b"})
    EXPECT_FALSE(valid_file_name(name)) << name;
  EXPECT_FALSE(valid_file_name(std::string(256, 'a')));
  EXPECT_EQ(rank_file_name(3), "rank-00003.safetensors");
  EXPECT_EQ(rank_file_name(1234567), "rank-1234567.safetensors");
}

TEST(CheckpointHash, IsTheOneThatXxh128sumPrints) {
  EXPECT_EQ(hash_of(""), "99aa06d3014798d86001c324468d497f");
  Hasher parts;
  parts.add("ab", 2);
  parts.add("c", 1);
  EXPECT_EQ(parts.hex(), hash_of("abc"));
  EXPECT_TRUE(is_hash(hash_of("x")));
  EXPECT_FALSE(is_hash("99AA06d3014798d86001c324468d497f"));
}

// --- safetensors --------------------------------------------------------------------------------

std::string with_length(const std::string& json) {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 255);
  return text + json;
}

int code_of_header(const std::string& json, std::uint64_t data, std::string* text = nullptr) {
  return code_of([&] { parse_header(json, data, "file"); }, text);
}

TEST(CheckpointSafetensors, TakesWhatIsRight) {
  EXPECT_EQ(code_of_header("{}", 0), 0);
  EXPECT_EQ(code_of_header("  {} \n", 0), 0);
  EXPECT_EQ(code_of_header(R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24),
            0);
  EXPECT_EQ(code_of_header(R"({"x":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]}})", 1), 0);
  EXPECT_EQ(code_of_header(R"({"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2), 0);
  EXPECT_EQ(
      code_of_header(
          R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},
                              "e":{"dtype":"I64","shape":[0,5],"data_offsets":[1,1]}})",
          3),
      0);
}

TEST(CheckpointSafetensors, RefusesWhatIsNot) {
  const auto tensor = [](const std::string& fields) { return "{\"x\":{" + fields + "}}"; };
  const std::vector<std::pair<std::string, std::uint64_t>> bad{
      {"", 0},
      {"[]", 0},
      {"null", 0},
      {"{", 0},
      {"{}{}", 0},
      {"{},", 0},
      {std::string("{}\0", 3), 0},
      {"\xEF\xBB\xBF{}", 0},
      {"{} // no", 0},
      {"{\"a\xff\":{}}", 0},
      {"{}", 1},
      {R"({"__metadata__":null})", 0},
      {R"({"__metadata__":{"a":1}})", 0},
      {R"({"__metadata__":{"a":"b","a":"c"}})", 0},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\u0078":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2},
      {R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {R"({"a\u0000":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {R"({"a\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {"{\"" + std::string(4097, 'n') + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1},
      {tensor(R"("dtype":"U8","shape":[1])"), 1},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1)"), 1},
      {tensor(R"("dtype":"u8","shape":[1],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"F128","shape":[1],"data_offsets":[0,16])"), 16},
      {tensor(R"("dtype":8,"shape":[1],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[1e0],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[01],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0])"), 0},
      {tensor(R"("dtype":"U8","shape":[9223372036854775807,9223372036854775807,0],"data_offsets":[0,0])"), 0},
      {tensor(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])"), 0},
      {tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2},
      {tensor(R"("dtype":"U8","shape":[2],"data_offsets":[0,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), 1},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])"), 2},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])"), 2},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,1])"), 1},
      {tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616])"), 1},
      {R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3},
      {R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3},
      {R"({"x":{"dtype":"U8","shape":[)" + std::string(65, '1') + R"(],"data_offsets":[0,1]}})", 1},
      {std::string(100000, '['), 0},
      {"{\"x\":" + std::string(50000, '['), 0},
  };
  for (const auto& [json, data] : bad) {
    std::string text;
    EXPECT_EQ(code_of_header(json, data, &text), kDamaged) << json.substr(0, 200) << ": " << text;
    EXPECT_TRUE(text.find("file") != std::string::npos) << text;
  }
  std::string dimensions = "[1";
  for (int i = 0; i < 64; ++i) dimensions += ",1";
  EXPECT_EQ(code_of_header(R"({"x":{"dtype":"U8","shape":)" + dimensions + R"(],"data_offsets":[0,1]}})", 1), kDamaged);
}

TEST(CheckpointSafetensors, LengthIsCheckedBeforeMemoryIsTaken) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = Folder::open(system_files(), folder.text());
  const auto code = [&](const std::string& bytes) {
    write_all(folder.path() / "f", bytes);
    return code_of([&] { read_header(root.open_file("f")); });
  };
  EXPECT_EQ(code(with_length("{}")), 0);
  EXPECT_EQ(code(""), kDamaged);
  EXPECT_EQ(code("1234567"), kDamaged);
  EXPECT_EQ(code(std::string(8, '\xff')), kDamaged);
  EXPECT_EQ(code(with_length(std::string(3, ' '))), kDamaged);
  auto longer = with_length("{}");
  longer[0] = 3;
  EXPECT_EQ(code(longer), kDamaged);
  EXPECT_EQ(code(with_length("{}") + "x"), kDamaged);
}

TEST(CheckpointSafetensors, LinksFifosAndFoldersAreNotFiles) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = Folder::open(system_files(), folder.text());
  write_all(folder.path() / "real", "x");
  fs::create_symlink(folder.path() / "real", folder.path() / "link");
  ASSERT_EQ(::mkfifo((folder.path() / "fifo").c_str(), 0600), 0);
  fs::create_directory(folder.path() / "dir");
  fs::create_directory_symlink(folder.path() / "dir", folder.path() / "dirlink");
  for (const char* name : {"link", "fifo", "dir", "none"})
    EXPECT_EQ(code_of([&] { root.open_file(name); }), kDamaged) << name;
  EXPECT_EQ(code_of([&] { root.open_file("real"); }), 0);
  EXPECT_EQ(code_of([&] { root.open_file("real", 2); }), kDamaged);
  for (const char* name : {"link", "fifo", "real", "none", "dirlink"})
    EXPECT_EQ(code_of([&] { root.folder(name); }), kDamaged) << name;
}

TEST(CheckpointRankFile, PartsAreBoundedAndReadBack) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = Folder::open(system_files(), folder.text());
  std::vector<float> large(20000000);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<float>(i);
  const std::vector<unsigned char> small{1, 0, 1};
  const auto file = write_rank_file(root, "f",
                                    {{"buffer", "b", "BOOL", {3}, false, 0, 3, from(small), false},
                                     {"master", "w", "F32", {30000000}, true, 5000000, 20000000, from(large), true}});
  ASSERT_EQ(file.tensors.size(), 2u);
  ASSERT_EQ(file.tensors[1].parts.size(), 2u);
  EXPECT_EQ(file.tensors[1].parts[0].numel * 4, kMostPartBytes);
  EXPECT_EQ(file.tensors[1].parts[1].start, 5000000 + kMostPartBytes / 4);
  const auto bytes = file_text(folder.path() / "f");
  EXPECT_EQ(static_cast<std::int64_t>(bytes.size()), file.file.bytes);
  EXPECT_EQ(hash_of(bytes), file.file.hash);
  const auto manifest = manifest_of(root, file);
  EXPECT_EQ(bytes_in(root, manifest, file.tensors[1]),
            std::string(reinterpret_cast<const char*>(large.data()), large.size() * sizeof(float)));
  EXPECT_EQ(bytes_in(root, manifest, file.tensors[0]), std::string(small.begin(), small.end()));
  // Aligned for readers that map the file.
  const auto header = read_header(root.open_file("f"));
  EXPECT_EQ(header.data_begin % 4096, 0u);
  for (const auto& entry : header.tensors)
    EXPECT_EQ(entry.begin % static_cast<std::uint64_t>(bits_of(entry.dtype) / 8), 0u);
}

TEST(CheckpointRankFile, InfAndNanInFp32StateAreRefused) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = Folder::open(system_files(), folder.text());
  std::vector<float> values(400000, 3e38f);
  values[7] = -0.0f;
  values[8] = 1e-45f;
  const auto write = [&](const char* name) {
    return code_of([&] {
      write_rank_file(root, name, {{"master", "w", "F32", {400000}, true, 0, 400000, from(values), true}});
    });
  };
  EXPECT_EQ(write("finite"), 0);
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{262144}, values.size() - 1}) {
      const auto before = std::exchange(values[at], bad);
      EXPECT_EQ(write(("bad" + std::to_string(at) + std::to_string(bad)).c_str()),
                static_cast<int>(ExitCode::kNumerical));
      values[at] = before;
    }
  }
}

TEST(CheckpointRankFile, BoolsAreZeroOrOne) {
  TempFolder folder(TempFolder::On::Memory);
  const auto root = Folder::open(system_files(), folder.text());
  std::vector<unsigned char> values(20, 1);
  values[17] = 2;  // in the part that begins at element 10
  const auto file = write_rank_file(root, "f", {{"buffer", "b", "BOOL", {30}, false, 10, 20, from(values), false}});
  std::string text;
  EXPECT_EQ(code_of([&] { bytes_in(root, manifest_of(root, file), file.tensors[0]); }, &text), kDamaged);
  EXPECT_NE(text.find("element 27 is 2, expected 0 or 1"), std::string::npos) << text;
}

// --- manifest, SUMS, latest ---------------------------------------------------------------------

// No field has its default value, so that a field that is not read is detected.
Manifest some_manifest() {
  Manifest m;
  m.libzero_version = "0.1.0";
  m.libtorch_version = "2.11.0";
  m.tag = "t";
  m.id = hash_of("id");
  m.created = "2000-01-01T00:00:00Z";
  m.seq = 3;
  m.global_steps = 12;
  m.applied_steps = 11;
  m.skipped_steps = 1;
  m.global_samples = 48;
  m.optimizer = "AdamW";
  m.slots = {"exp_avg", "exp_avg_sq"};
  m.loss_scale = 0.1;
  m.hysteresis = 2;
  m.good = 7;
  m.floor = 5;
  m.world = 2;
  m.stage = 3;
  m.parameter_dtype = m.gradient_dtype = m.wire_dtype = "BF16";
  m.transport = "shm";
  m.cpu_capability = "AVX2";
  m.torch_threads = 4;
  m.config = {{"a", "1"}};
  m.config_hash = hash_of("c");
  m.user_state = "\"ü\n\\";
  m.set_rates = {0.1, -1};
  m.missed_steps = {{"w", 3}};
  m.global_batch = 8;
  m.micro_batch = 2;
  m.accumulation = 4;
  m.files = {{"a", 100, hash_of("a")}, {"b", 100, hash_of("b")}, {"c", 50, hash_of("c")}};
  m.blocks = "c";
  m.tensors = {{"master", "w", "F32", {2, 3}, true, {{0, 4, 40, 0}, {1, 2, 92, 4}}}};
  m.aliases = {{"head", "w"}};
  m.ranks = {{{"rank", "g", "U8", {5}, false, {{0, 5, 60, 0}}}}, {}};
  return m;
}

// Of two tensor-parallel ranks, which hold columns 0 and 1 to 2 of the tensor.
Manifest manifest_of_a_mesh() {
  auto m = some_manifest();
  m.sequence = 1;
  m.tensor = 2;
  m.tensors[0].slices = {{{{0, 0}, {2, 1}}}, {{{0, 1}, {2, 2}}}};
  return m;
}

TEST(CheckpointManifest, HasTheSlicesOfAMesh) {
  const auto text = manifest_text(manifest_of_a_mesh());
  const auto back = parse_manifest(text, "manifest");
  EXPECT_EQ(manifest_text(back), text);
  EXPECT_EQ(back.tensor, 2);
  EXPECT_EQ(back.tensors[0].slices, manifest_of_a_mesh().tensors[0].slices);
}

TEST(CheckpointManifest, SlicesHaveEveryElementOnce) {
  const auto refused = [](const std::function<void(Manifest&)>& change) {
    auto m = manifest_of_a_mesh();
    change(m);
    return code_of([&] { prove_coverage(m, "manifest"); }) == kDamaged;
  };
  EXPECT_FALSE(refused([](Manifest&) {}));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].slices.pop_back(); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].slices[1][0].start[1] = 0; }));  // overlaps
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].slices[1][0].start[1] = 2; }));  // outside
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].slices[1][0].size = {INT64_MAX, 2}; }));
  // As many elements as the tensor, one of them twice.
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].slices = {{{{0, 0}, {1, 3}}}, {{{0, 0}, {1, 3}}}}; }));
}

TEST(CheckpointManifest, RoundTrip) {
  const auto m = some_manifest();
  const auto text = manifest_text(m);
  const auto back = parse_manifest(text, "manifest");
  EXPECT_EQ(manifest_text(back), text);
  EXPECT_EQ(back.loss_scale, 0.1);
  EXPECT_EQ(back.user_state, m.user_state);
  EXPECT_EQ(back.tensors[0].parts[1].start, 4);
  EXPECT_EQ(back.ranks.size(), 2u);
  EXPECT_EQ(back.set_rates, m.set_rates);
  EXPECT_EQ(back.missed_steps, m.missed_steps);
}

void expect_every_field_is_needed(const std::string& manifest) {
  const auto whole = nlohmann::json::parse(manifest);
  ASSERT_EQ(code_of([&] { parse_manifest(whole.dump(), "manifest"); }), 0);
  int tried = 0;
  const std::function<void(const nlohmann::json::json_pointer&)> visit = [&](const nlohmann::json::json_pointer& at) {
    const auto& value = whole[at];
    const auto free_names =
        at.to_string() == "/config" || at.to_string() == "/aliases" || at.to_string() == "/program/missed_steps";
    const auto refused = [&](const std::function<void(nlohmann::json&)>& change, const std::string& what) {
      auto other = whole;
      change(other);
      ++tried;
      EXPECT_EQ(code_of([&] { parse_manifest(other.dump(), "manifest"); }), kDamaged) << at.to_string() << ": " << what;
    };
    if (!at.empty()) {
      refused([&](auto& j) { j[at] = nullptr; }, "null");
      refused([&](auto& j) { j[at] = 1.5; }, "1.5");
      // The state of the loss scaler after an overflow, which readers of version 5 know.
      if (at.to_string() != "/scaler/good" || whole["min_reader"] < 5) refused([&](auto& j) { j[at] = -1; }, "-1");
    }
    if (value.is_object()) {
      if (!free_names) refused([&](auto& j) { j[at]["unknown"] = 1; }, "an unknown field");
      for (const auto& item : value.items()) {
        // Tensors that are not cut have no slices.
        if (!free_names && item.key() != "slices")
          refused([&](auto& j) { j[at].erase(item.key()); }, "without " + item.key());
        visit(at / item.key());
      }
    } else if (value.is_array()) {
      // The others are checked by the code that checks the first.
      for (std::size_t i = 0; i < (nightly() ? value.size() : std::min<std::size_t>(1, value.size())); ++i)
        visit(at / i);
    }
  };
  visit(nlohmann::json::json_pointer());
  EXPECT_GT(tried, 200);
}

TEST(CheckpointManifest, EveryFieldIsNeededAndNoOtherIsKnown) {
  expect_every_field_is_needed(manifest_text(some_manifest()));
  expect_every_field_is_needed(manifest_text(manifest_of_a_mesh()));
  auto exported = some_manifest();
  exported.files.push_back({"model.safetensors", 9, hash_of("m")});
  expect_every_field_is_needed(manifest_text(exported));
  // Format 1.
  const auto golden = fs::path(ZERO_SOURCE_DIR) / "tests/golden/checkpoint-1";
  expect_every_field_is_needed(file_text(golden / "tiny/t/manifest.json"));
}

TEST(CheckpointManifest, ANewerVersionIsNamed) {
  auto json = nlohmann::json::parse(manifest_text(some_manifest()));
  json["min_reader"] = 7;
  json["something_new"] = true;
  std::string text;
  EXPECT_EQ(code_of([&] { parse_manifest(json.dump(), "m"); }, &text), kDamaged);
  EXPECT_TRUE(text.find("version 7") != std::string::npos && text.find("version 5") != std::string::npos) << text;
}

TEST(CheckpointManifest, EveryElementExactlyOnce) {
  const auto refused = [](const std::function<void(Manifest&)>& change) {
    auto m = some_manifest();
    change(m);
    return code_of([&] { prove_coverage(m, "manifest"); }) == kDamaged;
  };
  EXPECT_FALSE(refused([](Manifest&) {}));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts.pop_back(); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts.erase(m.tensors[0].parts.begin()); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].start = 3; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].start = 5; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].numel = 3; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].numel = 0; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].numel = INT32_MAX; }));
  EXPECT_TRUE(refused([](Manifest& m) { std::swap(m.tensors[0].parts[0], m.tensors[0].parts[1]); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].file = 3; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].file = 2; })) << "the file of hashes";
  EXPECT_TRUE(refused([](Manifest& m) { m.files[1].name = "model.safetensors"; })) << "for other libraries";
  // Bytes that two tensors have, or that no file has.
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1] = {0, 2, 52, 4}; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.ranks[0][0].parts[0].offset = 55; }));
  EXPECT_FALSE(refused([](Manifest& m) { m.ranks[0][0].parts[0].offset = 56; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].offset = 96; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].offset = UINT64_MAX - 3; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors[0].parts[1].offset = 90; })) << "not a multiple of the width";
  EXPECT_TRUE(refused([](Manifest& m) { m.blocks = "d"; }));
  EXPECT_TRUE(refused([](Manifest& m) { m.tensors.push_back(m.tensors[0]); }));
  EXPECT_TRUE(refused([](Manifest& m) {
    m.tensors[0].shape = {INT64_MAX, INT64_MAX, 0};
    m.tensors[0].parts.clear();
  }));
  EXPECT_TRUE(refused([](Manifest& m) { m.ranks.pop_back(); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.files.push_back(m.files[0]); }));
  EXPECT_TRUE(refused([](Manifest& m) { m.ranks[0][0].parts[0].numel = 4; }));
  EXPECT_TRUE(refused([](Manifest& m) {
    m.tensors[0].shape = {kMostPartBytes};
    m.files[0].bytes = INT64_MAX;
    m.tensors[0].parts = {{0, kMostPartBytes, 0, 0}};
  }));
}

TEST(CheckpointManifest, TextThatIsNotUtf8IsAnErrorOfTheCaller) {
  auto m = some_manifest();
  m.user_state = "\xff";
  EXPECT_EQ(code_of([&] { manifest_text(m); }), static_cast<int>(ExitCode::kConfig));
}

TEST(CheckpointManifest, AUserStateThatNoLoadWouldReadIsRefused) {
  // As many bytes as the text has in a manifest, so that nothing that can be loaded is refused.
  auto m = some_manifest();
  m.user_state = "";
  const auto empty = manifest_text(m).size();
  m.user_state = "a\"\\\b\f\n\r\t\v\x01\x1f \x7f\xc3\xa9";
  const auto size = manifest_text(m).size() - empty;
  std::string most(kMostUserStateBytes - size, 'x');
  most += m.user_state;
  EXPECT_NO_THROW(check_user_state(most, "save_checkpoint"));
  most += 'x';
  try {
    check_user_state(most, "save_checkpoint");
    FAIL() << "no error";
  } catch (const ConfigError& e) {
    EXPECT_NE(std::string(e.what()).find("[save_checkpoint] got a user state of 234881025 bytes"), std::string::npos);
  }
}

TEST(CheckpointLatest, OneSpellingOnly) {
  const auto text = latest_text({"step-10", 4});
  EXPECT_EQ(text.substr(0, 14), "step-10\nseq 4\n");
  EXPECT_EQ(parse_latest(text, "l").tag, "step-10");
  EXPECT_EQ(parse_latest(text, "l").seq, 4);
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto other = text;
      other[i] = static_cast<char>(other[i] ^ (1 << bit));
      EXPECT_EQ(code_of([&] { parse_latest(other, "l"); }), kDamaged) << i;
    }
    EXPECT_EQ(code_of([&] { parse_latest(text.substr(0, i), "l"); }), kDamaged);
  }
  EXPECT_EQ(code_of([&] { parse_latest(text + "\n", "l"); }), kDamaged);
}

TEST(CheckpointSums, GrammarAndOrder) {
  const auto good = sums_text(some_manifest(), hash_of("m"));
  EXPECT_EQ(parse_sums(good, "s").size(), 4u);
  const auto line = hash_of("a") + "  ";
  for (const std::string& bad :
       {std::string(), std::string("\n"), good.substr(0, good.size() - 1), good + "x", line + "a\n",
        line + "../a\n" + line + "manifest.json\n", line + "manifest.json\n" + line + "a\n",
        line + "a\n" + line + "a\n" + line + "manifest.json\n", hash_of("a") + " manifest.json\n", good + "\n"})
    EXPECT_EQ(code_of([&] { parse_sums(bad, "s"); }), kDamaged) << bad;
}

// --- choice -------------------------------------------------------------------------------------

TEST(CheckpointChoice, NewestWholeOne) {
  TempFolder folder(TempFolder::On::Memory);
  const auto damage = [&](const char* tag) { write_all(folder.path() / tag / "manifest.json", "{}"); };
  EXPECT_EQ(code_of([&] { load_sample(folder.text()); }), kDamaged);
  save_sample(system_files(), folder.text(), "a", 1);
  save_sample(system_files(), folder.text(), "c", 2);
  save_sample(system_files(), folder.text(), "b", 3);
  EXPECT_EQ(load_sample(folder.text()).tag, "b");
  // The pointer is one checkpoint behind, as after a crash between the two renames.
  write_all(folder.path() / "latest", latest_text({"c", 2}));
  EXPECT_EQ(load_sample(folder.text()).tag, "b");
  auto choice = choose(system_files(), folder.text(), "");
  ASSERT_EQ(choice.notices.size(), 1u);
  // An older checkpoint that was chosen explicitly: its pointer has the highest number.
  write_all(folder.path() / "latest", latest_text({"a", 3}));
  EXPECT_EQ(load_sample(folder.text()).tag, "a");
  write_all(folder.path() / "latest", "nonsense");
  EXPECT_EQ(load_sample(folder.text()).tag, "b");
  fs::remove(folder.path() / "latest");
  EXPECT_EQ(load_sample(folder.text()).tag, "b");
  damage("b");
  EXPECT_EQ(load_sample(folder.text()).tag, "c");
  choice = choose(system_files(), folder.text(), "");
  ASSERT_FALSE(choice.notices.empty());
  EXPECT_TRUE(choice.notices[0].find("skipped") != std::string::npos);
  EXPECT_EQ(code_of([&] { load_sample(folder.text(), "b"); }), kDamaged) << "an explicit tag is that one or none";
  EXPECT_EQ(load_sample(folder.text(), "a").value, 1);
  // Files, and folders whose names are not tags, are ignored.
  fs::create_directory(folder.path() / ".tmp-x");
  fs::create_directory(folder.path() / "_private");
  write_all(folder.path() / "zzz", "a file");
  EXPECT_EQ(load_sample(folder.text()).tag, "c");
  damage("a");
  damage("c");
  std::string text;
  EXPECT_EQ(code_of([&] { load_sample(folder.text()); }, &text), kDamaged);
  EXPECT_TRUE(text.find("/a/") != std::string::npos && text.find("/c/") != std::string::npos) << text;
  // The next one continues the numbering.
  save_sample(system_files(), folder.text(), "d", 9);
  EXPECT_EQ(load_sample(folder.text()).value, 9);
}

TEST(CheckpointChoice, SequenceNumbersGrow) {
  TempFolder folder(TempFolder::On::Memory);
  for (int i = 1; i <= 3; ++i) save_sample(system_files(), folder.text(), "same", i);
  EXPECT_EQ(parse_latest(file_text(folder.path() / "latest"), "l").seq, 3);
  fs::remove(folder.path() / "latest");
  save_sample(system_files(), folder.text(), "next", 4);
  EXPECT_EQ(parse_latest(file_text(folder.path() / "latest"), "l").seq, 4);
}

}  // namespace
}  // namespace zero::test::checkpoint_format_test
