// Exported weights: the bytes of the files against the format's definition, values against their dtypes, ties, shards;
// and that nothing incomplete is ever visible.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include <zero/checkpoint_tools.h>

#include "interchange/crc32.h"
#include "interchange/element_types.h"
#include "interchange/output_files.h"
#include "interchange/page_writer.h"
#include "interchange/safetensors_source.h"
#include "interchange/weights_export.h"
#include "interchange/weights_layout.h"
#include "interchange/zip_layout.h"
#include "unit/formats/every_call.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::weight_files_test {
namespace {
namespace fs = std::filesystem;
using namespace zero::interchange;

TEST(WeightFiles, BytesByDefinition) {
  TempFolder folder;
  const auto in = folder.path() / "in.safetensors";
  write_all(in, plain_file({{"b", plain_tensor<float>("F32", {2, 1}, {1, -2})},
                            {"a", plain_tensor<std::int64_t>("I64", {}, {7})},
                            {"c", plain_tensor<float>("F32", {0, 4}, {})}},
                           {{"d", "b"}}));
  const auto report = export_checkpoint(in, folder.file("out"));
  EXPECT_EQ(report.files, std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(report.tensors, 3);
  EXPECT_EQ(report.bytes, 16);
  std::string json =
      R"({"__metadata__":{"d":"b","format":"pt"},"a":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]},"c":{"dtype":"F32","shape":[0,4],"data_offsets":[16,16]}})";
  json.resize(4096 - 8, ' ');
  const std::uint64_t length = json.size();
  std::string expected(8, '\0');
  std::memcpy(expected.data(), &length, 8);
  expected += json + std::string("\7\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\xc0", 16);
  EXPECT_EQ(file_text(folder.path() / "out" / "model.safetensors"), expected);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 2);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path() / "out"), {}), 1);
}

TEST(WeightFiles, WhatTransformersWroteComesOutAgain) {
  TempFolder folder;
  for (const char* name : {"hf-gpt2", "hf-llama", "hf-llama-tied", "hf-bert", "hf-t5"}) {
    ExportOptions options;
    options.dtype = "";
    options.shard_bytes = 3000;
    const auto out = folder.path() / name;
    const auto report = export_checkpoint(hf_model(name), out, options);
    const auto expected = plain_folder(hf_model(name));
    EXPECT_EQ(plain_folder(out), expected) << name;
    ASSERT_GT(report.files.size(), 2u);
    const auto index = nlohmann::json::parse(file_text(out / "model.safetensors.index.json"));
    std::uint64_t bytes = 0, elements = 0;
    for (const auto& [tensor, plain] : expected) {
      const std::string file = index["weight_map"][tensor];
      EXPECT_TRUE(plain_tensors(out / file).contains(tensor)) << tensor;
      bytes += plain.bytes.size();
      elements += static_cast<std::uint64_t>(formats::numel_of(plain.shape));
    }
    EXPECT_EQ(index["weight_map"].size(), expected.size());
    EXPECT_EQ(index["metadata"]["total_size"], bytes);
    EXPECT_EQ(index["metadata"]["total_parameters"], elements);
    // In order of names, none divided, each file within the limit.
    std::string last;
    for (std::size_t f = 0; f + 1 < report.files.size(); ++f) {
      char file[64];
      std::snprintf(file, sizeof file, "model-%05zu-of-%05zu.safetensors", f + 1, report.files.size() - 1);
      EXPECT_EQ(report.files[f], file);
      std::size_t filled = 0;
      for (const auto& [tensor, plain] : plain_tensors(out / file)) {
        EXPECT_LT(last, tensor);
        last = tensor;
        filled += plain.bytes.size();
      }
      EXPECT_LE(filled, 3000u);
    }
    EXPECT_TRUE(diff_checkpoints(hf_model(name), out).tensors.empty());
  }
}

