// Safetensors files and checkpoints as sources of tensors: what transformers wrote is read byte for byte, in any
// ranges; directories whose files contradict each other are refused.
#include <sys/stat.h>

#include <random>

#include "interchange/native_source.h"
#include "interchange/safetensors_source.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::weight_sources_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::interchange;

std::string bytes_of(TensorSource& source, const SourceTensor& tensor, std::int64_t begin, std::int64_t numel) {
  std::string bytes(static_cast<std::size_t>(numel) * static_cast<std::size_t>(formats::bits_of(tensor.dtype) / 8),
                    'x');
  source.read(tensor, begin, numel, bytes.data());
  return bytes;
}

int code_of_opening(const fs::path& path, std::string* text, const SourceOptions& options = {}) {
  return code_of([&] { (void)open_safetensors(formats::system_files(), path.string(), options); }, text);
}

TEST(WeightSources, WhatTransformersWrote) {
  std::mt19937 random(1);
  for (const char* name : {"hf-gpt2", "hf-llama", "hf-llama-tied", "hf-bert", "hf-t5"}) {
    const auto expected = plain_folder(hf_model(name));
    const auto index = hf_model(name) / "model.safetensors.index.json";
    for (const auto& path : {hf_model(name), fs::exists(index) ? index : hf_model(name) / "model.safetensors"}) {
      const auto source = open_safetensors(formats::system_files(), path.string());
      EXPECT_EQ(source->format(), "safetensors");
      ASSERT_EQ(source->tensors().size(), expected.size()) << name;
      for (const auto& tensor : source->tensors()) {
        const auto& plain = expected.at(tensor.name);
        EXPECT_EQ(tensor.kind, "weight");
        EXPECT_TRUE(tensor.dtype == plain.dtype && tensor.shape == plain.shape) << tensor.name;
        const auto numel = formats::numel_of(tensor.shape);
        EXPECT_EQ(bytes_of(*source, tensor, 0, numel), plain.bytes) << tensor.name;
        const auto width = plain.bytes.size() / static_cast<std::size_t>(numel);
        const auto begin = static_cast<std::int64_t>(random() % static_cast<unsigned>(numel));
        const auto count = static_cast<std::int64_t>(random() % static_cast<unsigned>(numel - begin + 1));
        EXPECT_EQ(bytes_of(*source, tensor, begin, count),
                  plain.bytes.substr(static_cast<std::size_t>(begin) * width, static_cast<std::size_t>(count) * width));
      }
    }
  }
}

// Sparse: only what is written takes room.
TEST(WeightSources, MoreElementsThan31BitsCount) {
  constexpr std::int64_t kRows = 65537, kColumns = 32769, kNumel = kRows * kColumns;
  static_assert(kNumel > std::int64_t{1} << 31);
  struct Counting : formats::FsOps {
    std::uint64_t read = 0;
    ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) override {
      read += bytes;
      return FsOps::pread(fd, out, bytes, offset);
    }
  };
  for (const auto& [dtype, width] : std::map<std::string, std::int64_t>{{"U8", 1}, {"BOOL", 1}, {"I16", 2}}) {
    const TempFolder folder(TempFolder::On::Memory);
    const auto path = folder.path() / "model.safetensors";
    const auto end = kNumel * width;
    const auto header =
        nlohmann::json{{"after", {{"dtype", "U8"}, {"shape", {3}}, {"data_offsets", {end, end + 3}}}},
                       {"large", {{"dtype", dtype}, {"shape", {kRows, kColumns}}, {"data_offsets", {0, end}}}}}
            .dump();
    const auto length = static_cast<std::uint64_t>(header.size());
    write_all(path, std::string(reinterpret_cast<const char*>(&length), 8) + header);
    const auto data = static_cast<std::int64_t>(8 + length);
    fs::resize_file(path, static_cast<std::uintmax_t>(data + end + 3));
    // Marks around 2^31 and at the end; a place that loses its upper bits has none.
    const std::vector<std::int64_t> marks{(std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, kNumel - 1};
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      for (const auto at : marks) {
        file.seekp(data + at * width);
        file.put(1);
      }
      file.seekp(data + end);
      file.write("end", 3);
    }
    Counting files;
    const auto source = open_safetensors(files, folder.text());
    ASSERT_EQ(source->tensors().size(), 2u);
    const auto& large = source->tensors()[1];
    EXPECT_EQ(formats::numel_of(large.shape), kNumel);
    for (const auto at : marks) {
      const auto begin = at - 2, numel = std::min<std::int64_t>(5, kNumel - begin);
      std::string expected(static_cast<std::size_t>(numel * width), '\0');
      for (const auto mark : marks)
        if (mark >= begin && mark < begin + numel) expected[static_cast<std::size_t>((mark - begin) * width)] = 1;
      EXPECT_EQ(bytes_of(*source, large, begin, numel), expected) << dtype << " " << at;
    }
    EXPECT_EQ(bytes_of(*source, source->tensors()[0], 0, 3), "end");
    EXPECT_LT(files.read, 10000u) << "of a file of " << end << " bytes";
  }
}

