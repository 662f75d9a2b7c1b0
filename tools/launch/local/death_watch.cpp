// pidfds in an epoll set, or waiter threads and a pipe; both report in order of death.
#include "tools/launch/local/death_watch.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace zero::launch {
namespace {
[[noreturn]] void fail(const char* what) {
  throw IoError(base::join("[DeathWatch] cannot watch a child: ", what, ": ", std::strerror(errno)));
}
int open_pidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0u)); }
}  // namespace

DeathWatch::DeathWatch(bool threads) : threads_(threads) {
  if (!threads_) {
    const int self = open_pidfd(getpid());
    if (self >= 0) {
      ::close(self);
    } else {
      threads_ = true;
    }
  }
  if (!threads_) {
    if ((fd_ = epoll_create1(EPOLL_CLOEXEC)) < 0) fail("epoll_create1");
    return;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe2");
  fd_ = ends[0];
  write_end_ = ends[1];
  fcntl(fd_, F_SETFL, O_NONBLOCK);
}

DeathWatch::~DeathWatch() {
  waiters_.clear();
  for (const auto& [index, fd] : pidfds_) ::close(fd);
  if (write_end_ >= 0) ::close(write_end_);
  ::close(fd_);
}

void DeathWatch::add(int index, pid_t pid) {
  if (threads_) {
    waiters_.emplace_back([pid, index, out = write_end_] {
      siginfo_t info{};
      while (waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
      }
      // Less than PIPE_BUF, therefore atomic. An error cannot be handled.
      [[maybe_unused]] const ssize_t n = ::write(out, &index, sizeof index);
    });
    return;
  }
  const int fd = open_pidfd(pid);
  if (fd < 0) fail("pidfd_open");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<std::uint32_t>(pidfds_.size());
  pidfds_.emplace_back(index, fd);
  if (epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
}

std::vector<int> DeathWatch::take() {
  std::vector<int> dead;
  if (threads_) {
    int index;
    while (::read(fd_, &index, sizeof index) == static_cast<ssize_t>(sizeof index)) dead.push_back(index);
    return dead;
  }
  epoll_event events[64];
  while (true) {
    const int n = epoll_wait(fd_, events, 64, 0);
    if (n <= 0) break;
    for (int i = 0; i < n; ++i) {
      const auto& [index, fd] = pidfds_[events[i].data.u32];
      epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr);
      dead.push_back(index);
    }
  }
  return dead;
}

}  // namespace zero::launch