TEST(WeightFiles, OneLargeTensorHasAFileOfItsOwn) {
  const std::vector<OutTensor> tensors{{"a", "F32", {10}}, {"b", "F32", {1000}}, {"c", "F32", {10}}, {"d", "U8", {3}}};
  const auto layout = safetensors_layout(tensors, {}, 100);
  ASSERT_EQ(layout.files.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(layout.places[i].file, std::min<std::size_t>(i, 2)) << i;
  EXPECT_EQ(layout.files[1].bytes, layout.places[1].offset + 4000);
  EXPECT_EQ(safetensors_layout(tensors, {}, 5000).files.size(), 1u);
  EXPECT_THROW(safetensors_layout({{"a", "F32", {1}}, {"a", "F32", {1}}}, {}, 100), ConfigError);
  EXPECT_THROW(safetensors_layout({{"__metadata__", "F32", {1}}}, {}, 100), ConfigError);
}

TEST(WeightFiles, TiesOnceOrUnderAllNames) {
  TempFolder folder;
  ExportOptions options;
  options.names = "llama";
  (void)export_checkpoint(hf_model("hf-llama-tied"), folder.file("once"), options);
  const auto once = file_text(folder.path() / "once" / "model.safetensors");
  EXPECT_EQ(plain_header(once)["__metadata__"],
            (nlohmann::json{{"format", "pt"}, {"lm_head.weight", "model.embed_tokens.weight"}}));
  EXPECT_FALSE(plain_folder(folder.path() / "once").contains("lm_head.weight"));
  options.duplicate_tied = true;
  (void)export_checkpoint(hf_model("hf-llama-tied"), folder.file("twice"), options);
  auto twice = plain_folder(folder.path() / "twice");
  EXPECT_EQ(twice.at("lm_head.weight"), twice.at("model.embed_tokens.weight"));
  PlainTensors expected;
  for (const auto& [name, tensor] : plain_tensors(hf_model("hf-llama-tied") / "expected.safetensors"))
    expected[name.substr(6)] = tensor;
  EXPECT_EQ(twice, expected) << "as state_dict() has it";
  EXPECT_EQ(plain_header(file_text(folder.path() / "twice" / "model.safetensors"))["__metadata__"],
            (nlohmann::json{{"format", "pt"}}));
  options.prefix = "net.";
  (void)export_checkpoint(hf_model("hf-llama-tied"), folder.file("prefixed"), options);
  for (const auto& [name, tensor] : plain_folder(folder.path() / "prefixed"))
    EXPECT_EQ(tensor, expected.at(name.substr(4)));
}

// One rounding to nearest even, by exact arithmetic in double.
double rounded(double value, int digits, int least_exponent) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), least_exponent) - digits + 1;
  return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
}
double value_of(std::uint16_t bits, bool bf16) {
  if (bf16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

TEST(WeightFiles, SixteenBitsAreRoundedOnce) {
  TempFolder folder;
  std::vector<float> values;
  std::vector<double> doubles;
  for (int i = 0; i < 3000; ++i) {
    values.push_back(std::bit_cast<float>(0x33000000u + static_cast<std::uint32_t>(i) * 20011u) *
                     (i % 2 == 0 ? 1 : -1));
    doubles.push_back(values.back() + 1e-9 * values.back());
  }
  for (const float tie :
       {1 + 1.0f / 256, 1 + 3.0f / 256, 1 + 1.0f / 2048, 1 + 3.0f / 2048, 3e-8f, 2.98023224e-8f, 0.0f}) {
    values.push_back(tie);
    doubles.push_back(tie * (1 + 1e-10));  // above a tie, by less than fp32 sees
  }
  const auto in = folder.path() / "in.safetensors";
  const auto numel = static_cast<std::int64_t>(values.size());
  write_all(in,
            plain_file({{"d", plain_tensor("F64", {numel}, doubles)}, {"f", plain_tensor("F32", {numel}, values)}}));
  for (const bool bf16 : {true, false}) {
    ExportOptions options;
    options.dtype = bf16 ? "bf16" : "fp16";
    const auto out = folder.path() / options.dtype;
    (void)export_checkpoint(in, out, options);
    const auto written = plain_folder(out);
    for (const char* name : {"f", "d"}) {
      EXPECT_EQ(written.at(name).dtype, bf16 ? "BF16" : "F16");
      for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, written.at(name).bytes.data() + 2 * i, 2);
        const double exact = *name == 'f' ? values[i] : doubles[i];
        ASSERT_EQ(value_of(bits, bf16), rounded(exact, bf16 ? 8 : 11, bf16 ? -126 : -14)) << name << " " << exact;
      }
    }
  }
}

