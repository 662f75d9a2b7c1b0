// See output_files.h.
#include "interchange/output_files.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/printable.h"
#include "formats/hash.h"
#include "formats/manifest.h"

namespace zero::interchange {
namespace {

constexpr std::size_t kMostOutputs = 16;
constexpr std::size_t kDirectFrom = std::size_t{256} << 10, kDirectChunk = std::size_t{4} << 20;

std::filesystem::path without_slash(const std::string& path) {
  const std::filesystem::path whole(path);
  return whole.has_filename() ? whole : whole.parent_path();
}

std::string parent_of(const std::filesystem::path& path) {
  const auto parent = path.parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

OutputWriter::OutputWriter(formats::FsOps& fs, const std::string& folder, std::vector<std::string> names)
    : fs_(fs), folder_(folder), names_(std::move(names)) {}

void OutputWriter::write(std::size_t file, std::uint64_t offset, const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  auto found = std::find_if(open_.begin(), open_.end(), [&](const Open& one) { return one.index == file; });
  if (found == open_.end()) {
    if (open_.size() >= kMostOutputs) close();
    const std::filesystem::path path = std::filesystem::path(folder_) / names_[file];
    open_.push_back(
        {file, formats::Folder::open(fs_, path.parent_path().string()).open_to_write(path.filename().string())});
    found = open_.end() - 1;
  }
  auto& to = found->file;
  const auto* from = static_cast<const char*>(data);
  // Many whole pages bypass the page cache: it would give up other files for them, and is slow where memory is limited.
  if (offset % formats::kDirectAlignment == 0 && bytes >= kDirectFrom && to.set_direct(true)) {
    if (!buffer_) buffer_ = formats::aligned_memory(kDirectChunk);
    while (bytes >= formats::kDirectAlignment) {
      const auto count = std::min(bytes / formats::kDirectAlignment * formats::kDirectAlignment, kDirectChunk);
      std::memcpy(buffer_.get(), from, count);
      to.write(buffer_.get(), count, offset);
      from += count;
      offset += count;
      bytes -= count;
    }
    (void)to.set_direct(false);
  }
  to.write(from, bytes, offset);
}

void OutputWriter::close() {
  auto files = std::move(open_);
  open_.clear();
  for (auto& [index, file] : files) {
    file.sync();
    file.close();
  }
}

void create_out_file(const formats::Folder& folder, const std::string& name, const OutFile& file) {
  auto made = folder.create(name);
  made.reserve(file.bytes);
  if (made.info().bytes < file.bytes)  // the file system cannot reserve
    if (const int r = folder.fs().truncate(made.fd(), file.bytes); r < 0)
      formats::fail_io(made.path(), "setting the size", -r);
  for (const auto& [offset, text] : file.fixed) made.write(text.data(), text.size(), offset);
  made.sync();
  made.close();
}

OutputFiles::OutputFiles(formats::FsOps& fs, const std::string& path, Kind kind, const char* where, bool replace)
    : parent_([&] {
        if (path.empty()) throw ConfigError(std::string(where) + " got an empty path");
        return formats::Folder::make(fs, parent_of(without_slash(path)));
      }()),
      name_(without_slash(path).filename().string()),
      temporary_(".tmp-" + formats::random_id()),
      kind_(kind),
      replace_(replace) {
  if (name_ == "." || name_ == "..")
    throw ConfigError(std::string(where) + " got the path " + base::printable(path) + ", expected one with a name");
  if (const auto old = parent_.info_of(name_); old && !(replace_ && old->regular))
    throw ConfigError(std::string(where) + " " + base::printable(path) +
                      " exists. Hint: remove it, or choose another name.");
  if (kind_ == Kind::Folder) parent_.make_folder(temporary_);
  ours_ = true;
}

OutputFiles::~OutputFiles() {
  if (ours_) (void)parent_.remove_all(temporary_);
}

std::string OutputFiles::folder() const { return kind_ == Kind::Folder ? parent_.path_of(temporary_) : parent_.path(); }

void OutputFiles::make_folders(const std::string& name) {
  for (auto slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
    const auto inner = name.substr(0, slash);
    if (std::find(folders_.begin(), folders_.end(), inner) != folders_.end()) continue;
    const std::filesystem::path path(inner);
    formats::Folder::open(parent_.fs(), (std::filesystem::path(folder()) / path.parent_path()).string())
        .make_folder(path.filename().string());
    folders_.push_back(inner);
  }
}

void OutputFiles::create(const std::vector<OutFile>& files) {
  for (const auto& file : files) {
    make_folders(file.name);
    names_.push_back(kind_ == Kind::Folder ? file.name : temporary_);
    const std::filesystem::path path = std::filesystem::path(folder()) / names_.back();
    create_out_file(formats::Folder::open(parent_.fs(), path.parent_path().string()), path.filename().string(), file);
  }
}

void OutputFiles::commit() {
  if (kind_ == Kind::Folder) {
    for (auto inner = folders_.rbegin(); inner != folders_.rend(); ++inner)
      formats::Folder::open(parent_.fs(), folder() + "/" + *inner).sync();
    parent_.folder(temporary_).sync();
  }
  if (!replace_ && parent_.exists(name_))
    throw IoError("[export] " + parent_.path_of(name_) + " was made by another meanwhile");
  parent_.rename(temporary_, name_);
  ours_ = false;
  parent_.sync();
}

}  // namespace zero::interchange
