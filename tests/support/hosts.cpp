// Processes are found by what is in their environment and on their command line.
#include "support/hosts.h"
#include "support/file_text.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>

namespace zero::test {

using Words = std::vector<std::string>;

namespace {

std::string new_mark() {
  static std::atomic<int> count{0};
  return std::to_string(getpid()) + "-" + std::to_string(count++);
}

std::string write_hosts(const std::string& hosts) {
  const std::string path = temporary_folder() + "/hosts";
  std::ofstream(path) << hosts;
  return path;
}

pid_t parent_of(pid_t pid) {
  const std::string text = file_text("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t end = text.rfind(')');
  return end == std::string::npos ? -1 : std::atoi(text.c_str() + std::min(end + 4, text.size()));
}

}  // namespace

Words fake_ssh_environment(const std::string& mark) {
  const char* path = std::getenv("PATH");
  return {std::string("PATH=" ZERO_SOURCE_DIR "/tests/tools/fake_ssh:") + (path ? path : "/usr/bin:/bin"),
          "FAKE_SSH_MARK=" + mark};
}

struct HostsJob::Start {
  std::string hostfile, mark;
  Settings settings;
};

HostsJob::HostsJob(const Start& start) : Process(start.settings), hostfile(start.hostfile), mark_(start.mark) {}

HostsJob::HostsJob(const std::string& hosts, const Words& words, const Words& environment)
    : HostsJob([&] {
        Start start;
        start.hostfile = write_hosts(hosts);
        start.mark = new_mark();
        start.settings.arguments = Words{ZERO_BINARY_DIR "/bin/zero", "run", "-H", start.hostfile} + words;
        start.settings.environment = fake_ssh_environment(start.mark) + environment;
        return start;
      }()) {}

std::string HostsJob::run_id() const {
  const std::size_t at = err.find(", run ");
  return at == std::string::npos ? "" : err.substr(at + 6, 28);
}

int HostsJob::finish(double limit) {
  const int code = wait(limit);
  EXPECT_EQ(run_id().size(), 28u) << err;
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + run_id(), 0).empty()) << err;
  EXPECT_TRUE(nothing_left(1)) << err;
  return code;
}

bool HostsJob::nothing_left(double seconds) const { return left_behind("FAKE_SSH_MARK=" + mark_, seconds).empty(); }

pid_t HostsJob::agent_on(const std::string& host) const {
  const std::vector<pid_t> of_host = with_environment("FAKE_SSH_HOST=" + host);
  for (const pid_t p : with_environment("FAKE_SSH_MARK=" + mark_)) {
    const std::string command = file_text("/proc/" + std::to_string(p) + "/cmdline");
    if (std::count(of_host.begin(), of_host.end(), p) &&
        command.find("/zero\0run\0--agent\0", 0, 18) != std::string::npos) {
      // The guardian is a copy of its agent.
      const std::string parent = file_text("/proc/" + std::to_string(parent_of(p)) + "/cmdline");
      if (parent != command) return p;
    }
  }
  return -1;
}

pid_t HostsJob::connection_to(const std::string& host) const {
  for (pid_t p = agent_on(host); p > 1;) {
    const pid_t parent = parent_of(p);
    if (parent == pid()) return p;
    p = parent;
  }
  return -1;
}

pid_t HostsJob::process_of(int rank) const {
  const auto run = with_environment("ZERO_RUN_ID=" + run_id());
  for (const pid_t p : with_environment("RANK=" + std::to_string(rank)))
    if (std::count(run.begin(), run.end(), p)) return p;
  return -1;
}

}  // namespace zero::test
