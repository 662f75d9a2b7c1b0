// Damaged and hostile files of other programs: an error, or nothing that is read changes; no crash, little memory and
// time, and nothing is executed.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "interchange/source.h"
#include "support/cifar10_files.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/peak_memory.h"
#include "unit/interchange/source_samples.h"
#include "unit/interchange/zip_samples.h"

namespace foreign_damage_test {
namespace {

namespace fs = std::filesystem;
using zero::interchange::open_source;
using zero::test::contents_of;
using zero::test::golden;
using zero::test::little;
using zero::test::TempFolder;
using zero::test::torch_sample;
using zero::test::write_file;
using namespace std::string_literals;

// All that is read, or "" with the error.
std::string read_all(const std::string& path, std::string* error = nullptr) {
  try {
    const auto source = open_source(zero::formats::system_files(), path);
    return contents_of(*source);
  } catch (const zero::IoError& e) {
    EXPECT_EQ(e.code(), zero::ExitCode::kCheckpoint) << e.what();
    if (error) *error = e.what();
  } catch (const zero::ConfigError& e) {
    if (error) *error = e.what();
  }
  return "";
}

// Flips one bit of every `step`th byte of `file`, which `path` is or has; returns how many changes were found.
int flip_all(const std::string& path, const std::string& file, std::size_t step, bool names_may_change = false) {
  const auto good = read_all(path), bytes = zero::test::bytes_of_file(file);
  EXPECT_NE(good, "") << path;
  int found = 0;
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](char byte) {
      out.seekp(static_cast<std::streamoff>(at));
      out.put(byte);
      out.flush();
    };
    put(static_cast<char>(bytes[at] ^ (1 << (at % 8))));
    const auto got = read_all(path);
    found += got.empty();
    if (!names_may_change) EXPECT_TRUE(got.empty() || got == good) << file << ", byte " << at;
    put(bytes[at]);
  }
  EXPECT_EQ(read_all(path), good);
  return found;
}

TEST(ForeignDamage, EveryFlippedByteOfATorchFile) {
  for (const char* const name : {"dict", "state_dict", "parameter", "strided", "protocol5"}) {
    const TempFolder folder(TempFolder::On::Memory);
    const auto file = folder.file("f.pt");
    fs::copy_file(golden(std::string("torch/") + name + ".pt"), file);
    EXPECT_GT(flip_all(file, file, 1), 500) << name;
  }
}

// Of the larger files, in script/test every 13th byte: with 8 bits, each bit in turn.
std::size_t step_of_large() { return zero::test::nightly() ? 1 : 29; }

TEST(ForeignDamage, EveryFlippedByteOfDeepSpeedsFiles) {
  for (const char* const name : {"deepspeed-0-fp32", "deepspeed-2-bf16", "deepspeed-3-bf16"}) {
    const TempFolder folder(TempFolder::On::Memory);
    fs::copy(golden(name), folder.path(), fs::copy_options::recursive);
    int found = 0;
    for (const auto& entry : fs::directory_iterator(folder.path() / "step3"))
      found += flip_all(folder.text(), entry.path().string(), step_of_large());
    found += flip_all(folder.text(), folder.file("latest"), 1);
    EXPECT_GT(found, 5000 / static_cast<int>(step_of_large())) << name;
  }
}

// .metadata has no checksum: a flip there may change a name, and must do no worse.
TEST(ForeignDamage, FlippedBytesOfADistributedCheckpoint) {
  const TempFolder folder(TempFolder::On::Memory);
  fs::copy(golden("dcp/step3"), folder.path(), fs::copy_options::recursive);
  EXPECT_GT(flip_all(folder.text(), folder.file(".metadata"), step_of_large(), true),
            5000 / static_cast<int>(step_of_large()));
  // A large file of many items: every 16th byte.
  const auto good = read_all(folder.text());
  const auto file = folder.file("__0_0.distcp"), bytes = zero::test::bytes_of_file(file);
  for (std::size_t at = 0; at < bytes.size(); at += 16 * step_of_large()) {
    auto changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ (1 << (at / 16 % 8)));
    write_file(file, changed);
    const auto got = read_all(folder.text());
    EXPECT_TRUE(got.empty() || got == good) << at;
  }
}

