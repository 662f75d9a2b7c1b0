// Only async-signal-safe calls between fork and exec. An error is returned through a close-on-exec pipe, which confirms
// that the program runs.
#include "tools/launch/local/rank_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/check.h"
#include "base/standard_streams.h"
#include "tools/launch/machine/machine.h"

namespace zero::launch {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
      throw IoError(base::join("[spawn] cannot make a pipe: ", std::strerror(errno), ". Hint: see `ulimit -n`."));
    // Not one of the descriptors that the child's streams are put on: one would replace the other, or stay
    // close-on-exec.
    read = base::off_standard(ends[0]);
    write = base::off_standard(ends[1]);
  }
  ~Pipe() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_write() {
    ::close(write);
    write = -1;
  }
  int take_read() { return std::exchange(read, -1); }
};

}  // namespace

std::string find_program(const std::string& name) {
  const auto check = [](const std::string& path) {
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) return errno;
    if (S_ISDIR(info.st_mode)) return EISDIR;
    return access(path.c_str(), X_OK) == 0 ? 0 : EACCES;
  };
  int error = ENOENT;
  if (name.find('/') != std::string::npos) {
    error = check(name);
    if (error == 0) return name;
  } else {
    const char* path = std::getenv("PATH");
    std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
    for (std::string folder; std::getline(folders, folder, ':');) {
      const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
      const int e = check(candidate);
      if (e == 0) return candidate;
      if (e != ENOENT && e != ENOTDIR) error = e;
    }
    // `zero run zero train` also works if only the first `zero` was given with its path.
    const std::string self = own_path().string();
    if (name == "zero" && self.ends_with("/zero") && check(self) == 0) return self;
  }
  std::string hint = error == EACCES ? "chmod +x it, or name the interpreter: zero run bash script.sh" : "";
  if (error == ENOENT && name.find('/') == std::string::npos)
    hint = access(name.c_str(), F_OK) == 0 ? "write ./" + name + " for the file in this folder"
                                           : "give its path, or put its folder into PATH";
  throw ConfigError(base::join("[zero run] cannot run \"", name, "\": ", std::strerror(error),
                               hint.empty() ? "" : ". Hint: " + hint + "."));
}

SpawnedProcess spawn(const SpawnSettings& settings) {
  const std::vector<char*> argv = pointers(settings.arguments), envp = pointers(settings.environment);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int c : settings.cores) CPU_SET(c, &cores);
  Pipe out, err, failed;
  const int null = base::off_standard(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(127);  // the launcher died before the line above
    for (int s = 1; s < NSIG; ++s) signal(s, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    if (settings.in >= 0 || null >= 0) dup2(settings.in >= 0 ? settings.in : null, 0);
    if (settings.in == 0) fcntl(0, F_SETFD, 0);
    dup2(out.write, 1);
    dup2(err.write, 2);
    for (const int fd : settings.keep_fds) fcntl(fd, F_SETFD, 0);
    if (settings.cores.empty() || sched_setaffinity(0, sizeof cores, &cores) == 0)
      execve(settings.path.c_str(), argv.data(), envp.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = ::write(failed.write, &error, sizeof error);
    _exit(127);
  }
  const int fork_error = errno;
  if (null >= 0) ::close(null);
  if (pid < 0)
    throw IoError(base::join("[spawn] cannot fork: ", std::strerror(fork_error), ". Hint: see `ulimit -u`."));
  setpgid(pid, pid);  // also called in the child; the first call wins
  out.close_write();
  err.close_write();
  failed.close_write();
  int error = 0;
  ssize_t n;
  while ((n = ::read(failed.read, &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (n == static_cast<ssize_t>(sizeof error)) {
    waitpid(pid, nullptr, 0);
    const char* hint = error == ENOEXEC ? ". Hint: a script needs a first line such as #!/bin/sh."
                       : error == E2BIG ? ". Hint: the environment and arguments are too long."
                                        : "";
    throw ConfigError(base::join("[spawn] cannot run ", settings.path, ": ", std::strerror(error), hint));
  }
  fcntl(out.read, F_SETFL, O_NONBLOCK);
  fcntl(err.read, F_SETFL, O_NONBLOCK);
  return {pid, out.take_read(), err.take_read()};
}

}  // namespace zero::launch
