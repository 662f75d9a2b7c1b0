// A job of `zero run` over several hosts that are reached through tests/tools/fake_ssh.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test {

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b);

// Settings with fake_ssh first in PATH, and `mark` in the environment of all processes that are started.
std::vector<std::string> fake_ssh_environment(const std::string& mark);

class HostsJob : public Process {
 public:
  // `zero run -H <hosts> <words>`.
  HostsJob(const std::string& hosts, const std::vector<std::string>& words,
           const std::vector<std::string>& environment = {});

  const std::string hostfile;

  std::string run_id() const;
  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
  // Waits, and checks that nothing of the job is left.
  int finish(double limit = 30);
  bool nothing_left(double seconds) const;
  pid_t agent_on(const std::string& host) const;
  // The launcher's child that leads to the host.
  pid_t connection_to(const std::string& host) const;
  // The process of a rank of the world.
  pid_t process_of(int rank) const;

 private:
  struct Start;
  explicit HostsJob(const Start& start);
  std::string mark_;
};

}  // namespace zero::test