TEST(WeightFiles, ValuesThatFp16CannotHold) {
  TempFolder folder;
  const float inf = std::numeric_limits<float>::infinity();
  const auto in = folder.path() / "in.safetensors";
  write_all(in, plain_file({{"fine", plain_tensor<float>("F32", {4}, {65504, inf, -inf, NAN})},
                            {"large", plain_tensor<float>("F32", {3}, {65520, -1e10f, 65519})}}));
  ExportOptions options;
  options.dtype = "fp16";
  std::string text;
  EXPECT_EQ(code_of([&] { (void)export_checkpoint(in, folder.file("out"), options); }, &text),
            static_cast<int>(ExitCode::kNumerical));
  EXPECT_TRUE(text.find("1 tensor:") != std::string::npos && text.find("large: 2 values") != std::string::npos) << text;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "nothing is left";
  options.allow_overflow = true;
  (void)export_checkpoint(in, folder.file("out"), options);
  const auto out = plain_folder(folder.path() / "out");
  EXPECT_EQ(out.at("fine").bytes.substr(0, 6), std::string("\xff\x7b\x00\x7c\x00\xfc", 6));
  EXPECT_EQ(static_cast<unsigned char>(out.at("fine").bytes[7]) & 0x7c, 0x7c);
  EXPECT_NE(out.at("fine").bytes.substr(6, 2), std::string("\x00\x7c", 2)) << "NaN stays NaN";
  EXPECT_EQ(out.at("large").bytes, std::string("\x00\x7c\x00\xfc\xff\x7b", 6));
}

