// File systems whose reads and writes take a while.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "formats/files.h"

namespace zero::test {

class SlowFiles : public formats::FsOps {
 public:
  static constexpr std::chrono::milliseconds kStuck{4000};
  // Every call takes `each`; the stuck_at-th, if any, takes kStuck.
  explicit SlowFiles(std::chrono::milliseconds each, int stuck_at = 0) : each_(each), stuck_at_(stuck_at) {}
  ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) override {
    wait();
    return FsOps::pread(fd, out, bytes, offset);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    wait();
    return FsOps::pwrite(fd, data, bytes, offset);
  }

 private:
  void wait() { std::this_thread::sleep_for(++calls_ == stuck_at_ ? kStuck : each_); }
  std::chrono::milliseconds each_;
  int stuck_at_;
  std::atomic<int> calls_{0};  // a save writes in several threads
};

// Writes nothing until `go` (at most 60 s): slow enough on any machine.
class FilesThatWaitFor : public SlowFiles {
 public:
  FilesThatWaitFor(std::function<bool()> go, std::chrono::milliseconds each) : SlowFiles(each), go_(std::move(go)) {}
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    for (int i = 0; i < 6000 && !go_(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return SlowFiles::pwrite(fd, data, bytes, offset);
  }

 private:
  const std::function<bool()> go_;
};

}  // namespace zero::test
