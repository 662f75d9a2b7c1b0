// A file descriptor that is closed by its destructor, and epoll helpers.
#pragma once
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace zero::base {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = other.release();
    }
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void close() {
    if (fd_ >= 0) ::close(release());
  }

 private:
  int fd_;
};

// Adds `fd` to the set; an event on it carries `tag`. Throws IoError.
inline void watch(int epoll, int fd, std::uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
    throw IoError(base::join("[epoll_ctl] cannot watch descriptor ", fd, ": ", std::strerror(errno),
                             ". Hint: raise `ulimit -n`."));
}
inline void unwatch(int epoll, int fd) { epoll_ctl(epoll, EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace zero::base