TEST(WeightFiles, ACheckpointGoesOutAndIsTheSame) {
  TempFolder folder;
  save_sample(formats::system_files(), folder.file("root"), "one", 1);
  save_sample(formats::system_files(), folder.file("root"), "two", 2);
  (void)export_checkpoint(folder.file("root"), folder.file("out"), {}, "one");
  const auto out = plain_folder(folder.path() / "out");
  EXPECT_EQ(out.at("layer.weight").floats(), Sample(1).weights);
  EXPECT_EQ(out.at("mask").dtype, "BOOL");
  EXPECT_TRUE(diff_checkpoints(folder.file("root") + "/one", folder.file("out")).tensors.empty());
  const auto different = diff_checkpoints(folder.file("root"), folder.file("out"));
  ASSERT_EQ(different.tensors.size(), 2u);
  EXPECT_EQ(different.compared, 3);
  const auto& weight = different.tensors[0];
  EXPECT_TRUE(weight.name == "layer.weight" && weight.what == "values" && weight.first == 0 && weight.count == 300 &&
              weight.a == "2" && weight.b == "1");
  const auto& mask = different.tensors[1];
  const auto a = Sample(2).mask, b = Sample(1).mask;
  EXPECT_EQ(mask.first, std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
}

TEST(WeightFiles, DifferencesOfAllKinds) {
  TempFolder folder;
  const auto write = [&](const std::string& name, const PlainTensors& tensors) {
    write_all(folder.file(name), plain_file(tensors));
    return folder.file(name);
  };
  const float nan = std::bit_cast<float>(0x7fc00001u), other_nan = std::bit_cast<float>(0x7fc00002u);
  const auto a = write("a.safetensors", {{"dtype", plain_tensor<float>("F32", {2}, {1, 1.5})},
                                         {"mine", plain_tensor<char>("I8", {1}, {1})},
                                         {"nan", plain_tensor<float>("F32", {2}, {nan, nan})},
                                         {"same", plain_tensor<float>("F32", {1}, {3})},
                                         {"shape", plain_tensor<float>("F32", {2, 1}, {1, 2})},
                                         {"zero", plain_tensor<float>("F32", {3}, {0, 0, 0.1f})}});
  const auto b = write("b.safetensors", {{"dtype", plain_tensor<std::uint16_t>("BF16", {2}, {0x3f80, 0x3fa0})},
                                         {"nan", plain_tensor<float>("F32", {2}, {nan, other_nan})},
                                         {"same", plain_tensor<float>("F32", {1}, {3})},
                                         {"shape", plain_tensor<float>("F32", {2}, {1, 2})},
                                         {"yours", plain_tensor<char>("I8", {1}, {1})},
                                         {"zero", plain_tensor<float>("F32", {3}, {0, -0.0f, 0.2f})}});
  const auto all = diff_checkpoints(a, b).tensors;
  ASSERT_EQ(all.size(), 6u);
  const auto is = [&](std::size_t i, const std::string& name, const std::string& what, std::int64_t count,
                      std::int64_t first, const std::string& x, const std::string& y) {
    EXPECT_TRUE(all[i].name == name && all[i].what == what && all[i].count == count && all[i].first == first &&
                all[i].a == x && all[i].b == y)
        << all[i].name << " " << all[i].what << " " << all[i].count << " " << all[i].first << " " << all[i].a << " "
        << all[i].b;
  };
  is(0, "dtype", "dtype F32 against BF16", 1, 1, "1.5", "1.25");
  is(1, "mine", "only in A", 0, -1, "", "");
  is(2, "nan", "values", 1, 1, "nan", "nan");
  is(3, "shape", "shape [2, 1] against [2]", 0, -1, "", "");
  is(4, "yours", "only in B", 0, -1, "", "");
  is(5, "zero", "values", 2, 1, "0", "-0");
}

// --- what is visible when -----------------------------------------------------------------------

TEST(WeightFiles, NothingIncompleteIsVisible) {
  for (const bool torch : {false, true}) {
    int failed = 0;
    for (int k = 1;; ++k) {
      TempFolder folder(TempFolder::On::Memory);
      const auto out = folder.file("made/out");
      ExportOptions options;
      options.format = torch ? "pt" : "hf";
      options.shard_bytes = 3000;
      FaultyFiles files(FaultyFiles::Fault::Error, k, ENOSPC);
      const auto source = open_safetensors(formats::system_files(), hf_model("hf-bert").string());
      std::string text;
      const int code = code_of([&] { (void)export_weights(files, *source, "bert", out, options); }, &text);
      if (!files.struck()) {
        EXPECT_EQ(code, 0) << text;
        break;
      }
      if (code == 0) continue;  // a size that is asked for to explain an error, a lock
      ++failed;
      EXPECT_EQ(code, static_cast<int>(ExitCode::kIo)) << files.struck_call() << ": " << text;
      // After the rename the files are whole; before it there are none.
      if (fs::exists(out) && !torch) EXPECT_EQ(plain_folder(out), plain_folder(hf_model("hf-bert")));
      if (!fs::exists(out) && fs::exists(folder.path() / "made") && files.struck_call() != "remove_at")
        EXPECT_TRUE(fs::is_empty(folder.path() / "made")) << k << " " << files.struck_call();
    }
    EXPECT_GT(failed, 10);
  }
}

// Killed at every call: what has the name is whole, and else the next export makes it.
TEST(WeightFiles, KilledAtEveryCall) {
  const auto files_in = [](const fs::path& out) {
    std::map<std::string, std::string> all;
    if (fs::is_regular_file(out)) all[""] = file_text(out);
    if (fs::is_directory(out))
      for (const auto& entry : fs::recursive_directory_iterator(out))
        if (entry.is_regular_file()) all[fs::relative(entry.path(), out)] = file_text(entry.path());
    return all;
  };
  const TempFolder run(TempFolder::On::Memory);
  save_sample(formats::system_files(), run.text(), "t", 5);
  for (const std::string format : {"hf", "pt", "universal"}) {
    ExportOptions options;
    options.format = format;
    options.shard_bytes = 3000;
    const auto from = format == "universal" ? run.path() : hf_model("hf-t5");
    const auto write = [&](formats::FsOps& files, const TempFolder& folder) {
      const auto source = open_source(formats::system_files(), from.string());
      (void)export_weights(files, *source, "it", folder.file("made/out"), options);
    };
    const TempFolder undisturbed(TempFolder::On::Memory);
    write(formats::system_files(), undisturbed);
    const auto wanted = files_in(undisturbed.path() / "made" / "out");
    ASSERT_GT(wanted.size(), format == "pt" ? 0u : 2u) << format;
    for (const auto fault : {FaultyFiles::Fault::DieBefore, FaultyFiles::Fault::DieAfter}) {
      const int calls = strike_every_call(
          fault, 0, [](const TempFolder&) {},
          [&](FaultyFiles& files, const TempFolder& folder, int) { write(files, folder); },
          [&](const TempFolder& folder, const std::string& label) {
            const auto made = folder.path() / "made";
            if (fs::exists(made))
              for (const auto& entry : fs::directory_iterator(made)) {
                const auto name = entry.path().filename().string();
                EXPECT_TRUE(name == "out" || name.starts_with(".tmp-")) << label << " leaves " << name;
              }
            if (!fs::exists(made / "out")) write(formats::system_files(), folder);
            EXPECT_TRUE(files_in(made / "out") == wanted) << format << ", " << label;
          });
      EXPECT_GT(calls, 15) << format;
    }
  }
}

TEST(WeightFiles, EverythingIsSyncedBeforeItsName) {
  for (const char* format : {"hf", "pt"}) {
    TempFolder folder;
    ExportOptions options;
    options.format = format;
    options.shard_bytes = 3000;
    OrderWatchingFiles files;
    const auto source = open_safetensors(formats::system_files(), hf_model("hf-t5").string());
    (void)export_weights(files, *source, "t5", folder.file("out"), options);
    EXPECT_EQ(files.renames, 1);
    EXPECT_TRUE(files.faults.empty()) << files.faults[0];
    EXPECT_TRUE(files.unsynced().empty()) << *files.unsynced().begin();
  }
}

TEST(WeightFiles, AnExistingNameIsNotReplaced) {
  TempFolder folder;
  fs::create_directory(folder.path() / "out");
  for (const char* format : {"hf", "pt"}) {
    ExportOptions options;
    options.format = format;
    std::string text;
    EXPECT_EQ(code_of([&] { (void)export_checkpoint(hf_model("hf-t5"), folder.file("out"), options); }, &text),
              static_cast<int>(ExitCode::kConfig));
    EXPECT_NE(text.find("exists"), std::string::npos) << text;
  }
  EXPECT_TRUE(fs::is_empty(folder.path() / "out"));
}

// Every process's writes, as pages.
class PageWatch : public formats::FsOps {
 public:
  std::map<std::string, std::set<std::uint64_t>> pages;  // by path
  int open_write_at(int folder, const char* name) override {
    const int fd = FsOps::open_write_at(folder, name);
    paths_[fd] = name;
    return fd;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    for (auto page = offset / 4096; page <= (offset + bytes - 1) / 4096; ++page) pages[paths_[fd]].insert(page);
    return FsOps::pwrite(fd, data, bytes, offset);
  }

 private:
  std::map<int, std::string> paths_;
};

TEST(WeightFiles, NoPageIsWrittenByTwoProcesses) {
  std::mt19937 random(7);
  constexpr std::size_t kProcesses = 3;
  const std::vector<std::uint64_t> sizes{100000, 50000, 3000, 8192};
  for (int round = 0; round < 30; ++round) {
    TempFolder folder(TempFolder::On::Memory);
    std::vector<std::string> names, contents;
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      names.push_back(std::string(1, static_cast<char>('a' + f)));
      contents.emplace_back();
      for (std::uint64_t i = 0; i < sizes[f]; ++i) contents.back() += static_cast<char>(random());
      write_all(folder.path() / names.back(), std::string(sizes[f], 'z'));
    }
    std::vector<PageWatch> watches(kProcesses);
    std::vector<std::unique_ptr<OutputWriter>> outputs;
    std::vector<PageWriter> writers;
    for (auto& watch : watches) {
      outputs.push_back(std::make_unique<OutputWriter>(watch, folder.text(), names));
      writers.emplace_back(*outputs.back(), static_cast<int>(kProcesses));
    }
    // Ranges of random lengths and owners cover every file; some follow each other on one process.
    for (std::size_t f = 0; f < sizes.size(); ++f)
      for (std::uint64_t at = 0; at < sizes[f];) {
        const std::uint64_t most = random() % 3 == 0 ? 20000 : 700;
        const auto count = std::min<std::uint64_t>(1 + random() % most, sizes[f] - at);
        writers[random() % kProcesses].add(f, at, contents[f].data() + at, count);
        at += count;
      }
    std::vector<std::vector<std::string>> parts;
    for (auto& writer : writers) parts.push_back(writer.finish());
    for (std::size_t from = 0; from < kProcesses; ++from)
      for (std::size_t to = 0; to < kProcesses; ++to) writers[to].take(parts[from][to]);
    for (auto& output : outputs) output->close();
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      EXPECT_EQ(file_text(folder.path() / names[f]), contents[f]);
      for (std::uint64_t page = 0; page * 4096 < sizes[f]; ++page) {
        const auto count = std::count_if(watches.begin(), watches.end(), [&](const PageWatch& watch) {
          const auto found = watch.pages.find(names[f]);
          return found != watch.pages.end() && found->second.contains(page);
        });
        EXPECT_EQ(count, 1) << "page " << page << " of " << names[f];
      }
    }
  }
}

