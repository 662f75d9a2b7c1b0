// A file system whose reads and writes take a while.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

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

}  // namespace zero::test
