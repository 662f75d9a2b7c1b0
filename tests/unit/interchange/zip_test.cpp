// The directory of zip files: what torch.save writes is found, and everything that another reader could understand
// differently is refused.
#include "interchange/zip.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "interchange/crc32.h"
#include "support/cifar10_files.h"
#include "support/folder.h"
#include "unit/interchange/source_samples.h"
#include "unit/interchange/zip_samples.h"

namespace zip_test {
namespace {

using zero::formats::File;
using zero::formats::Folder;
using zero::interchange::read_record;
using zero::interchange::read_zip;
using zero::test::TempFolder;
using zero::test::write_file;
using zero::test::ZipSample;

ZipSample sample() {
  ZipSample zip;
  zip.records = {{"a/x", "first"}, {"a/data/y", ""}, {"a/z", "third record"}};
  return zip;
}

// Names and contents, or the error after the file's name.
std::string read_back(const std::string& bytes, std::size_t skip = 0, bool ignore_crc = false) {
  const TempFolder folder(TempFolder::On::Memory);
  write_file(folder.file("f.zip"), bytes);
  try {
    const auto file = Folder::open(zero::formats::system_files(), folder.text()).open_file("f.zip");
    const auto zip = read_zip(file, skip, bytes.size() - skip);
    std::string text = zip.root + ":";
    for (const auto& [name, record] : zip.records)
      text += " " + name + "=" + read_record(file, name, record, 100, ignore_crc);
    return text;
  } catch (const zero::IoError& error) {
    EXPECT_EQ(error.code(), zero::ExitCode::kCheckpoint);
    const std::string text = error.what();
    return text.substr(text.find("f.zip") + 7);
  }
}

constexpr const char* kContents = "a: data/y= x=first z=third record";

TEST(Crc32, OfKnownTexts) {
  EXPECT_EQ(zero::interchange::crc32(0, "123456789", 9), 0xcbf43926u);
  std::string text;
  for (int i = 0; i < 100; ++i) text += static_cast<char>(i * 37);
  EXPECT_EQ(zero::interchange::crc32(0, text.data(), text.size()), zero::test::slow_crc32(text));
  for (std::size_t cut = 0; cut < text.size(); ++cut)
    EXPECT_EQ(zero::interchange::crc32(zero::interchange::crc32(0, text.data(), cut), text.data() + cut, 100 - cut),
              zero::test::slow_crc32(text));
}

TEST(Zip, RecordsAreRangesOfTheFile) {
  for (const bool zip64 : {false, true})
    for (const bool descriptors : {false, true}) {
      auto zip = sample();
      zip.zip64 = zip64;
      zip.descriptors = descriptors;
      EXPECT_EQ(read_back(zip.bytes()), kContents);
      EXPECT_EQ(read_back("before" + zip.bytes(), 6), kContents) << "a range of a file";
    }
}

TEST(Zip, AChangedRecordIsFoundByItsCrc) {
  auto zip = sample();
  zip.records[0].crc_by = 1;
  EXPECT_EQ(read_back(zip.bytes()).substr(0, 51), "the CRC-32 of x (5 bytes at offset 33) is 9271ee57,")
      << read_back(zip.bytes());
  EXPECT_EQ(read_back(zip.bytes(), 0, true), kContents);
}

TEST(Zip, WhatIsNoPlainDirectoryIsRefused) {
  using Change = std::function<void(ZipSample&)>;
  const std::vector<std::pair<const char*, Change>> changes{
      {"compression method 8", [](ZipSample& zip) { zip.records[0].method = 8; }},
      {"an encrypted or unusual record", [](ZipSample& zip) { zip.records[0].flags = 1; }},
      {"another name", [](ZipSample& zip) { zip.records[1].local_name = "a/data/x"; }},
      {"other lengths", [](ZipSample& zip) { zip.records[1].local_name = "a/y"; }},
      {"no local header", [](ZipSample& zip) { zip.records[2].offset_by = 1; }},
      {"a local header at", [](ZipSample& zip) { zip.records[0].offset_by = 200; }},
      {"a local header of other sizes", [](ZipSample& zip) { zip.records[0].size_by = -1; }},
      {"a local header of other sizes", [](ZipSample& zip) { zip.records[2].size_by = 40; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "a/../x"; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "/a/x"; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "a//x"; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "a/x/"; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "a\\x"; }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = std::string("a/\0x", 4); }},
      {"a name", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = ""; }},
      {"in one folder", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "x"; }},
      {"in one folder", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "b/x"; }},
      {"two records", [](ZipSample& zip) { zip.records[0].name = zip.records[0].local_name = "a/z"; }},
  };
  for (const auto& [part, change] : changes)
    for (const bool zip64 : {false, true}) {
      auto zip = sample();
      zip.zip64 = zip64;
      change(zip);
      const auto got = read_back(zip.bytes());
      const std::string wanted = part == std::string("a name") ? "expected a plain name" : part;
      EXPECT_NE(got.find(wanted), std::string::npos) << wanted << ": " << got;
    }
}