TEST(WeightSources, TiesAndPrefixes) {
  TempFolder folder;
  const auto one = plain_tensor<float>("F32", {2}, {1, 2});
  write_all(folder.path() / "model.safetensors",
            plain_file({{"net.a", one}, {"net.b", one}},
                       {{"format", "pt"}, {"net.c", "net.a"}, {"net.b", "net.a"}, {"net.d", "none"}}));
  auto source = open_safetensors(formats::system_files(), folder.text());
  EXPECT_EQ(source->aliases(), (std::map<std::string, std::string>{{"net.c", "net.a"}}));
  SourceOptions options;
  options.prefix = "net.";
  source = open_safetensors(formats::system_files(), folder.text(), options);
  EXPECT_EQ(source->tensors()[0].name, "a");
  EXPECT_EQ(source->aliases(), (std::map<std::string, std::string>{{"c", "a"}}));
  EXPECT_EQ(bytes_of(*source, source->tensors()[1], 1, 1), one.bytes.substr(4));
  options.prefix = "net.a";
  std::string text;
  EXPECT_EQ(code_of_opening(folder.path(), &text, options), static_cast<int>(ExitCode::kConfig));
  EXPECT_NE(text.find("net.a"), std::string::npos) << text;
}

TEST(WeightSources, RefusesFilesThatContradictTheIndex) {
  struct Case {
    const char* what;
    std::function<void(const fs::path&, nlohmann::json&)> damage;
  };
  const std::string second = "model-00002-of-00004.safetensors";
  const std::vector<Case> cases{
      {"the file is missing", [&](const fs::path& at, auto&) { fs::remove(at / second); }},
      {"plain name", [](const fs::path&, auto& index) { index["weight_map"]["transformer.wte.weight"] = "../x"; }},
      {"does not hold", [&](const fs::path&, auto& index) { index["weight_map"]["more"] = second; }},
      {"does not say", [&](const fs::path&, auto& index) { index["weight_map"]["transformer.wte.weight"] = second; }},
      {"does not say", [](const fs::path&, auto& index) { index["weight_map"].erase("transformer.ln_f.bias"); }},
      {"total_size", [](const fs::path&, auto& index) { index["metadata"]["total_size"] = 9089; }},
      {"total_size", [](const fs::path&, auto& index) { index["metadata"]["total_size"] = 9088.5; }},
      {"weight_map", [](const fs::path&, auto& index) { index.erase("weight_map"); }},
      {"has both",
       [](const fs::path& at, auto&) { fs::copy(at / "model-00001-of-00004.safetensors", at / "model.safetensors"); }},
      {"symbolic link",
       [&](const fs::path& at, auto&) {
         fs::rename(at / second, at / "elsewhere");
         fs::create_symlink(at / "elsewhere", at / second);
       }},
      {"not a regular file",
       [&](const fs::path& at, auto&) {
         fs::remove(at / second);
         ASSERT_EQ(::mkfifo((at / second).c_str(), 0600), 0);
       }},
      {"bytes of data",
       [&](const fs::path& at, auto&) { fs::resize_file(at / second, fs::file_size(at / second) - 1); }},
  };
  for (const auto& one : cases) {
    TempFolder folder;
    for (const auto& entry : fs::directory_iterator(hf_model("hf-gpt2")))
      if (entry.path().stem() != "expected") fs::copy(entry.path(), folder.path() / entry.path().filename());
    const auto path = folder.path() / "model.safetensors.index.json";
    auto index = nlohmann::json::parse(file_text(path));
    one.damage(folder.path(), index);
    write_all(path, index.dump());
    std::string text;
    EXPECT_EQ(code_of_opening(folder.path(), &text), kDamaged) << one.what << ": " << text;
    EXPECT_NE(text.find(one.what), std::string::npos) << one.what << ": " << text;
  }
  TempFolder empty;
  std::string text;
  EXPECT_EQ(code_of_opening(empty.path(), &text), kDamaged);
  EXPECT_EQ(code_of_opening(empty.path() / "none", &text), kDamaged);
}

