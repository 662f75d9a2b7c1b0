#include "support/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>

namespace zero::test {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> runs{0};

struct Child {
  pid_t pid = -1;
  int out = -1, err = -1;
  bool alive = true;
};

void drain(int& fd, std::string& into) {
  char part[4096];
  while (fd >= 0) {
    const auto n = read(fd, part, sizeof part);
    if (n > 0) {
      into.append(part, static_cast<std::size_t>(n));
    } else if (n == 0) {
      close(fd);
      fd = -1;
    } else {
      return;  // EAGAIN
    }
  }
}

}  // namespace

std::vector<ProcessResult> spawn_ranks(const SpawnOptions& options, const std::string& program,
                                       const std::vector<std::string>& arguments) {
  const auto run_id = "test-" + std::to_string(getpid()) + "-" + std::to_string(runs++);
  const int port =
      20000 + static_cast<int>((static_cast<unsigned>(getpid()) * 31u + static_cast<unsigned>(runs) * 7u) % 20000u);
  std::vector<Child> children(static_cast<std::size_t>(options.world));
  std::vector<ProcessResult> results(children.size());
  const auto start = Clock::now();
  for (int rank = 0; rank < options.world; ++rank) {
    auto environment = options.environment;
    const int of_host = options.ranks_per_host > 0 ? options.ranks_per_host : options.world;
    environment["RANK"] = std::to_string(rank);
    environment["LOCAL_RANK"] = std::to_string(rank % of_host);
    environment["WORLD_SIZE"] = std::to_string(options.world);
    environment["LOCAL_WORLD_SIZE"] = std::to_string(of_host);
    environment["MASTER_ADDR"] = "127.0.0.1";
    environment["MASTER_PORT"] = std::to_string(port);
    environment["OMP_NUM_THREADS"] = "1";
    environment["ZERO_RUN_ID"] = run_id;
    environment["ZERO_TOKEN"] = "of " + run_id;  // ranks on several hosts need one
    environment["ZERO_TRANSPORT"] = options.transport;
    environment["ZERO_TIMEOUT_S"] = std::to_string(options.timeout_s);
    std::vector<std::string> texts;
    for (char** e = environ; *e != nullptr; ++e) {
      const std::string text = *e;
      if (!environment.contains(text.substr(0, text.find('=')))) texts.push_back(text);
    }
    for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
    std::vector<char*> argv{const_cast<char*>(program.c_str())}, envp;
    for (const auto& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    for (auto& text : texts) envp.push_back(text.data());
    envp.push_back(nullptr);
    int out[2], err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    const auto parent = getpid();
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(99);
      dup2(out[1], 1);
      dup2(err[1], 2);
      execve(program.c_str(), argv.data(), envp.data());
      _exit(98);
    }
    close(out[1]);
    close(err[1]);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    children[static_cast<std::size_t>(rank)] = {pid, out[0], err[0], true};
  }
  std::size_t left = children.size();
  while (left > 0) {
    const bool alone = left == 1 && options.sleeper >= 0 && children[static_cast<std::size_t>(options.sleeper)].alive;
    const bool late = alone || Clock::now() - start > options.limit;
    for (std::size_t r = 0; r < children.size(); ++r) {
      auto& child = children[r];
      auto& result = results[r];
      drain(child.out, result.out);
      drain(child.err, result.err);
      if (!child.alive) continue;
      if (late) {
        result.timed_out = true;
        kill(child.pid, SIGKILL);
      }
      int status = 0;
      if (waitpid(child.pid, &status, late ? 0 : WNOHANG) != child.pid) continue;
      child.alive = false;
      --left;
      result.ended = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
      if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (std::size_t r = 0; r < children.size(); ++r) {
    drain(children[r].out, results[r].out);
    drain(children[r].err, results[r].err);
    if (children[r].out >= 0) close(children[r].out);
    if (children[r].err >= 0) close(children[r].err);
  }
  return results;
}

}  // namespace zero::test
