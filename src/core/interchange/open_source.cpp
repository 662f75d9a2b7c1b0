// Recognises the kind of given files and opens them: source.h.
#include <filesystem>

#include "base/check.h"
#include "formats/manifest.h"
#include "interchange/dcp_shards.h"
#include "interchange/dcp_source.h"
#include "interchange/deepspeed_source.h"
#include "interchange/native_source.h"
#include "interchange/safetensors_source.h"
#include "interchange/torch_archive.h"
#include "interchange/torch_source.h"
#include "interchange/weight_index.h"

namespace zero::interchange {
namespace {

using formats::fail_damaged;

// Names that Hugging Face gives to files of torch.
constexpr const char* kTorchNames[] = {"pytorch_model.bin.index.json", "pytorch_model.bin"};

// Formats with a directory of checkpoints, from the names in it.
std::unique_ptr<TensorSource> open_folder(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  const auto folder = formats::Folder::open(fs, path);
  if (folder.exists(formats::kManifestName)) return open_native(fs, path, options);
  if (folder.exists(kDcpMetadata)) return open_dcp(fs, path, options);
  if (has_safetensors(folder)) return open_safetensors(fs, path, options);
  if (has_dcp_shards(folder)) return open_dcp(fs, path, options);
  for (const char* const name : kTorchNames)
    if (folder.exists(name)) return open_torch(fs, (std::filesystem::path(path) / name).string(), options);
  // An explicit tag: what it holds says the kind.
  const auto tag = formats::valid_file_name(options.tag) ? folder.info_of(options.tag) : std::nullopt;
  if (tag && tag->directory) {
    const auto inner = folder.folder(options.tag);
    if (inner.exists(kDcpMetadata) || has_dcp_shards(inner)) return open_dcp(fs, folder.path_of(options.tag), options);
    if (!inner.exists(formats::kManifestName)) return open_deepspeed(fs, path, options);
  }
  if (has_deepspeed(folder)) return open_deepspeed(fs, path, options);
  return open_native(fs, path, options);
}

std::unique_ptr<TensorSource> open_file(const formats::Folder& folder, const std::string& name, formats::FsOps& fs,
                                        const std::string& path, const SourceOptions& options) {
  if (is_dcp_shard(name))
    throw ConfigError(
        "[checkpoint] " + path +
        " holds parts of tensors, which other files of its directory complete. Hint: pass the directory.");
  if (name.ends_with(".index.json")) {
    const auto index = read_weight_index(folder, name);
    const bool torch = !index.by_file.empty() && !index.by_file.begin()->first.ends_with(".safetensors");
    return (torch ? open_torch : open_safetensors)(fs, path, options);
  }
  const auto file = folder.open_file(name);
  std::string first(std::min<std::uint64_t>(file.info().bytes, 512), '\0');
  file.read(first.data(), first.size(), 0);
  if (is_old_torch_file(first)) fail_old_torch_file(path);
  if (first.starts_with("PK\x03\x04")) return open_torch(fs, path, options);
  // Length and first character of a safetensors header.
  const auto json = first.size() > 8 ? first.find_first_not_of(" \t\r\n", 8) : std::string::npos;
  if (json != std::string::npos && first[json] == '{') return open_safetensors(fs, path, options);
  fail_damaged(
      path,
      "is neither a safetensors file nor a zip file of torch.save, expected one of them, an index or a directory");
}

}  // namespace

std::string foreign_checkpoints(formats::FsOps& fs, const std::string& path) noexcept try {
  const auto folder = formats::Folder::open(fs, path);
  return folder.exists(kDcpMetadata) || has_dcp_shards(folder) ? "dcp" : has_deepspeed(folder) ? "deepspeed" : "";
} catch (...) {
  return "";
}

std::unique_ptr<TensorSource> open_source(formats::FsOps& fs, const std::string& path, const SourceOptions& options) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) (void)formats::Folder::open(fs, path);  // the error of a missing path
  std::filesystem::path whole(path);
  if (!whole.has_filename()) whole = whole.parent_path();
  const auto parent = whole.parent_path().string();
  const auto folder = formats::Folder::open(fs, parent.empty() ? "." : parent);
  const auto name = whole.filename().string();
  const auto info = folder.info_of(name);
  // A path may lead to a directory by a link; a file must be one itself.
  bool directory = !info || info->directory;
  if (!directory && !info->regular)
    if (const int fd = fs.open_folder(path.c_str()); fd >= 0) directory = fs.close(fd) == 0;
  auto source = directory ? open_folder(fs, path, options) : open_file(folder, name, fs, path, options);
  if (!options.key.empty() && source->format() != "torch")
    throw ConfigError("[checkpoint] " + path + ": got the key \"" + options.key +
                      "\", expected none: it is of the format " + source->format() + ", not a file of torch.save");
  return source;
}

}  // namespace zero::interchange