TEST(ForeignDamage, EveryLengthOfATorchFile) {
  const TempFolder folder(TempFolder::On::Memory);
  const auto bytes = zero::test::bytes_of_file(golden("torch/strided.pt"));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    write_file(folder.file("f.pt"), bytes.substr(0, size));
    EXPECT_EQ(read_all(folder.file("f.pt")), "") << size;
  }
}

// --- hostile pickles ----------------------------------------------------------------------------------

std::string text(const std::string& value) { return "X" + little(value.size(), 4) + value; }
std::string number(std::int64_t value) { return "\x8a\x08" + little(static_cast<std::uint64_t>(value), 8); }
std::string tuple(const std::vector<std::int64_t>& values) {
  std::string all = "(";
  for (const auto value : values) all += number(value);
  return all + "t";
}
std::string storage(const std::string& key, std::int64_t numel, const std::string& type = "torch\nFloatStorage") {
  return "(" + text("storage") + "c" + type + "\n" + text(key) + text("cpu") + number(numel) + "tQ";
}
std::string tensor(const std::string& of, std::int64_t offset, const std::string& shape, const std::string& stride) {
  return "ctorch._utils\n_rebuild_tensor_v2\n(" + of + number(offset) + shape + stride +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}
std::string dictionary(const std::string& value, const std::string& key = "w") {
  return "\x80\x02}" + text(key) + value + "s.";
}
// A dictionary of one tensor of 4 elements.
std::string plain(std::int64_t offset, const std::vector<std::int64_t>& shape,
                  const std::vector<std::int64_t>& stride) {
  return dictionary(tensor(storage("0", 4), offset, tuple(shape), tuple(stride)));
}
std::string repeated(const std::string& part, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += part;
  return all;
}

