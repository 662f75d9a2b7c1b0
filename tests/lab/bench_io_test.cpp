// `zero bench io` as a user runs it: the table, the document, the comparison with fio, and invalid options.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/process.h"

namespace bench_io_test {
namespace {

using nlohmann::json;
using zero::test::Ended;
using zero::test::Process;
using zero::test::run_to_end;
using zero::test::TempFolder;
namespace fs = std::filesystem;

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";

Ended bench(const std::string& folder, std::vector<std::string> words) {
  std::vector<std::string> arguments{kZero,      "bench", "io",        "--path", folder,     "--size", "32M",
                                     "--rounds", "2",     "--seconds", "0.05",   "--depths", "1,4"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  return run_to_end({arguments, {"COLUMNS=100"}, {}, -1}, 120);
}

TEST(BenchIo, TheDocumentHasEveryCombination) {
  const TempFolder folder(TempFolder::On::Disk);
  for (const std::string io : {"probe", "threads"}) {
    const auto run =
        bench(folder.text(), {"--json", "--block-sizes", "64K,1M", "--io", io, "--threads", io == "probe" ? "1" : "2"});
    ASSERT_EQ(run.code, 0) << run.err;
    const auto document = json::parse(run.out);
    EXPECT_EQ(document["schema"], "zero.bench.io/1");
    EXPECT_EQ(document["size_bytes"], 32 << 20);
    EXPECT_TRUE(document["fio"].is_null());
    if (io == "threads") EXPECT_NE(document["io"].get<std::string>().find("pread/pwrite"), std::string::npos);
    ASSERT_EQ(document["runs"].size(), 12u);
    for (const auto& one : document["runs"]) {
      SCOPED_TRACE(one.dump());
      EXPECT_GT(one["bytes_per_s"]["min"], 0);
      EXPECT_GE(one["bytes_per_s"]["median"], one["bytes_per_s"]["min"]);
      EXPECT_EQ(one["read_bytes_per_s"] > 0, one["pattern"] != "write");
      EXPECT_EQ(one["write_bytes_per_s"] > 0, one["pattern"] != "read");
      EXPECT_FALSE(one.contains("over_fio"));
    }
  }
  EXPECT_TRUE(fs::is_empty(folder.text()));
}

TEST(BenchIo, FioTakesTurnsWithIt) {
  if (std::system("fio --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "no fio here";
  const TempFolder folder(TempFolder::On::Disk);
  const auto run = bench(folder.text(), {"--fio", "--block-sizes", "64K", "--patterns", "read,mixed", "--json"});
  if (run.code == 5 && run.err.find("fio failed") != std::string::npos) GTEST_SKIP() << run.err;  // its io_uring engine
  ASSERT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["fio"].get<std::string>().rfind("fio-", 0), 0u);
  ASSERT_EQ(document["runs"].size(), 4u);
  for (const auto& one : document["runs"]) {
    EXPECT_GT(one["fio_bytes_per_s"]["min"], 0);
    EXPECT_NEAR(one["over_fio"],
                one["bytes_per_s"]["median"].get<double>() / one["fio_bytes_per_s"]["median"].get<double>(), 1e-6);
  }
  EXPECT_TRUE(fs::is_empty(folder.text())) << "fio's file is left";
}

TEST(BenchIo, ATableForPeople) {
  const TempFolder folder(TempFolder::On::Disk);
  const auto run = bench(folder.text(), {"--block-sizes", "64K"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text :
       {"pattern", "GB/s", "mixed", "64.0KiB", "all bytes that were read were the last ones written"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_EQ(run.err, "");
}

TEST(BenchIo, RefusesWhatItCannotMeasure) {
  const TempFolder folder(TempFolder::On::Disk);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--block-sizes", "1000"}, "--block-sizes"},
      {{"--block-sizes", "64k"}, "--block-sizes"},
      {{"--block-sizes", "16M"}, "eighth"},
      {{"--patterns", "read,read"}, "--patterns"},
      {{"--block-sizes", "64K,"}, "--block-sizes"}};
  for (const auto& [words, part] : cases) {
    const auto run = bench(folder.text(), words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(part), std::string::npos) << run.err;
  }
  EXPECT_EQ(bench(folder.text() + "/none", {}).code, 5);
  EXPECT_TRUE(fs::is_empty(folder.text()));
}

}  // namespace
}  // namespace bench_io_test
