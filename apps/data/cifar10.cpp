// CIFAR-10's files (Krizhevsky, "Learning multiple layers of features from tiny images", 2009). See pictures.h.
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string_view>

#include "apps/data/mapped_file.h"
#include "apps/data/pickled_array.h"
#include "apps/data/pictures.h"

namespace data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKind = "CIFAR-10";
constexpr const char* kSource =
    ". Hint: get cifar-10-python.tar.gz or cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and "
    "unpack it";

[[noreturn]] void refuse(const fs::path& path, const std::string& got, const std::string& expected) {
  fail_file(kKind, path.string(), got, expected + kSource);
}

std::shared_ptr<const MappedFile> mapped(const fs::path& path) try {
  return std::make_shared<const MappedFile>(path.string(), kKind);
} catch (const std::runtime_error& error) {
  throw std::runtime_error(error.what() + std::string(kSource));
}

std::string_view bytes_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data()), static_cast<std::size_t>(file.size())};
}

// `path` is for errors.
void add(Pictures& pictures, const fs::path& path, std::int64_t label, const std::uint8_t* pixels) {
  if (label < 0 || label > 9) refuse(path, "label " + std::to_string(label) + " of a picture", "labels from 0 to 9");
  pictures.labels.push_back(static_cast<std::uint8_t>(label));
  pictures.pixels.push_back(pixels);
}

// A label and 32 x 32 x 3 pixels for each picture.
void read_binary(const fs::path& path, Pictures& pictures) {
  const auto file = mapped(path);
  constexpr std::int64_t kRow = 1 + Pictures::kBytes;
  if (file->size() % kRow != 0)
    refuse(path, std::to_string(file->size()) + " bytes",
           "a multiple of 3073: a label and 32 x 32 x 3 pixels for each picture");
  for (std::int64_t at = 0; at < file->size(); at += kRow) add(pictures, path, file->data()[at], file->data() + at + 1);
  pictures.memory.push_back(file);
}

// A pickle with what it refers to.
struct PickleFile {
  explicit PickleFile(const fs::path& path) : file(mapped(path)), tree(bytes_of(*file), limits_of_pictures()) {}
  std::shared_ptr<const MappedFile> file;
  pickle::Tree tree;
  PickledArray pixels;
};

// A dictionary of an array of pixels and a list of labels.
void read_pickle(const fs::path& path, Pictures& pictures) try {
  const auto file = std::make_shared<PickleFile>(path);
  const pickle::Node& batch = file->tree.root();
  const pickle::Node* const data = find_by_text(batch, "data");
  const pickle::Node* const labels = find_by_text(batch, "labels");
  if (!data || !labels) refuse(path, "a pickle without data and labels", "a dictionary with both");
  read_array(*data, file->pixels);
  const auto count = static_cast<std::int64_t>(labels->items.size());
  if (file->pixels.shape != std::vector<std::int64_t>{count, Pictures::kBytes} || !labels->is(pickle::Kind::List))
    refuse(path, "data and labels of other shapes", "an array of uint8 [pictures, 3072] and a list of as many labels");
  const auto* const pixels = reinterpret_cast<const std::uint8_t*>(file->pixels.bytes.data());
  for (std::int64_t i = 0; i < count; ++i) {
    const pickle::Node& label = *labels->items[static_cast<std::size_t>(i)];
    add(pictures, path, label.is(pickle::Kind::Integer) ? label.integer : -1, pixels + i * Pictures::kBytes);
  }
  pictures.memory.push_back(file);
} catch (const pickle::Fault& fault) {
  refuse(path, fault.got, fault.expected);
}

// Ten names, or none if the file is missing or has something else: names are only printed.
std::vector<std::string> names_in(const fs::path& folder, const std::string& ending) {
  std::vector<std::string> names;
  try {
    if (ending.empty()) {
      const PickleFile meta(folder / "batches.meta");
      if (const pickle::Node* const list = find_by_text(meta.tree.root(), "label_names"))
        for (const pickle::Node* const name : list->items)
          if (const pickle::Node* const text = text_in(*name)) names.emplace_back(text->text);
    } else {
      const auto meta = mapped(folder / "batches.meta.txt");
      std::string_view text = bytes_of(*meta);
      while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        std::string name(text.substr(0, end));
        if (name.ends_with('\r')) name.pop_back();
        if (!name.empty()) names.push_back(name);
        text.remove_prefix(std::min(end + 1, text.size()));
      }
    }
  } catch (const std::runtime_error&) {
  }
  const auto printable = [](const std::string& name) {
    return !name.empty() && name.size() <= 40 &&
           std::all_of(name.begin(), name.end(), [](unsigned char c) { return c >= 0x20 && c < 0x7f; });
  };
  if (names.size() != 10 || !std::all_of(names.begin(), names.end(), printable)) names.clear();
  return names;
}

// Each file, with the pictures that it belongs to.
PictureSets read_batches(const fs::path& folder, const std::string& ending) {
  PictureSets sets;
  const auto read = [&](const std::string& name, Pictures& pictures) {
    (ending.empty() ? read_pickle : read_binary)(folder / (name + ending), pictures);
  };
  for (int i = 1; i <= 5; ++i) read("data_batch_" + std::to_string(i), sets.training);
  read("test_batch", sets.test);
  sets.names = names_in(folder, ending);
  if (sets.names.empty())
    sets.names = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"};
  return sets;
}

}  // namespace

PictureSets read_cifar10(const std::string& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    refuse(folder, fs::exists(folder, error) ? "something that is no folder" : "no such folder",
           "a folder with the files of CIFAR-10");
  for (const char* const inner : {"", "cifar-10-batches-py", "cifar-10-batches-bin"})
    for (const char* const ending : {"", ".bin"}) {
      const fs::path place = *inner ? fs::path(folder) / inner : fs::path(folder);
      if (fs::exists(place / (std::string("data_batch_1") + ending), error)) return read_batches(place, ending);
    }
  refuse(folder, "no data_batch_1 and no data_batch_1.bin",
         "data_batch_1 to data_batch_5 and test_batch, or the same with the ending .bin");
}

}  // namespace data
