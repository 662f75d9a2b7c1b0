// Labelled pictures of 32 x 32 pixels: CIFAR-10 from its files, or ten kinds of shapes and textures that are drawn
// here. Independent of libzero, torch and models.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace data {

// Pictures in memory that the object owns or has mapped.
struct Pictures {
  static constexpr std::int64_t kSide = 32, kBytes = 3 * kSide * kSide;

  std::vector<const std::uint8_t*> pixels;  // kBytes for each picture: red, green and blue, each row by row
  std::vector<std::uint8_t> labels;         // 0 to 9
  std::vector<std::shared_ptr<const void>> memory;

  std::int64_t size() const { return static_cast<std::int64_t>(pixels.size()); }
};

struct PictureSets {
  Pictures training, test;
  std::vector<std::string> names;  // of the ten labels
};

// CIFAR-10 from data_batch_1 to data_batch_5 and test_batch in `folder`, or in its cifar-10-batches-py or
// cifar-10-batches-bin: Python's pickles, or with the ending .bin the binary version. Batches may have any number of
// pictures. Names are those of batches.meta, or of batches.meta.txt, if there is one with ten names. Files are mapped,
// so the ranks of a host share their memory; they must not change meanwhile. Throws std::runtime_error that says which
// file is missing, incomplete or of another kind, and where CIFAR-10 is to be had.
PictureSets read_cifar10(const std::string& folder);

// `training` and `test` pictures of ten kinds, each in two random colours with noise; positions, sizes, periods and
// phases are random. The same bytes on every machine: no function is used whose last bits differ. Picture i does not
// depend on how many there are.
PictureSets draw_pictures(std::int64_t training, std::int64_t test);

}  // namespace data