// --- zip ------------------------------------------------------------------------------------------

TEST(WeightFiles, CrcOfZipFiles) {
  EXPECT_EQ(crc32(0, "123456789", 9), 0xcbf43926u);
  const std::string text(100000, 'q');
  for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, text.size()}) {
    const auto first = crc32(0, text.data(), cut), second = crc32(0, text.data() + cut, text.size() - cut);
    EXPECT_EQ(crc32(first, text.data() + cut, text.size() - cut), crc32(0, text.data(), text.size()));
    EXPECT_EQ(crc32_joined(first, second, text.size() - cut), crc32(0, text.data(), text.size()));
  }
}

std::uint64_t number(const std::string& text, std::size_t at, int bytes) {
  std::uint64_t value = 0;
  for (int i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(text[at + static_cast<std::size_t>(i)]);
  return value;
}

// Offsets of APPNOTE.TXT, for records below and above 4 GiB.
TEST(WeightFiles, ZipHeadersHaveEverySize) {
  constexpr std::uint64_t kLarge = 0x123456789a;
  const auto layout = zip_layout({{"a/small", 5}, {"a/large", kLarge}, {"a/after", 7}});
  const auto headers = zip_headers(layout, {1, 2, 3});
  ASSERT_EQ(headers.size(), 4u);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto& [offset, text] = headers[i];
    const auto& record = layout.records[i];
    EXPECT_EQ(text.substr(0, 4), "PK\3\4");
    EXPECT_EQ(number(text, 14, 4), i + 1) << "CRC";
    EXPECT_EQ(number(text, 18, 4), i == 1 ? 0xffffffffu : record.bytes);
    EXPECT_EQ(record.data % 64, 0u);
    EXPECT_EQ(offset + 30 + number(text, 26, 2) + number(text, 28, 2), record.data);
    EXPECT_EQ(text.size(), record.data - offset);
  }
  EXPECT_EQ(number(headers[1].second, 30 + 7, 2), 1u);
  EXPECT_EQ(number(headers[1].second, 30 + 7 + 4, 8), kLarge);
  const auto& [directory, end] = headers[3];
  EXPECT_EQ(directory, layout.records[2].data + 7);
  EXPECT_EQ(directory + end.size(), layout.bytes);
  const auto last = end.size() - 22;
  EXPECT_EQ(end.substr(last, 4), "PK\5\6");
  EXPECT_EQ(number(end, last + 10, 2), 3u);
  EXPECT_EQ(number(end, last + 16, 4), 0xffffffffu);
  EXPECT_EQ(end.substr(last - 20, 4), "PK\6\7");
  const auto zip64 = number(end, last - 20 + 8, 8) - directory;
  EXPECT_EQ(end.substr(zip64, 4), "PK\6\6");
  EXPECT_EQ(number(end, zip64 + 32, 8), 3u);
  EXPECT_EQ(number(end, zip64 + 40, 8), zip64) << "bytes of the directory";
  EXPECT_EQ(number(end, zip64 + 48, 8), directory);
}

}  // namespace
}  // namespace zero::test::weight_files_test