// Pickles that would do something, or have a reader do something, if it were not inert.
std::vector<std::string> hostile_pickles(const std::string& mark) {
  std::vector<std::string> all;
  const auto call = [&](const std::string& module, const std::string& name, const std::string& arguments) {
    all.push_back(dictionary("c" + module + "\n" + name + "\n" + arguments + "R"));
    all.push_back(
        "\x80\x02"
        "c" +
        module + "\n" + name + "\n" + arguments + "R.");
    all.push_back("\x80\x04}" + text("w") + text(module) + text(name) + "\x93" + arguments + "\x81s.");
  };
  const auto command = text("touch " + mark) + "\x85", file = text(mark) + text("w") + "\x86";
  for (const char* const module : {"os", "posix", "nt", "subprocess"}) call(module, "system", command);
  call("subprocess", "Popen", command);
  call("builtins", "eval", text("open('" + mark + "', 'w')") + "\x85");
  call("builtins", "exec", text("open('" + mark + "', 'w')") + "\x85");
  call("__builtin__", "open", file);
  call("builtins", "getattr", text("x") + text("y") + "\x86");
  call("torch", "load", text(mark) + "\x85");
  call("torch.hub", "load", file);
  call("torch.serialization", "load", command);
  call("torch._utils", "_rebuild_tensor_v2", file);
  call("importlib", "import_module", text("os") + "\x85");
  call("pickle", "loads", text("x") + "\x85");
  call("runpy", "_run_code", file);
  call("webbrowser", "open", command);
  call("torch._utils", "_rebuild_wrapper_subclass", file);
  // Texts and numbers that lie about their length.
  all.push_back("\x80\x02X\xff\xff\xff\xff.");
  all.push_back("\x80\x04\x8d" + little(std::uint64_t{1} << 40, 8) + ".");
  all.push_back("\x80\x04\x8e" + little(~std::uint64_t{0}, 8) + ".");
  all.push_back("\x80\x04\x95" + little(~std::uint64_t{0}, 8) + "N.");
  all.push_back("\x80\x02\x8b\xff\xff\xff\x7f.");
  all.push_back(dictionary("\x8a\xff" + std::string(255, '\x7f')));
  // The memory of references.
  all.push_back("\x80\x02Nr\xff\xff\xff\xff.");
  all.push_back("\x80\x02Nj\xff\xff\xff\xff.");
  all.push_back("\x80\x02" +
                repeated("Nq\xff"
                         "0",
                         50) +
                "N.");
  // Values that are made and thrown away.
  all.push_back("\x80\x02" + repeated("]0", 2000000) + "N.");
  // Depth: one million lists, tuples and calls in each other; lists and dictionaries in themselves.
  all.push_back("\x80\x02" + repeated("]", 1000000) + repeated("a", 999999) + ".");
  all.push_back("\x80\x02)" + repeated("\x85", 1000000) + ".");
  all.push_back(dictionary(")" + repeated("\x85", 1000000)));
  all.push_back(dictionary("ca\nb\n)R" + repeated("\x85"
                                                  "ca\nb\n\x85)R",
                                                  0)));
  all.push_back(
      "\x80\x02]q\0h\0"
      "a."s);
  all.push_back("\x80\x02}q\0" + text("w") + "h\0s."s);
  all.push_back("\x80\x02}q\0" + text("w") + "]q\1h\1ah\0as."s);
  all.push_back("\x80\x02" + repeated("(", 1000000) + ".");
  // Doubled sixty times: 2^60 values for a reader that follows every reference.
  std::string doubled = "]q\0"s;
  for (int i = 1; i < 60; ++i)
    doubled += "](h"s + static_cast<char>(i - 1) + "h" + static_cast<char>(i - 1) + "eq" + static_cast<char>(i);
  all.push_back("\x80\x02" + doubled + "h\x3b" + repeated("\x86", 59) + ".");
  all.push_back(dictionary(doubled + repeated("0", 59)));
  // Odd and mixed filling.
  all.push_back("\x80\x02}(" + text("w") + "u.");
  all.push_back("\x80\x02}(" + text("w") + "Nu(Nu.");
  all.push_back("\x80\x02]N" + text("w") + "s.");
  all.push_back(
      "\x80\x02"
      "ccollections\nOrderedDict\n)R(NNuNa.");
  all.push_back("\x80\x02N" + text("w") + "Ns.");
  all.push_back("\x80\x02}" + text("w") + "Ns" + text("w") + "Ns.");
  all.push_back("\x80\x02}NNs.");
  all.push_back("\x80\x02}" + text("\x1b[2J\n") + tensor(storage("0", 4), 0, tuple({4}), tuple({1})) + "s.");
  // Tensors that leave their record.
  all.push_back(plain(1, {4}, {1}));
  all.push_back(plain(0, {5}, {1}));
  all.push_back(plain(0, {2}, {4}));
  all.push_back(plain(-1, {4}, {1}));
  all.push_back(plain(4, {1}, {1}));
  all.push_back(plain(0, {4}, {-1}));
  all.push_back(plain(0, {-4}, {1}));
  all.push_back(plain(INT64_MAX, {1}, {1}));
  all.push_back(plain(0, {2}, {INT64_MAX}));
  all.push_back(plain(1, {3, 3}, {INT64_MAX / 2, INT64_MAX / 2}));
  all.push_back(plain(0, {INT64_MAX, INT64_MAX}, {0, 0}));
  all.push_back(plain(0, {std::int64_t{1} << 40}, {0}));
  all.push_back(plain(0, {0, std::int64_t{1} << 62, std::int64_t{1} << 62}, {1, 1, 1}));
  all.push_back(plain(0, {4}, {1, 1}));
  all.push_back(plain(0, std::vector<std::int64_t>(100, 1), std::vector<std::int64_t>(100, 1)));
  all.push_back(dictionary(tensor(storage("0", 5), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", 1), 0, tuple({1}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", INT64_MAX), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("1", 4), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("../data.pkl", 4), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", 4, "torch\nQInt8Storage"), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", 4, "os\nsystem"), 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor("N", 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(text("x") + "Q", 0, tuple({4}), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", 4), 0, text("4"), tuple({1}))));
  all.push_back(dictionary(tensor(storage("0", 4), 0, tuple({4}), "N")));
  // Names that are none.
  const auto good = tensor(storage("0", 4), 0, tuple({4}), tuple({1}));
  all.push_back(dictionary(good, ""));
  all.push_back(dictionary(good, std::string(5000, 'x')));
  all.push_back(dictionary(good, "\xff\xfe"));
  all.push_back(dictionary(good, "a\0b"s));
  return all;
}

TEST(ForeignDamage, HostilePicklesDoNothing) {
  const TempFolder folder(TempFolder::On::Memory);
  const auto mark = folder.file("executed"), path = folder.file("f.pt");
  const auto pickles = hostile_pickles(mark);
  EXPECT_GE(pickles.size(), 80u);
  const std::string storage = little(1, 4) + little(2, 4) + little(3, 4) + little(4, 4);
  int refused = 0;
  for (std::size_t i = 0; i < pickles.size(); ++i) {
    write_file(path, torch_sample(pickles[i], {storage}));
    const auto before = zero::test::restart_peak();
    const auto start = std::clock();  // of the processor: other programs may take turns
    std::string error;
    const auto got = read_all(path, &error);
    EXPECT_LT(std::clock() - start, CLOCKS_PER_SEC) << i;
    EXPECT_LT(zero::test::peak_bytes() - before, std::uint64_t{64} << 20) << i;
    EXPECT_FALSE(fs::exists(mark)) << i;
    refused += got.empty();
    // Otherwise there is nothing to read: calls and lists are remarks.
    if (!got.empty()) EXPECT_EQ(got, "torch") << i;
    EXPECT_LT(error.size(), 1000u) << i;
    EXPECT_EQ(error.find('\x1b'), std::string::npos) << i;
  }
  EXPECT_GT(refused, 60);
  // The same without anything hostile.
  write_file(path, torch_sample(plain(0, {4}, {1}), {storage}));
  EXPECT_EQ(read_all(path), "torch\nweight/w F32 4\n" + storage);
}

// Not in the square of the number of tensors: all are views of one record. In torch's form and in DeepSpeed's at stage
// 0.
TEST(ForeignDamage, TimeForManyTensorsOfOneRecord) {
  zero::interchange::SourceOptions options;
  options.ignore_crc = true;
  for (const bool deepspeed : {false, true}) {
    const TempFolder folder(TempFolder::On::Memory);
    const auto file = folder.file(deepspeed ? "mp_rank_00_model_states.pt" : "f.pt");
    const auto ticks = [&](int count) {
      std::string tensors = "}";
      for (int i = 1; i <= count; ++i)
        tensors += text("w" + std::to_string(i)) + tensor(storage("0", count), 0, tuple({i}), tuple({1})) + "s";
      const auto pickle = "\x80\x02" + (deepspeed ? "}" + text("module") + tensors + "s" : tensors) + ".";
      write_file(file, torch_sample(pickle, {std::string(static_cast<std::size_t>(count) * 4, 'x')}, false));
      std::clock_t best = 0;
      for (int round = 0; round < 3; ++round) {
        const auto start = std::clock();
        const auto source = open_source(zero::formats::system_files(), deepspeed ? folder.text() : file, options);
        EXPECT_EQ(source->tensors().size(), static_cast<std::size_t>(count));
        const auto took = std::clock() - start;
        best = round == 0 ? took : std::min(best, took);
      }
      return static_cast<double>(best);
    };
    const double few = ticks(2000), many = ticks(16000);  // 8 times as many: 64 times the comparisons of each with each
    EXPECT_LT(many, 24 * few) << (deepspeed ? "DeepSpeed" : "torch");
  }
}

// --- tables of distributed checkpoints ----------------------------------------------------------------

struct Part {
  std::vector<std::int64_t> start, size;
};

std::string object(const std::string& type, const std::string& fields) {
  return "ctorch.distributed.checkpoint." + type + "\n)\x81}(" + fields + "ub";
}
std::string size_of(const std::vector<std::int64_t>& values) { return "ctorch\nSize\n" + tuple(values) + "\x85R"; }

// A tensor of floats 0, 1, 2, ... in parts, each filled in its own row-major order; returns what is read, or "".
std::string read_parts(const std::vector<std::int64_t>& shape, const std::vector<Part>& parts, std::string* error) {
  const TempFolder folder(TempFolder::On::Memory);
  std::string chunks, places, file;
  float next = 0;
  for (const auto& part : parts) {
    std::int64_t numel = 1;
    std::vector<std::int64_t> stride(part.size.size());
    for (auto d = part.size.size(); d-- > 0;) {
      stride[d] = numel;
      numel *= part.size[d];
    }
    std::string values;
    for (std::int64_t i = 0; i < numel; ++i, next += 1) values.append(reinterpret_cast<const char*>(&next), 4);
    const auto item =
        torch_sample("\x80\x02" + tensor(storage("0", numel), 0, tuple(part.size), tuple(stride)) + ".", {values});
    chunks += object("metadata\nChunkStorageMetadata",
                     text("offsets") + size_of(part.start) + text("sizes") + size_of(part.size));
    places += object("metadata\nMetadataIndex", text("fqn") + text("w") + text("offset") + size_of(part.start)) +
              object("filesystem\n_StorageInfo", text("relative_path") + text("f.distcp") + text("offset") +
                                                     number(static_cast<std::int64_t>(file.size())) + text("length") +
                                                     number(static_cast<std::int64_t>(item.size())));
    file += item;
  }
  const auto properties =
      "ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81(ctorch\nfloat32\nN\x89N\x89tb"s;
  const auto table =
      object("metadata\nTensorStorageMetadata",
             text("properties") + properties + text("size") + size_of(shape) + text("chunks") + "](" + chunks + "e");
  write_file(folder.file("f.distcp"), file);
  write_file(folder.file(".metadata"),
             "\x80\x02" +
                 object("metadata\nMetadata", text("state_dict_metadata") + "}(" + text("w") + table + "u" +
                                                  text("storage_data") + "}(" + places + "u") +
                 ".");
  return read_all(folder.text(), error);
}

std::string floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), 4 * values.size()};
}

