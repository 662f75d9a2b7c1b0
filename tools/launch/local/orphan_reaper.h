// A second process that cleans up after a launcher that was killed. The kernel ends the ranks (parent-death signal);
// this process ends what they started: their process groups, and processes with the run's marks in their environment.
// It exits without action if the launcher ends normally.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace zero::launch {

class OrphanReaper {
 public:
  // Forks. Call on the thread that will fork the ranks. Throws IoError.
  explicit OrphanReaper(const std::vector<std::string>& marks);
  ~OrphanReaper();  // ends the process without action and waits for it
  OrphanReaper(const OrphanReaper&) = delete;
  OrphanReaper& operator=(const OrphanReaper&) = delete;

  pid_t pid() const { return pid_; }
  // Adds a process group to end if the launcher dies.
  void watch(pid_t group);

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

}  // namespace zero::launch