TEST(WeightSources, RefusesWhatChangesWhileItIsRead) {
  TempFolder folder;
  const auto file = folder.path() / "model.safetensors";
  const PlainTensors tensors{{"a", plain_tensor<float>("F32", {2}, {1, 2})},
                             {"flags", plain_tensor<char>("BOOL", {2}, {1, 2})}};
  write_all(file, plain_file(tensors));
  const auto source = open_safetensors(formats::system_files(), file.string());
  EXPECT_EQ(bytes_of(*source, source->tensors()[0], 0, 2), tensors.at("a").bytes);
  std::string text;
  EXPECT_EQ(code_of([&] { (void)bytes_of(*source, source->tensors()[1], 1, 1); }, &text), kDamaged);
  EXPECT_NE(text.find("element 1 is 2, expected 0 or 1"), std::string::npos) << text;
  fs::rename(file, folder.path() / "old");
  write_all(file, plain_file(tensors));
  EXPECT_EQ(code_of([&] { (void)bytes_of(*source, source->tensors()[0], 0, 2); }, &text), kDamaged);
  EXPECT_NE(text.find("replaced"), std::string::npos) << text;
  fs::resize_file(file, fs::file_size(file) - 4);
  EXPECT_EQ(code_of([&] { (void)bytes_of(*source, source->tensors()[0], 0, 2); }, &text), kDamaged);
}

TEST(WeightSources, ACheckpointOfLibzero) {
  TempFolder folder;
  for (int i = 1; i <= 2; ++i) save_sample(formats::system_files(), folder.text(), "t" + std::to_string(i), i);
  const auto check = [](TensorSource& source, int value) {
    const Sample sample(value);
    ASSERT_EQ(source.tensors().size(), 3u);
    const auto& mask = source.tensors()[0];
    const auto& weight = source.tensors()[2];
    EXPECT_TRUE(mask.kind == "buffer" && mask.name == "mask" && weight.kind == "master" &&
                weight.name == "layer.weight" && source.tensors()[1].name == "empty");
    EXPECT_EQ(bytes_of(source, weight, 7, 200),
              std::string(reinterpret_cast<const char*>(sample.weights.data() + 7), 800));
    EXPECT_EQ(bytes_of(source, mask, 0, 70), std::string(sample.mask.begin(), sample.mask.end()));
    EXPECT_EQ(source.progress()->global_steps, value);
  };
  check(*open_native(formats::system_files(), folder.text()), 2);
  SourceOptions options;
  options.tag = "t1";
  check(*open_native(formats::system_files(), folder.text(), options), 1);
  check(*open_native(formats::system_files(), folder.file("t1")), 1);
  const auto file = folder.path() / "t2" / "rank-00000.safetensors";
  auto bytes = file_text(file);
  bytes[4096 + 10] ^= 1;  // of layer.weight
  write_all(file, bytes);
  const auto source = open_native(formats::system_files(), folder.text());
  std::string text;
  EXPECT_EQ(code_of(
                [&] {
                  for (const auto& tensor : source->tensors())
                    (void)bytes_of(*source, tensor, 0, formats::numel_of(tensor.shape));
                },
                &text),
            kDamaged);
  EXPECT_NE(text.find("rank-00000"), std::string::npos) << text;
}

}  // namespace
}  // namespace zero::test::weight_sources_test