// Two records with the same bytes, of which the first claims the second's header as its own.
TEST(Zip, RecordsThatOverlapAreRefused) {
  auto zip = sample();
  zip.descriptors = true;
  zip.records[0].size_by = 20;
  EXPECT_NE(read_back(zip.bytes()).find("bytes of a/x, expected at most"), std::string::npos) << read_back(zip.bytes());
  zip = sample();
  zip.records[2].offset_by = -static_cast<std::int64_t>(30 + 8);
  EXPECT_NE(read_back(zip.bytes()), kContents);
}

TEST(Zip, EndRecordsMustAgree) {
  const auto plain = sample().bytes();
  auto zip = sample();
  zip.zip64 = true;
  const auto wide = zip.bytes();
  const auto patched = [](std::string bytes, std::size_t from_end, std::uint64_t value, int size) {
    return bytes.replace(bytes.size() - from_end, static_cast<std::size_t>(size), zero::test::little(value, size));
  };
  EXPECT_NE(read_back(plain + "x").find("no end record"), std::string::npos);
  EXPECT_NE(read_back(patched(plain, 2, 1, 2) + "x").find("no end record"), std::string::npos) << "a comment";
  EXPECT_NE(read_back("x" + plain).find("expected one that ends at"), std::string::npos) << "bytes before it";
  EXPECT_NE(read_back(patched(plain, 18, 1, 2)).find("split archive"), std::string::npos);
  EXPECT_NE(read_back(patched(plain, 14, 2, 2)).find("two numbers of records"), std::string::npos);
  EXPECT_NE(read_back(patched(patched(plain, 14, 2, 2), 12, 2, 2)).find("bytes after the last record"),
            std::string::npos);
  EXPECT_NE(read_back(patched(patched(plain, 14, 4, 2), 12, 4, 2)), kContents);
  EXPECT_NE(read_back(patched(patched(plain, 14, 60000, 2), 12, 60000, 2)).find("60000 records in"), std::string::npos);
  EXPECT_NE(read_back(patched(plain, 10, 0x7fffffff, 4)).find("a directory of 2147483647 bytes"), std::string::npos);
  EXPECT_NE(read_back(patched(plain, 6, 3, 4)).find("a directory of"), std::string::npos);
  // zip64: the locator, and each number of its record, which the short record repeats.
  EXPECT_EQ(read_back(patched(wide, 14, 0xffff, 2)),
            "offset " + std::to_string(wide.size() - 22) + " has two numbers of records, expected one");
  EXPECT_EQ(read_back(patched(patched(wide, 14, 0xffff, 2), 12, 0xffff, 2)), kContents) << "no room in the short one";
  EXPECT_EQ(read_back(patched(wide, 6, 0xffffffff, 4)), kContents);
  EXPECT_NE(read_back(patched(wide, 22 + 12, 1, 8)).find("a zip64 end record at 1"), std::string::npos);
  for (const std::size_t field : {8u, 16u, 24u, 32u})
    for (const std::uint64_t lie : {std::uint64_t{0}, std::uint64_t{1} << 40, ~std::uint64_t{0}})
      EXPECT_NE(read_back(patched(wide, 22 + 20 + field, lie, 8)), kContents) << field;
}

TEST(Zip, EveryLengthIsRefused) {
  auto zip = sample();
  zip.zip64 = true;
  const auto whole = zip.bytes();
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(read_back(whole.substr(0, size)), kContents) << size;
}

}  // namespace
}  // namespace zip_test
