// A file system that fails, performs half, or kills the process at its k-th call. Implements FsOps on top of the real
// calls.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "formats/files.h"

namespace zero::test {

class FaultyFiles : public formats::FsOps {
 public:
  enum class Fault { None, Error, Short, DieBefore, DieAfter };
  // What happens at call number `at`, counted from 1.
  FaultyFiles(Fault fault, int at, int error = EIO) : fault_(fault), at_(at), error_(error) {}
  int calls() const { return calls_; }
  bool struck() const { return struck_; }
  const std::string& struck_call() const { return struck_call_; }
#define ZERO_FAULTY(name, parameters, arguments)                 \
  int name parameters override {                                 \
    return around(#name, [&] { return FsOps::name arguments; }); \
  }
  ZERO_FAULTY(open_folder, (const char* path), (path))
  ZERO_FAULTY(open_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(open_read_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(open_write_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(create_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(open_lock_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(make_folder, (const char* path), (path))
  ZERO_FAULTY(make_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(set_direct, (int fd, bool direct), (fd, direct))
  ZERO_FAULTY(write_back, (int fd), (fd))
  ZERO_FAULTY(link_at, (int from_folder, const char* from, int folder, const char* name),
              (from_folder, from, folder, name))
  ZERO_FAULTY(fallocate, (int fd, std::uint64_t bytes), (fd, bytes))
  ZERO_FAULTY(truncate, (int fd, std::uint64_t bytes), (fd, bytes))
  ZERO_FAULTY(fdatasync, (int fd), (fd))
  ZERO_FAULTY(fsync, (int fd), (fd))
  ZERO_FAULTY(rename_at, (int folder, const char* from, const char* to), (folder, from, to))
  ZERO_FAULTY(exchange_at, (int folder, const char* a, const char* b), (folder, a, b))
  ZERO_FAULTY(remove_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(remove_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(try_lock, (int fd), (fd))
  ZERO_FAULTY(info, (int fd, formats::FileInfo* out), (fd, out))
  ZERO_FAULTY(info_at, (int folder, const char* name, formats::FileInfo* out), (folder, name, out))
  ZERO_FAULTY(list, (int folder, std::vector<std::string>* names), (folder, names))
  ZERO_FAULTY(free_bytes, (int fd, std::uint64_t* out), (fd, out))
#undef ZERO_FAULTY
  // The descriptor is closed whatever close() returns.
  int close(int fd) override {
    const int result = FsOps::close(fd);
    return around("close", [&] { return result; });
  }
  ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) override {
    return part_of("pread", bytes, [&](std::size_t n) { return FsOps::pread(fd, out, n, offset); });
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    return part_of("pwrite", bytes, [&](std::size_t n) { return FsOps::pwrite(fd, data, n, offset); });
  }

 private:
  bool now(const char* name) {
    if (++calls_ != at_) return false;
    struck_call_ = name;
    struck_ = true;
    return true;
  }
  [[noreturn]] static void die() {
    ::kill(::getpid(), SIGKILL);
    for (;;) ::pause();
  }
  template <class Call>
  int around(const char* name, Call&& call) {
    const bool strike = now(name);
    if (strike && fault_ == Fault::DieBefore) die();
    if (strike && fault_ == Fault::Error) return -error_;
    const int result = call();
    if (strike && fault_ == Fault::DieAfter) die();
    return result;
  }
  template <class Call>
  ssize_t part_of(const char* name, std::size_t bytes, Call&& call) {
    const bool strike = now(name);
    if (strike && fault_ == Fault::Error) return -error_;
    if (strike && fault_ == Fault::Short) return call(bytes > 1 ? bytes / 2 : bytes);
    // A write that is cut by death leaves half of it.
    if (strike && fault_ == Fault::DieBefore && bytes > 1) (void)call(bytes / 2);
    if (strike && fault_ == Fault::DieBefore) die();
    const auto result = call(bytes);
    if (strike && fault_ == Fault::DieAfter) die();
    return result;
  }

  Fault fault_;
  int at_, error_;
  std::atomic<int> calls_{0};  // of several threads
  std::atomic<bool> struck_{false};
  std::string struck_call_;  // set by one thread, read when all have ended
};

// Records what is not on disk yet: files with unsynced bytes, directories with unsynced entries. Every rename is judged
// at the moment it is made: what it makes visible must be durable.
class OrderWatchingFiles : public formats::FsOps {
 public:
  std::vector<std::string> faults;  // texts of what was wrong
  int renames = 0, removals = 0;
  const std::set<std::string>& unsynced() const { return unsynced_; }

  int open_folder(const char* path) override { return known(FsOps::open_folder(path), path); }
  int open_folder_at(int folder, const char* name) override {
    return known(FsOps::open_folder_at(folder, name), under(folder, name));
  }
  int open_lock_at(int folder, const char* name) override { return known(FsOps::open_lock_at(folder, name), "lock"); }
  int make_folder(const char* path) override {
    const int r = FsOps::make_folder(path);
    if (r >= 0) unsynced_.insert(parent_of(path));
    return r;
  }
  int make_folder_at(int folder, const char* name) override {
    unsynced_.insert(paths_[folder]);
    return FsOps::make_folder_at(folder, name);
  }
  int open_write_at(int folder, const char* name) override {
    return known(FsOps::open_write_at(folder, name), under(folder, name));
  }
  int create_at(int folder, const char* name) override {
    unsynced_.insert(paths_[folder]);
    return known(FsOps::create_at(folder, name), under(folder, name));
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    const std::lock_guard lock(mutex_);  // a save writes in several threads
    if (paths_[fd] != "lock") unsynced_.insert(paths_[fd]);
    return FsOps::pwrite(fd, data, bytes, offset);
  }
  int fdatasync(int fd) override {
    unsynced_.erase(paths_[fd]);
    return FsOps::fdatasync(fd);
  }
  int fsync(int fd) override {
    unsynced_.erase(paths_[fd]);
    if (paths_[fd] == renamed_in_) renamed_in_.clear();
    return FsOps::fsync(fd);
  }
  int rename_at(int folder, const char* from, const char* to) override {
    judge("rename", folder, from, to);
    return FsOps::rename_at(folder, from, to);
  }
  int exchange_at(int folder, const char* a, const char* b) override {
    // The probe of two empty directories is none of this.
    if (!std::string(b).ends_with("-probe")) judge("exchange", folder, a, b);
    return FsOps::exchange_at(folder, a, b);
  }
  int remove_at(int folder, const char* name) override {
    // Of the replaced checkpoint: only when the new one and the pointer to it cannot be lost.
    if (paths_[folder].find("/.del-") != std::string::npos) {
      ++removals;
      if (!pointed_) faults.push_back("removing " + under(folder, name) + " before the new checkpoint is durable");
    }
    return FsOps::remove_at(folder, name);
  }

 private:
  static std::string parent_of(const std::string& path) { return path.substr(0, path.find_last_of('/')); }
  std::string under(int folder, const std::string& name) { return paths_[folder] + "/" + name; }
  int known(int fd, const std::string& path) {
    if (fd >= 0) paths_[fd] = path;
    return fd;
  }
  void judge(const std::string& what, int folder, const std::string& from, const std::string& to) {
    ++renames;
    const auto path = under(folder, from);
    for (const auto& open : unsynced_)
      if (open == path || open.starts_with(path + "/"))
        faults.push_back(what + " of " + from + " to " + to + " while " + open + " is not synced");
    if (to == "latest" && !renamed_in_.empty())
      faults.push_back("the pointer moves before the checkpoint's name is durable");
    if (to.starts_with(".del-") && !renamed_in_.empty())
      faults.push_back("the old checkpoint goes before the pointer is durable");
    pointed_ |= to == "latest";
    renamed_in_ = paths_[folder];
    unsynced_.insert(paths_[folder]);
  }

  std::mutex mutex_;
  std::map<int, std::string> paths_;
  std::set<std::string> unsynced_;
  std::string renamed_in_;  // the directory of a rename that no fsync has followed
  bool pointed_ = false;
};

}  // namespace zero::test
