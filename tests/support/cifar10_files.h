// CIFAR-10's files in both versions, for tests: written byte by byte, with nothing of the code that reads them.
#pragma once
#include <array>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace zero::test {

struct Cifar10Batch {
  std::vector<std::string> pixels;  // 3072 bytes each
  std::vector<int> labels;
};

// `count` pictures of pseudo-random bytes and labels; batches with other numbers differ.
inline Cifar10Batch cifar10_batch(int count, std::uint32_t number) {
  Cifar10Batch batch;
  std::uint32_t state = number * 7919 + 1;
  const auto next = [&state] { return (state = state * 1664525u + 1013904223u) >> 24; };
  for (int i = 0; i < count; ++i) {
    std::string pixels(3072, '\0');
    for (char& byte : pixels) byte = static_cast<char>(next());
    batch.pixels.push_back(pixels);
    batch.labels.push_back(static_cast<int>(next() % 10));
  }
  return batch;
}

inline std::string binary_of(const Cifar10Batch& batch) {
  std::string bytes;
  for (std::size_t i = 0; i < batch.labels.size(); ++i) bytes += static_cast<char>(batch.labels[i]) + batch.pixels[i];
  return bytes;
}

inline std::string little_endian(std::size_t value, int size) {
  std::string bytes;
  for (int i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

// As Python 2's cPickle with protocol 2 wrote data_batch_1 and the others.
inline std::string pickle_of(const Cifar10Batch& batch) {
  using namespace std::string_literals;
  std::string pixels, labels, names;
  for (std::size_t i = 0; i < batch.labels.size(); ++i) {
    pixels += batch.pixels[i];
    labels += "K"s + static_cast<char>(batch.labels[i]);
    names += "U\x05"s + "a.png" + "r" + little_endian(24 + i, 4);
  }
  const std::size_t count = batch.labels.size();
  return "\x80\x02}q\x01(U\x0b"s + "batch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(" + labels +
         "eU\x04" + "dataq\x06" + "cnumpy.core.multiarray\n_reconstruct\nq\x07" +
         "cnumpy\nndarray\nq\x08K\0\x85q\tU\x01"s + "bq\n\x87q\x0bRq\x0c(K\x01M"s + little_endian(count, 2) +
         "M\x00\x0c\x86q\rcnumpy\ndtype\nq\x0eU\x02u1q\x0fK\0K\x01"s +
         "\x87q\x10Rq\x11(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tq\x13"s + "b\x89T"s +
         little_endian(pixels.size(), 4) + pixels + "q\x14tq\x15" + "bU\tfilenamesq\x16]q\x17(" + names + "eu.";
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline constexpr std::array<const char*, 6> kCifar10Names = {"data_batch_1", "data_batch_2", "data_batch_3",
                                                             "data_batch_4", "data_batch_5", "test_batch"};

// The six files: `training` pictures in each of the first five, cifar10_batch(training, 1) to (.., 5), and
// cifar10_batch(test, 6).
inline void write_cifar10(const std::string& folder, bool pickles, int training, int test) {
  for (std::uint32_t i = 0; i < 6; ++i) {
    const auto batch = cifar10_batch(i < 5 ? training : test, i + 1);
    write_file(folder + "/" + kCifar10Names[i] + (pickles ? "" : ".bin"),
               pickles ? pickle_of(batch) : binary_of(batch));
  }
}

}  // namespace zero::test
