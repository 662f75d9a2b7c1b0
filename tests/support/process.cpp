// fork, exec and poll; used by tests only.
#include "support/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

extern char** environ;

namespace zero::test {

using Clock = std::chrono::steady_clock;

Process::Process(Settings settings) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  std::vector<std::string> environment;
  const auto name_of = [](const std::string& entry) { return entry.substr(0, entry.find('=')); };
  for (char** e = environ; *e; ++e) {
    bool kept = true;
    for (const std::string& s : settings.environment) kept &= name_of(s) != name_of(*e);
    if (kept) environment.emplace_back(*e);
  }
  for (const std::string& s : settings.environment)
    if (s.find('=') != std::string::npos) environment.push_back(s);
  std::vector<char*> argv, envp;
  for (std::string& a : settings.arguments) argv.push_back(a.data());
  for (std::string& e : environment) envp.push_back(e.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  since_ = Clock::now();
  pid_ = fork();
  if (pid_ == 0) {
    setpgid(0, 0);
    dup2(settings.out >= 0 ? settings.out : out[1], 1);
    dup2(err[1], 2);
    if (!settings.folder.empty() && chdir(settings.folder.c_str()) != 0) _exit(126);
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  pipes_[0] = out[0];
  pipes_[1] = err[0];
}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const int fd : pipes_)
    if (fd >= 0) close(fd);
}

void Process::signal(int number) const {
  since_ = Clock::now();
  kill(pid_, number);
}

int Process::unread_out() const {
  int bytes = 0;
  return ioctl(pipes_[0], FIONREAD, &bytes) == 0 ? bytes : 0;
}

void Process::close_out() {
  close(pipes_[0]);
  pipes_[0] = -1;
}

bool Process::pump(int milliseconds) {
  pollfd fds[2] = {{pipes_[0], POLLIN, 0}, {pipes_[1], POLLIN, 0}};
  poll(fds, 2, milliseconds);
  bool open = false;
  for (int i = 0; i < 2; ++i) {
    if (pipes_[i] < 0) continue;
    open = true;
    if (!fds[i].revents) continue;
    char bytes[65536];
    const ssize_t n = read(pipes_[i], bytes, sizeof bytes);
    if (n > 0) (i == 0 ? out : err).append(bytes, static_cast<std::size_t>(n));
    if (n == 0 || (n < 0 && errno != EINTR)) {
      close(pipes_[i]);
      pipes_[i] = -1;
    }
  }
  return open;
}

bool Process::wait_for(const std::string& text, double limit) {
  const auto end = Clock::now() + std::chrono::duration<double>(limit);
  while (out.find(text) == std::string::npos && err.find(text) == std::string::npos) {
    if (Clock::now() > end || !pump(50)) return false;
  }
  return true;
}

int Process::wait(double limit) {
  const auto end = Clock::now() + std::chrono::duration<double>(limit);
  while (pid_ > 0) {
    if (!pump(10)) usleep(2000);
    if (waitpid(pid_, &status_, WNOHANG) == pid_) {
      seconds = std::chrono::duration<double>(Clock::now() - since_).count();
      pid_ = -1;
    } else if (Clock::now() > end) {
      return 2000;
    }
  }
  // Reads the rest of the pipes; a surviving process may keep them open.
  const auto drain = Clock::now() + std::chrono::milliseconds(500);
  while (Clock::now() < drain && pump(20)) {
  }
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : 1000 + WTERMSIG(status_);
}

Ended run_to_end(Process::Settings settings, double seconds) {
  Process process(std::move(settings));
  const int code = process.wait(seconds);
  return {code, process.out, process.err};
}

std::vector<std::string> lines(const std::string& text, const std::string& except) {
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (except.empty() || line.compare(0, except.size(), except) != 0) all.push_back(line);
  return all;
}

std::vector<pid_t> with_environment(const std::string& entry) {
  std::vector<pid_t> found;
  DIR* proc = opendir("/proc");
  while (const dirent* e = readdir(proc)) {
    const pid_t pid = std::atoi(e->d_name);
    if (pid <= 0) continue;
    std::ifstream in("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
    const std::string text = '\0' + std::string(std::istreambuf_iterator<char>(in), {}) + '\0';
    if (text.find('\0' + entry + '\0') != std::string::npos) found.push_back(pid);
  }
  closedir(proc);
  return found;
}

std::vector<pid_t> left_behind(const std::string& entry, double limit) {
  const auto end = Clock::now() + std::chrono::duration<double>(limit);
  std::vector<pid_t> found;
  while (!(found = with_environment(entry)).empty() && Clock::now() < end) usleep(20000);
  return found;
}

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace zero::test
