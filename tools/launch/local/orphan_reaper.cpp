// The reaper reads process group ids from a pipe until its end, which means that the launcher has ended for any reason.
#include "tools/launch/local/orphan_reaper.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "tools/launch/local/process_tree.h"

namespace zero::launch {
namespace {

constexpr pid_t kGoodbye = -1;

[[noreturn]] void guard(int pipe, const std::vector<std::string>& marks) {
  // Leave the terminal's session, ignore the launcher's stop signals, and hold none of its descriptors.
  setpgid(0, 0);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  if (pipe != 0) dup2(pipe, 0);
  syscall(__NR_close_range, 1u, ~0u, 0u);
  std::vector<pid_t> groups;
  pid_t group;
  while (true) {
    const ssize_t n = ::read(0, &group, sizeof group);
    if (n < 0 && errno == EINTR) continue;
    if (n != static_cast<ssize_t>(sizeof group)) break;
    if (group == kGoodbye) _exit(0);
    groups.push_back(group);
  }
  for (const pid_t g : groups) kill(-g, SIGKILL);
  // A process may fork while we search: repeat until nothing is found, for at most 2 s.
  for (int pass = 0; pass < 100; ++pass) {
    const std::vector<pid_t> strays = processes_with_environment(marks);
    if (strays.empty()) break;
    for (const pid_t p : strays) kill(p, SIGKILL);
    const timespec pause{0, 20'000'000};
    nanosleep(&pause, nullptr);
  }
  _exit(0);
}

}  // namespace

OrphanReaper::OrphanReaper(const std::vector<std::string>& marks) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw IoError(base::join("[OrphanReaper] cannot make a pipe: ", std::strerror(errno)));
  pid_ = fork();
  if (pid_ == 0) {
    ::close(ends[1]);
    guard(ends[0], marks);
  }
  const int error = errno;
  ::close(ends[0]);
  pipe_ = ends[1];
  if (pid_ < 0) {
    ::close(pipe_);
    throw IoError(base::join("[OrphanReaper] cannot fork: ", std::strerror(error), ". Hint: see `ulimit -u`."));
  }
}

void OrphanReaper::watch(pid_t group) { [[maybe_unused]] const ssize_t n = ::write(pipe_, &group, sizeof group); }

OrphanReaper::~OrphanReaper() {
  watch(kGoodbye);
  ::close(pipe_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace zero::launch
