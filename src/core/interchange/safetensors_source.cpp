// See safetensors_source.h.
#include "interchange/safetensors_source.h"

#include <algorithm>
#include <filesystem>

#include "base/check.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "interchange/weight_index.h"

namespace zero::interchange {
namespace {
using formats::fail_damaged;

constexpr const char* kOneFile = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kMostInputs = 16;

// The place of a name: the directory that holds it, and the name in it.
struct SplitPath {
  std::string folder, name;
};

SplitPath split_path(const std::string& path) {
  std::filesystem::path whole(path);
  if (!whole.has_filename()) whole = whole.parent_path();
  const auto parent = whole.parent_path().string();
  return {parent.empty() ? "." : parent, whole.filename().string()};
}

class SafetensorsSource : public TensorSource {
 public:
  SafetensorsSource(formats::Folder folder, const std::string& name, bool index, const SourceOptions& options)
      : folder_(std::move(folder)) {
    if (index)
      read_index(name, options.prefix);
    else
      add(name, options.prefix);
    std::sort(tensors_.begin(), tensors_.end(),
              [](const SourceTensor& a, const SourceTensor& b) { return a.name < b.name; });
    find_ties(options.prefix);
  }

  const std::string& format() const override { return format_; }
  const std::vector<SourceTensor>& tensors() const override { return tensors_; }
  const std::map<std::string, std::string>& aliases() const override { return aliases_; }
  const std::optional<SourceProgress>& progress() const override { return progress_; }
  const std::vector<std::string>& remarks() const override { return remarks_; }

  void read(const SourceTensor& tensor, std::int64_t begin, std::int64_t numel, void* out) override {
    const auto found = places_.find(tensor.name);
    ZERO_CHECK(found != places_.end() && begin >= 0 && numel >= 0 && begin + numel <= formats::numel_of(tensor.shape),
               "elements ", begin, " + ", numel, " of ", tensor.name);
    const auto bits = formats::bits_of(tensor.dtype);
    auto& file = files_[found->second.file];
    if (bits % 8 != 0)
      fail_damaged(folder_.path_of(file.name), "tensor " + tensor.name + " has the dtype " + tensor.dtype +
                                                   ", whose elements are not whole bytes and cannot be read. Hint: "
                                                   "dequantise it first");
    const auto width = static_cast<std::uint64_t>(bits / 8), bytes = static_cast<std::uint64_t>(numel) * width;
    const auto& opened = open(file);
    opened.read(out, bytes, found->second.offset + static_cast<std::uint64_t>(begin) * width);
    formats::check_not_replaced(folder_, file.name, opened, file.info);
    if (tensor.dtype == "BOOL") formats::check_bool_bytes(out, bytes, begin, opened.path(), tensor.name);
  }

 private:
  struct Known {
    std::string name;
    formats::FileInfo info;
    std::optional<formats::File> file;  // open
  };
  struct Place {
    std::size_t file;
    std::uint64_t offset;
  };

  const formats::File& open(Known& known) {
    if (known.file) return *known.file;
    if (std::count_if(files_.begin(), files_.end(), [](const Known& one) { return one.file.has_value(); }) >=
        static_cast<std::ptrdiff_t>(kMostInputs))
      for (auto& other : files_) other.file.reset();
    known.file.emplace(folder_.open_file(known.name));
    return *known.file;
  }

  // Reads the header of one more file; returns the names of its tensors, and adds the bytes of its data.
  std::vector<std::string> add(const std::string& name, const std::string& prefix) {
    files_.push_back({name, {}, {}});
    auto& known = files_.back();
    const auto& file = open(known);
    known.info = file.info();
    const auto header = formats::read_header(file);
    std::vector<std::string> names;
    for (const auto& entry : header.tensors) {
      names.push_back(entry.key);
      if (!entry.key.starts_with(prefix) || entry.key.size() == prefix.size())
        throw ConfigError(base::join("[checkpoint] ", file.path(), ": the tensor ", entry.key,
                                     " does not begin with the prefix \"", prefix, "\""));
      const auto own = entry.key.substr(prefix.size());
      if (!places_.emplace(own, Place{files_.size() - 1, header.data_begin + entry.begin}).second)
        fail_damaged(file.path(), "holds the tensor " + entry.key + ", which another file holds as well");
      tensors_.push_back({"weight", own, entry.dtype, entry.shape});
      data_bytes_ += entry.end - entry.begin;
    }
    for (const auto& [key, value] : header.metadata) metadata_[key] = value;
    return names;
  }

  void read_index(const std::string& name, const std::string& prefix) {
    const auto index = read_weight_index(folder_, name);
    for (const auto& [file, claimed] : index.by_file) check_claimed(folder_, name, file, claimed, add(file, prefix));
    index.check_total(data_bytes_);
  }

  void find_ties(const std::string& prefix) {
    const auto own = [&](const std::string& name) {
      return name.starts_with(prefix) ? name.substr(prefix.size()) : "";
    };
    for (const auto& [alias, stored] : metadata_)
      if (places_.contains(own(stored)) && !own(alias).empty() && !places_.contains(own(alias)))
        aliases_[own(alias)] = own(stored);
  }

  formats::Folder folder_;
  std::string format_ = "safetensors";
  std::vector<SourceTensor> tensors_;
  std::map<std::string, std::string> aliases_, metadata_;
  std::optional<SourceProgress> progress_;
  std::vector<std::string> remarks_;
  std::vector<Known> files_;
  std::map<std::string, Place> places_;
  std::uint64_t data_bytes_ = 0;
};

}  // namespace

bool has_safetensors(const formats::Folder& folder) { return folder.exists(kOneFile) || folder.exists(kIndex); }

std::unique_ptr<TensorSource> open_safetensors(formats::FsOps& fs, const std::string& path,
                                               const SourceOptions& options) {
  const auto [parent, name] = split_path(path);
  auto folder = formats::Folder::open(fs, parent);
  const auto info = folder.info_of(name);
  if (info && !info->directory)
    return std::make_unique<SafetensorsSource>(std::move(folder), name, name.ends_with(".index.json"), options);
  auto inner = formats::Folder::open(fs, path);
  const bool one = inner.exists(kOneFile), index = inner.exists(kIndex);
  if (one && index)
    fail_damaged(path, std::string("has both ") + kOneFile + " and " + kIndex + ". Hint: pass the path of one of them");
  if (!one && !index) fail_damaged(path, std::string("has neither ") + kOneFile + " nor " + kIndex);
  return std::make_unique<SafetensorsSource>(std::move(inner), one ? kOneFile : kIndex, index, options);
}

}  // namespace zero::interchange
