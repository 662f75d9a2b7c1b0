// The order in which processes die. waitpid() returns children in the order they were forked, so
// it cannot tell who failed first; the order in which pidfds become readable in one epoll set can.
// Where the kernel has no pidfd (before 5.3), one blocked thread a process writes to a pipe.
#pragma once
#include <sys/types.h>

#include <thread>
#include <vector>

namespace zero::launch {

class DeathWatch {
 public:
  // `threads`: use the way of old kernels, for its tests. Throws IoError.
  explicit DeathWatch(bool threads = false);
  ~DeathWatch();  // call only when all watched processes are dead
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  // `pid` must be an unreaped child; add it right after its fork. Throws IoError.
  void add(int index, pid_t pid);
  // Readable (poll, epoll) when take() would return something.
  int fd() const { return fd_; }
  // Indices of those that died since the last call, first death first. The processes stay
  // zombies: reaping, and so the reuse of their ids, is the caller's decision.
  std::vector<int> take();

 private:
  int fd_ = -1, write_end_ = -1;
  bool threads_;
  std::vector<std::pair<int, int>> pidfds_;  // (index, descriptor)
  std::vector<std::jthread> waiters_;
};

}  // namespace zero::launch
