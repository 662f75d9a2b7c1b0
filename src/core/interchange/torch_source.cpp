// See torch_source.h.
#include "interchange/torch_source.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "base/printable.h"
#include "formats/safetensors.h"
#include "interchange/stored_source.h"
#include "interchange/weight_index.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;

constexpr std::size_t kMostRemarks = 1000;

class TorchSource : public StoredSource {
 public:
  TorchSource(formats::Folder folder, const std::string& name, const SourceOptions& options)
      : StoredSource("torch", std::move(folder), options) {
    if (name.ends_with(".index.json"))
      read_index(name);
    else
      (void)read_file(name);
    sort();
  }

 private:
  void read_index(const std::string& name) {
    const auto index = read_weight_index(files_.root(), name);
    for (const auto& [file, claimed] : index.by_file)
      check_claimed(files_.root(), name, file, claimed, read_file(file));
    index.check_total(data_bytes_);
  }

  // Names of all tensors, as stored.
  std::vector<std::string> read_file(const std::string& name) {
    const auto file = files_.add(name);
    const auto one = archive(file);
    if (options_.describe && options_.key.empty() && !one.root().is_dict()) {
      remark(base::printable(pickle::Tree::text_of(one.root().node(), 4000), base::Lines::Escape));
      return {};
    }
    const auto dictionary = chosen(one.root());
    std::vector<std::string> names;
    std::vector<std::string> inner;  // dictionaries that have tensors
    TiedNames seen;
    for (const auto& [key, value] : dictionary.entries()) {
      auto stored = one.tensor(value);
      if (!stored) {
        if (value.is_dict() && has_tensors(one, value)) inner.push_back(key);
        if (remarks().size() < kMostRemarks) remark(base::printable(key + ": " + value.line(), base::Lines::Escape));
        continue;
      }
      names.push_back(key);
      if (const auto* twin = seen.put(key, *stored)) {
        alias(key, *twin);
        continue;
      }
      data_bytes_ += bytes_of(*stored);
      add("weight", key, file, *std::move(stored));
    }
    if (names.empty() && !inner.empty() && !options_.describe) {
      std::string all;
      for (const auto& key : inner) all += (all.empty() ? "" : ", ") + key;
      throw ConfigError("[checkpoint] " + files_.open(file).path() + ": got dictionaries " +
                        base::printable(all, base::Lines::Escape) + ", expected tensors. Hint: --key " +
                        base::printable(inner[0], base::Lines::Escape));
    }
    return names;
  }

  static bool has_tensors(const TorchArchive& one, const PickleView& dictionary) {
    bool found = false;
    dictionary.node().each(
        [&](const pickle::Node&, const pickle::Node& value) { found = found || one.is_tensor(value); });
    return found;
  }

  // The dictionary that options.key names. Keys may hold dots: the longest that is there is taken.
  PickleView chosen(PickleView at) const {
    std::string rest = options_.key;
    while (!rest.empty()) {
      auto end = rest.size();
      while (end != std::string::npos && !(at.is_dict() && at.has(rest.substr(0, end))))
        end = end == 0 ? std::string::npos : rest.rfind('.', end - 1);
      if (end == std::string::npos)
        throw ConfigError(
            "[checkpoint] " + at.path() + ": got the key \"" + options_.key +
            "\", expected one of a dictionary in the file: " + base::printable(at.line(), base::Lines::Escape));
      at = at.at(rest.substr(0, end));
      rest.erase(0, std::min(rest.size(), end + 1));
    }
    if (!at.is_dict())
      at.fail(at.line(), "a dictionary of tensors. Hint: in a program that trusts the file, save model.state_dict()");
    return at;
  }

  static std::uint64_t bytes_of(const StoredTensor& stored) {
    return static_cast<std::uint64_t>(formats::numel_of(stored.shape)) *
           static_cast<std::uint64_t>(formats::bits_of(stored.dtype) / 8);
  }

  std::uint64_t data_bytes_ = 0;
};

}  // namespace

std::unique_ptr<TensorSource> open_torch(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  const std::filesystem::path whole(path);
  const auto parent = whole.parent_path().string();
  return std::make_unique<TorchSource>(formats::Folder::open(fs, parent.empty() ? "." : parent),
                                       whole.filename().string(), options);
}

}  // namespace zero::interchange
