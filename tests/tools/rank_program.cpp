// A rank for tests of the launcher, written as a list of actions: [RANK:]ACTION[=VALUE], done in
// order by the rank named, or by all. It uses the status page as the engine does, and no torch.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "observe/status_page.h"

using zero::observe::CollectiveState;
using zero::observe::status_page;
using zero::observe::StatusPhase;

namespace {

volatile sig_atomic_t exit_on_signal = 0;
volatile sig_atomic_t got_signal = 0;
void on_signal(int) {
  got_signal = 1;
  if (exit_on_signal >= 0) _exit(exit_on_signal);
}

void put(int fd, const std::string& text) {
  if (write(fd, text.data(), text.size()) < 0) _exit(99);
}

// "\n", "\r" and "\t" written out.
std::string unescaped(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      const char c = text[++i];
      out += c == 'n' ? '\n' : c == 'r' ? '\r' : c == 't' ? '\t' : c;
    } else {
      out += text[i];
    }
  }
  return out;
}

int attempt() { return std::atoi(std::getenv("ZERO_RESTART_COUNT")); }

void act(const std::string& action, const std::string& value) {
  const int number = std::atoi(value.c_str());
  if (action == "out")
    put(1, unescaped(value) + "\n");
  else if (action == "err")
    put(2, unescaped(value) + "\n");
  else if (action == "raw")
    put(1, unescaped(value));
  else if (action == "long")
    put(1, std::string(static_cast<std::size_t>(number), 'x') + "\n");
  else if (action == "lines")
    for (int i = 0; i < number; ++i) put(1, "line " + std::to_string(i) + " of rank " + std::getenv("RANK") + "\n");
  else if (action == "env")
    put(1, value + "=" + (std::getenv(value.c_str()) ? std::getenv(value.c_str()) : "(unset)") + "\n");
  else if (action == "sleep") {
    for (int left = number; left > 0 && !got_signal; left -= 10) usleep(10000);
  } else if (action == "exit")
    _exit(number);
  else if (action == "kill") {
    signal(number, SIG_DFL);
    kill(getpid(), number);
    pause();
  } else if (action == "ignore")
    signal(number, SIG_IGN);
  else if (action == "handle") {  // SIGNAL,CODE: exit with it at once; CODE -1: only end sleeps
    exit_on_signal = std::atoi(value.c_str() + value.find(',') + 1);
    signal(number, on_signal);
  } else if (action == "step") {
    status_page().set_phase(StatusPhase::Forward);
    status_page().set_step(number, 2);
  } else if (action == "phase")
    status_page().set_phase(static_cast<StatusPhase>(number));
  else if (action == "unit")
    status_page().set_unit(value);
  else if (action == "inside")
    status_page().set_collective(static_cast<std::uint64_t>(number), "reduce_scatter", "bf16", 1048576,
                                 CollectiveState::Inside, "layers.7", "test.cpp:1");
  else if (action == "after")
    status_page().set_collective(static_cast<std::uint64_t>(number), "reduce_scatter", "bf16", 1048576,
                                 CollectiveState::After, "layers.7", "test.cpp:1");
  else if (action == "error")
    status_page().set_error(value, zero::ExitCode::kNumerical);
  else if (action == "lost")
    status_page().set_error("[Communicator] got a closed connection", zero::ExitCode::kPeer);
  else if (action == "commit")
    status_page().note_commit();
  else if (action == "batch")  // the configuration allows the divisors of VALUE as numbers of ranks
    status_page().set_world_rule({.batch_parts = number});
  else if (action == "refuse-misfit") {  // exit 2 as the library does, if the number of ranks does not divide VALUE
    if (number % std::atoi(std::getenv("WORLD_SIZE")) != 0) _exit(2);
  } else if (action == "die-until") {  // ATTEMPT,SIGNAL: kills itself in the attempts up to that one, from 0 on
    if (attempt() <= number) act("kill", value.substr(value.find(',') + 1));
  } else if (action == "sleep-in") {  // ATTEMPT,MILLISECONDS
    if (attempt() == number) act("sleep", value.substr(value.find(',') + 1));
  } else if (action == "wait-for-failure") {
    while (status_page().failed_rank() < 0) usleep(5000);
  } else if (action == "progress") {
    for (int i = 0; i < number; ++i) {
      status_page().set_step(i);
      usleep(50000);
    }
  } else if (action == "cores") {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    std::string list;
    for (int c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(c, &set)) list += " " + std::to_string(c);
    put(1, "cores" + list + "\n");
  } else if (action == "fd-count") {
    int open_fds = 0;
    for (int fd = 0; fd < 256; ++fd) open_fds += fcntl(fd, F_GETFD) >= 0;
    put(1, "fds " + std::to_string(open_fds) + "\n");
  } else if (action == "child") {  // a child in the same process group that ignores SIGTERM and SIGINT
    if (fork() == 0) {
      signal(SIGTERM, SIG_IGN);
      signal(SIGINT, SIG_IGN);
      sleep(600);
      _exit(0);
    }
  } else if (action == "daemon") {  // a grandchild in a new session
    if (fork() == 0) {
      if (fork() == 0) {
        setsid();
        signal(SIGTERM, SIG_IGN);
        sleep(600);
      }
      _exit(0);
    }
  } else if (action == "first-time") {  // FILE,CODE: exit with CODE unless the file is there
    const std::string file = value.substr(0, value.find(','));
    if (access(file.c_str(), F_OK) != 0) {
      close(open(file.c_str(), O_CREAT | O_WRONLY, 0644));
      _exit(std::atoi(value.c_str() + value.find(',') + 1));
    }
  } else {
    std::fprintf(stderr, "rank_program: unknown action %s\n", action.c_str());
    _exit(98);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* rank = std::getenv("RANK");
  const std::string me = rank ? rank : "0";
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word.compare(0, 2, "--") == 0) {
      put(1, "argument " + word + "\n");
      continue;
    }
    const std::size_t colon = word.find(':');
    if (colon != std::string::npos && colon > 0 && word.find_first_not_of("0123456789") == colon) {
      if (word.substr(0, colon) != me) continue;
      word.erase(0, colon + 1);
    }
    const std::size_t equals = word.find('=');
    act(word.substr(0, equals), equals == std::string::npos ? "" : word.substr(equals + 1));
  }
  return 0;
}
