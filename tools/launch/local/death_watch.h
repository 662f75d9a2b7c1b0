// Determines the order in which processes die. waitpid() returns children in the order they were forked, so it cannot
// tell which failed first; pidfds in one epoll set become readable in order of death. On kernels without pidfds (before
// 5.3), one blocked thread per process writes to a pipe.
#pragma once
#include <sys/types.h>

#include <thread>
#include <vector>

namespace zero::launch {

class DeathWatch {
 public:
  // threads: use the method for old kernels, for its tests. Throws IoError.
  explicit DeathWatch(bool threads = false);
  ~DeathWatch();  // call only when all watched processes are dead
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  // `pid` must be an unreaped child; call right after its fork. Throws IoError.
  void add(int index, pid_t pid);
  // Readable (poll, epoll) when take() would return something.
  int fd() const { return fd_; }
  // Indices of the processes that died since the last call, in order of death. The processes remain zombies; the caller
  // decides when to reap them, which allows reuse of their ids.
  std::vector<int> take();

 private:
  int fd_ = -1, write_end_ = -1;
  bool threads_;
  std::vector<std::pair<int, int>> pidfds_;  // (index, descriptor)
  std::vector<std::jthread> waiters_;
};

}  // namespace zero::launch
