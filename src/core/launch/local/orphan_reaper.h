// A second process that outlives a launcher which was killed. The kernel ends the ranks themselves
// then (parent-death signal); the guardian ends what the ranks had started: their process groups,
// and strays that carry the run's marks in their environment. It does nothing when told goodbye.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

class OrphanReaper {
 public:
  // Forks. Call it on the thread that will fork the ranks. Throws IoError.
  explicit OrphanReaper(const std::vector<std::string>& marks);
  ~OrphanReaper();  // goodbye; returns when the process is gone
  OrphanReaper(const OrphanReaper&) = delete;
  OrphanReaper& operator=(const OrphanReaper&) = delete;

  pid_t pid() const { return pid_; }
  // A process group to end if the launcher dies.
  void watch(pid_t group);

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

}  // namespace zero::launch