TEST(ForeignDamage, BoxesThatDoNotTile) {
  std::string error;
  EXPECT_EQ(read_parts({4}, {{{0}, {2}}, {{2}, {2}}}, &error), "dcp\nweight/w F32 4\n" + floats({0, 1, 2, 3})) << error;
  EXPECT_EQ(read_parts({2, 3}, {{{0, 1}, {2, 2}}, {{0, 0}, {2, 1}}}, &error),
            "dcp\nweight/w F32 2 3\n" + floats({4, 0, 1, 5, 2, 3}))
      << error;
  const std::vector<std::pair<std::string, std::vector<Part>>> wrong{
      {"boxes that overlap", {{{0}, {2}}, {{1}, {2}}}},
      {"boxes of 2 elements", {{{0}, {2}}}},
      {"boxes of 6 elements", {{{0}, {2}}, {{1}, {2}}, {{2}, {2}}}},
      {"a box beyond the tensor", {{{0}, {2}}, {{3}, {2}}}},
      {"a box beyond the tensor", {{{0}, {2}}, {{INT64_MAX}, {2}}}},
      {"again", {{{0}, {2}}, {{0}, {2}}}},
      {"2 dimensions", {{{0, 0}, {2, 2}}}},
  };
  for (const auto& [what, parts] : wrong) {
    EXPECT_EQ(read_parts({4}, parts, &error), "") << what;
    EXPECT_NE(error.find(what), std::string::npos) << what << ": " << error;
  }
}

TEST(ForeignDamage, LinksAndSpecialFilesAreRefused) {
  const TempFolder folder(TempFolder::On::Memory);
  write_file(folder.file("f.pt"), torch_sample(plain(0, {4}, {1}), {std::string(16, '\0')}));
  EXPECT_NE(read_all(folder.file("f.pt")), "");
  fs::create_symlink(folder.file("f.pt"), folder.file("link.pt"));
  EXPECT_EQ(read_all(folder.file("link.pt")), "");
  ASSERT_EQ(::mkfifo(folder.file("fifo.pt").c_str(), 0600), 0);
  EXPECT_EQ(read_all(folder.file("fifo.pt")), "");
  EXPECT_EQ(read_all(folder.file("none.pt")), "");
}

}  // namespace
}  // namespace foreign_damage_test
