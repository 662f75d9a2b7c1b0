// A folder in memory, with folders in it, which can only be read. For targets whose input is several files.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "formats/files.h"

namespace zero::test {

class MemoryFiles : public formats::FsOps {
 public:
  std::map<std::string, std::string> files;  // contents by path

  int open_folder(const char*) override { return opened(""); }
  int open_folder_at(int folder, const char* name) override {
    const auto path = path_of(folder, name) + "/";
    return is_folder(path) ? opened(path) : -ENOENT;
  }
  int open_read_at(int folder, const char* name) override {
    const auto path = path_of(folder, name);
    return files.contains(path) ? opened(path) : is_folder(path + "/") ? -EISDIR : -ENOENT;
  }
  int close(int) override { return 0; }
  ssize_t pread(int fd, void* out, std::size_t count, std::uint64_t offset) override {
    const auto& bytes = files.at(opened_[static_cast<std::size_t>(fd - kFirst)]);
    if (offset >= bytes.size()) return 0;
    const auto some = std::min<std::size_t>(count, bytes.size() - offset);
    std::memcpy(out, bytes.data() + offset, some);
    return static_cast<ssize_t>(some);
  }
  int set_direct(int, bool direct) override { return direct ? -EINVAL : 0; }
  void read_ahead(int, std::size_t, std::uint64_t) override {}
  int info(int fd, formats::FileInfo* out) override {
    return info_of(opened_[static_cast<std::size_t>(fd - kFirst)], out);
  }
  int info_at(int folder, const char* name, formats::FileInfo* out) override {
    const auto path = path_of(folder, name);
    return info_of(files.contains(path) ? path : path + "/", out);
  }
  int list(int folder, std::vector<std::string>* names) override {
    const auto& prefix = opened_[static_cast<std::size_t>(folder - kFirst)];
    for (const auto& [path, bytes] : files) {
      if (!path.starts_with(prefix)) continue;
      auto name = path.substr(prefix.size(), path.find('/', prefix.size()) - prefix.size());
      if (names->empty() || names->back() != name) names->push_back(std::move(name));
    }
    return 0;
  }

 private:
  static constexpr int kFirst = 1 << 20;  // numbers that are no descriptors of the system

  int opened(std::string path) {
    opened_.push_back(std::move(path));
    return kFirst + static_cast<int>(opened_.size()) - 1;
  }
  std::string path_of(int folder, const char* name) const {
    return opened_[static_cast<std::size_t>(folder - kFirst)] + name;
  }
  // `path`: of a folder, with a slash at its end, or "".
  bool is_folder(const std::string& path) const {
    const auto next = files.lower_bound(path);
    return path.empty() || (next != files.end() && next->first.starts_with(path));
  }
  int info_of(const std::string& path, formats::FileInfo* out) const {
    *out = {};
    const auto file = files.find(path);
    out->regular = file != files.end();
    out->directory = !out->regular && is_folder(path);
    if (out->regular) out->bytes = file->second.size();
    return out->regular || out->directory ? 0 : -ENOENT;
  }

  std::vector<std::string> opened_;  // folders end with a slash
};

}  // namespace zero::test
