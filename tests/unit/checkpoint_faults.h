// A file system that does something at its k-th call: fails, does half, dies. The seam is FsOps; the
// real calls are made underneath.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>

#include "checkpoint/format_files.h"

namespace zero::test {

class FaultyFiles : public checkpoint::FsOps {
 public:
  enum class Fault { None, Error, Short, DieBefore, DieAfter };
  // What happens at call number `at`, counted from 1.
  FaultyFiles(Fault fault, int at, int error = EIO) : fault_(fault), at_(at), error_(error) {}
  int calls() const { return calls_; }
  bool struck() const { return struck_; }
  const std::string& struck_call() const { return struck_call_; }

#define ZERO_FAULTY(name, parameters, arguments) \
  int name parameters override { return around(#name, [&] { return FsOps::name arguments; }); }
  ZERO_FAULTY(open_folder, (const char* path), (path))
  ZERO_FAULTY(open_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(open_read_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(create_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(open_lock_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(make_folder, (const char* path), (path))
  ZERO_FAULTY(make_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(fallocate, (int fd, std::uint64_t bytes), (fd, bytes))
  ZERO_FAULTY(truncate, (int fd, std::uint64_t bytes), (fd, bytes))
  ZERO_FAULTY(fdatasync, (int fd), (fd))
  ZERO_FAULTY(fsync, (int fd), (fd))
  ZERO_FAULTY(rename_at, (int folder, const char* from, const char* to), (folder, from, to))
  ZERO_FAULTY(exchange_at, (int folder, const char* a, const char* b), (folder, a, b))
  ZERO_FAULTY(remove_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(remove_folder_at, (int folder, const char* name), (folder, name))
  ZERO_FAULTY(try_lock, (int fd), (fd))
  ZERO_FAULTY(info, (int fd, checkpoint::FileInfo* out), (fd, out))
  ZERO_FAULTY(info_at, (int folder, const char* name, checkpoint::FileInfo* out), (folder, name, out))
  ZERO_FAULTY(list, (int folder, std::vector<std::string>* names), (folder, names))
  ZERO_FAULTY(free_bytes, (int fd, std::uint64_t* out), (fd, out))
#undef ZERO_FAULTY
  // The descriptor is gone whatever close() says.
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
    struck_ = true;
    struck_call_ = name;
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
  int at_, error_, calls_ = 0;
  bool struck_ = false;
  std::string struck_call_;
};

}  // namespace zero::test
