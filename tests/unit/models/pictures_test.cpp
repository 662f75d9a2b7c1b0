// CIFAR-10's files, what is refused of them, and the pictures that are drawn instead.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>

#include "apps/data/pickled_array.h"
#include "apps/data/pictures.h"
#include "support/cifar10_files.h"
#include "support/folder.h"

namespace pictures_test {
namespace {

using data::PictureSets;
using zero::test::cifar10_batch;
using zero::test::Cifar10Batch;
using zero::test::TempFolder;
using zero::test::write_cifar10;
using zero::test::write_file;
using namespace std::string_literals;

std::string error_of(const std::string& folder) {
  try {
    data::read_cifar10(folder);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// Of an array, or of a dictionary of one.
std::string pickle_error(const std::string& bytes) {
  try {
    const pickle::Tree tree(bytes, data::limits_of_pictures());
    data::PickledArray array;
    const auto* const inner = tree.root().find("data");
    data::read_array(inner ? *inner : tree.root(), array);
  } catch (const pickle::Fault& fault) {
    return fault.what();
  }
  return "";
}

void expect_pictures(const data::Pictures& got, const std::vector<Cifar10Batch>& batches) {
  std::size_t at = 0;
  for (const auto& batch : batches)
    for (std::size_t i = 0; i < batch.labels.size(); ++i, ++at) {
      ASSERT_LT(at, got.pixels.size());
      EXPECT_EQ(got.labels[at], batch.labels[i]);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(got.pixels[at]), 3072), batch.pixels[i]);
    }
  EXPECT_EQ(got.size(), static_cast<std::int64_t>(at));
  EXPECT_EQ(got.labels.size(), at);
}

void expect_sets(const PictureSets& sets, int training, int test) {
  std::vector<Cifar10Batch> batches;
  for (std::uint32_t i = 1; i <= 5; ++i) batches.push_back(cifar10_batch(training, i));
  expect_pictures(sets.training, batches);
  expect_pictures(sets.test, {cifar10_batch(test, 6)});
}

TEST(Cifar10, BothVersionsAreReadWhereverTheyWereUnpacked) {
  for (const bool pickles : {false, true})
    for (const char* const inner : {"", "cifar-10-batches-py", "cifar-10-batches-bin"}) {
      const TempFolder folder;
      std::filesystem::create_directories(folder.path() / inner);
      write_cifar10((folder.path() / inner).string(), pickles, 7, 3);
      const auto sets = data::read_cifar10(folder.text());
      expect_sets(sets, 7, 3);
      EXPECT_EQ(sets.names, (std::vector<std::string>{"airplane", "automobile", "bird", "cat", "deer", "dog", "frog",
                                                      "horse", "ship", "truck"}));
    }
}

// What a process has mapped is still there when the folder is not.
TEST(Cifar10, PixelsOutliveTheFiles) {
  data::PictureSets sets;
  {
    const TempFolder folder;
    write_cifar10(folder.text(), true, 4, 2);
    sets = data::read_cifar10(folder.text());
  }
  expect_sets(sets, 4, 2);
}

TEST(Cifar10, NamesAreThoseOfTheMetaFile) {
  const std::vector<std::string> names{"a0", "b1", "c2", "d3", "e4", "f5", "g6", "h7", "i8", "j9"};
  std::string text, list;
  for (const auto& name : names) {
    text += name + "\n";
    list += "U\x02" + name;
  }
  {
    const TempFolder folder;
    write_cifar10(folder.text(), false, 1, 1);
    write_file(folder.file("batches.meta.txt"), text + "\n");
    EXPECT_EQ(data::read_cifar10(folder.text()).names, names);
    write_file(folder.file("batches.meta.txt"), text + "k10\n");
    EXPECT_EQ(data::read_cifar10(folder.text()).names[0], "airplane") << "eleven names";
    write_file(folder.file("batches.meta.txt"), "\x1b[2Jx" + text.substr(2));
    EXPECT_EQ(data::read_cifar10(folder.text()).names[0], "airplane") << "a name that commands the terminal";
  }
  const TempFolder folder;
  write_cifar10(folder.text(), true, 1, 1);
  write_file(folder.file("batches.meta"), "\x80\x02}(U\x0blabel_names](" + list + "eU\x07num_visM\x00\x0cu."s);
  EXPECT_EQ(data::read_cifar10(folder.text()).names, names);
  write_file(folder.file("batches.meta"), "something else");
  EXPECT_EQ(data::read_cifar10(folder.text()).names[0], "airplane");
}

TEST(Cifar10, WhatIsMissingIsSaidWithWhereToGetIt) {
  const std::string source =
      ". Hint: get cifar-10-python.tar.gz or cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "
      "and unpack it";
  const TempFolder folder;
  EXPECT_EQ(error_of(folder.file("none")), "[CIFAR-10 " + folder.file("none") +
                                               "] got no such folder, expected a folder with the files of CIFAR-10" +
                                               source);
  write_file(folder.file("file"), "x");
  EXPECT_EQ(error_of(folder.file("file")),
            "[CIFAR-10 " + folder.file("file") +
                "] got something that is no folder, expected a folder with the files of CIFAR-10" + source);
  EXPECT_EQ(
      error_of(folder.text()),
      "[CIFAR-10 " + folder.text() +
          "] got no data_batch_1 and no data_batch_1.bin, expected data_batch_1 to data_batch_5 and test_batch, or the "
          "same with the ending .bin" +
          source);
  for (const bool pickles : {false, true}) {
    const TempFolder parts;
    write_cifar10(parts.text(), pickles, 1, 1);
    for (const char* const missing : {"data_batch_4", "test_batch"}) {
      const std::string file = parts.file(std::string(missing) + (pickles ? "" : ".bin"));
      std::filesystem::rename(file, parts.file("away"));
      EXPECT_EQ(error_of(parts.text()),
                "[CIFAR-10 " + file + "] got No such file or directory, expected a readable CIFAR-10 file" + source);
      std::filesystem::create_directory(file);
      EXPECT_EQ(error_of(parts.text()), "[CIFAR-10 " + file + "] got a directory, expected a CIFAR-10 file" + source);
      std::filesystem::remove(file);
      write_file(file, "");
      EXPECT_EQ(error_of(parts.text()), "[CIFAR-10 " + file + "] got an empty file, expected CIFAR-10" + source);
      std::filesystem::rename(parts.file("away"), file);
    }
    EXPECT_EQ(error_of(parts.text()), "");
  }
}

TEST(Cifar10, AWrongBinaryFileIsRefused) {
  const TempFolder folder;
  write_cifar10(folder.text(), false, 3, 1);
  const std::string file = folder.file("data_batch_2.bin"), good = binary_of(cifar10_batch(3, 2));
  for (const std::size_t size : {good.size() - 1, good.size() + 1, std::size_t{3072}, std::size_t{1}}) {
    write_file(file, (good + good).substr(0, size));
    EXPECT_TRUE(error_of(folder.text())
                    .starts_with(
                        "[CIFAR-10 " + file + "] got " + std::to_string(size) +
                        " bytes, expected a multiple of 3073: a label and 32 x 32 x 3 pixels for each picture. Hint: "))
        << error_of(folder.text());
  }
  for (const int label : {10, 255}) {
    auto batch = cifar10_batch(3, 2);
    batch.labels[2] = label;
    write_file(file, binary_of(batch));
    EXPECT_TRUE(error_of(folder.text())
                    .starts_with("[CIFAR-10 " + file + "] got label " + std::to_string(label) +
                                 " of a picture, expected labels from 0 to 9. Hint: "))
        << error_of(folder.text());
  }
}

TEST(Cifar10, AWrongPickleIsRefused) {
  const TempFolder folder;
  write_cifar10(folder.text(), true, 3, 1);
  const std::string file = folder.file("data_batch_5"), good = pickle_of(cifar10_batch(3, 5));
  const auto expect = [&](const std::string& bytes, const std::string& start) {
    write_file(file, bytes);
    EXPECT_TRUE(error_of(folder.text()).starts_with("[CIFAR-10 " + file + "] got " + start)) << error_of(folder.text());
    EXPECT_TRUE(error_of(folder.text()).ends_with(" and unpack it")) << error_of(folder.text());
  };
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string bytes = good;
    const auto at = bytes.find(old);
    EXPECT_NE(at, std::string::npos) << old;
    return bytes.replace(at, old.size(), now);
  };
  for (const int protocol : {3, 4, 5})
    expect(with("\x80\x02", "\x80"s + static_cast<char>(protocol)),
           "protocol " + std::to_string(protocol) + " at byte 1, expected a pickle of protocol 2");
  expect("(dp1\nS'data'\n.", "no pickle at byte 0, expected a pickle of protocol 2");
  expect(good.substr(0, good.size() / 2), "the end of the file at byte " + std::to_string(good.size() / 2) +
                                              ", expected more bytes: the file is incomplete");
  expect(good + "x", "1 bytes after the end at byte " + std::to_string(good.size()) + ", expected the end of the file");
  auto labels = cifar10_batch(3, 5);
  labels.labels[1] = 10;
  expect(pickle_of(labels), "label 10 of a picture, expected labels from 0 to 9");
  expect(with("labelsq", "lablesq"), "a pickle without data and labels, expected a dictionary with both");
  expect(with("U\x06labelsq\x04]q\x05(", "U\x06labelsq\x04]q\x05(K\x01"s),
         "data and labels of other shapes, expected an array of uint8 [pictures, 3072] and a list of as many labels");
  expect(with("M\x03\0M\0\x0c\x86"s, "M\0\x0cM\x03\0\x86"s), "data and labels of other shapes, ");
  expect(with("M\x03\0M\0\x0c\x86"s, "M\x02\0M\0\x0c\x86"s), "an array of 9216 bytes with another shape at byte ");
  expect(with("U\x02u1", "U\x02i4"), "an array of i4 at byte ");
  expect(with("b\x89T", "b\x88T"), "an array in another form at byte ");
}

// A pickle may call any function. None is called, whatever the bytes.
TEST(PickledArray, OnlyArraysOfBytesAreRead) {
  const std::string array = ", expected a numpy array of uint8";
  const std::string readable = ", expected numbers, texts, lists, dictionaries and numpy arrays of uint8";
  EXPECT_EQ(pickle_error("\x80\x02"
                         "cposix\nsystem\nU\x02ls\x85R."s),
            "[pickle] got posix.system(2 bytes) at byte 21" + array);
  EXPECT_EQ(pickle_error("\x80\x02"
                         "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n)N\x87RK\x01"
                         "b."s),
            "[pickle] got numpy.core.multiarray._reconstruct(numpy.ndarray, (), None) with 1 at byte 56" + array);
  std::string good = pickle_of(cifar10_batch(1, 1));
  EXPECT_EQ(pickle_error(good), "");
  good.replace(good.find("U\x02u1"), 4, "U\x02O8");
  EXPECT_EQ(pickle_error(good).substr(0, 40), "[pickle] got an array of O8 at byte 182" + readable.substr(0, 1));
  EXPECT_EQ(pickle_error("\x80\x02" + std::string(1100000, 'N') + "."s),
            "[pickle] got more than 1000000 opcodes at byte 1000002" + readable);
}

// Python 3 writes bytes for Python 2 as a text and a call that encodes it.
TEST(PickledArray, BytesAsText) {
  const pickle::Tree tree(
      "\x80\x02"
      "cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\n)N\x87R"
      "(K\x01K\x04\x85"
      "cnumpy\ndtype\nX\x02\0\0\0u1\x89\x88\x87R\x89"
      "c_codecs\nencode\nX\x06\0\0\0\xc3\xa9xy\xc2\x80X\x06\0\0\0latin1\x86Rtb."s,
      data::limits_of_pictures());
  data::PickledArray array;
  data::read_array(tree.root(), array);
  EXPECT_EQ(array.bytes, "\xe9xy\x80");
  EXPECT_EQ(array.shape, std::vector<std::int64_t>{4});
}

// Every cut and every changed byte of a small file is read or refused, and neither crashes nor hangs.
TEST(PickledArray, DamagedBytesAreReadOrRefused) {
  const std::string good = pickle_of(cifar10_batch(1, 1));
  EXPECT_EQ(pickle_error(good), "");
  const std::size_t pixels = good.find("\x89T");
  int refused = 0;
  for (std::size_t at = 0; at < good.size(); ++at) {
    if (at > pixels + 8 && at + 60 < good.size() && at % 97 != 0) continue;
    EXPECT_NE(pickle_error(good.substr(0, at)), "") << at;
    for (int value = 0; value < 256; ++value) {
      std::string bytes = good;
      bytes[at] = static_cast<char>(value);
      refused += !pickle_error(bytes).empty();
    }
  }
  EXPECT_GT(refused, 10000);
}

TEST(DrawnPictures, AreTheSameWhereverTheyAreDrawn) {
  const auto some = data::draw_pictures(50, 20), more = data::draw_pictures(400, 100);
  ASSERT_EQ(some.training.size(), 50);
  ASSERT_EQ(more.test.size(), 100);
  EXPECT_EQ(some.names.size(), 10u);
  std::set<std::string> all;
  std::array<int, 10> classes{};
  for (std::size_t i = 0; i < 400; ++i) {
    const auto* const pixels = more.training.pixels[i];
    ++classes[more.training.labels[i]];
    all.insert(std::string(reinterpret_cast<const char*>(pixels), data::Pictures::kBytes));
    if (i < 50) {
      EXPECT_EQ(some.training.labels[i], more.training.labels[i]);
      EXPECT_TRUE(std::equal(pixels, pixels + data::Pictures::kBytes, some.training.pixels[i]));
    }
  }
  for (const auto* const pixels : more.test.pixels)
    all.insert(std::string(reinterpret_cast<const char*>(pixels), data::Pictures::kBytes));
  EXPECT_EQ(all.size(), 500u) << "test pictures are others";
  for (const int count : classes) EXPECT_GT(count, 15);
  // FNV-1a of the first hundred: the same with every compiler and on every processor.
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < 100; ++i)
    for (std::int64_t b = 0; b < data::Pictures::kBytes; ++b) hash = (hash ^ more.test.pixels[i][b]) * 0x100000001b3u;
  EXPECT_EQ(hash, 7397738698632304154u);
}

}  // namespace
}  // namespace pictures_test
