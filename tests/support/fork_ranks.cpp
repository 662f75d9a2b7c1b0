#include "support/fork_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>

#include <zero/errors.h>

namespace zero::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  std::string told;
};

void write_all(int fd, const void* data, std::size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, from, bytes);
    if (written <= 0) return;
    from += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

[[noreturn]] void run_child(int rank, int out, const std::function<void(int)>& body) {
  std::string error;
  std::int32_t blamed = -2;
  int code = 1;
  try {
    body(rank);
    code = 0;
  } catch (const CommError& e) {
    error = e.what();
    blamed = e.rank();
  } catch (const std::exception& e) {
    error = e.what();
  } catch (...) {
    error = "an exception that is not a std::exception";
  }
  write_all(out, &blamed, sizeof blamed);
  write_all(out, error.data(), error.size());
  ::_exit(code);
}

}  // namespace

std::vector<RankEnd> fork_ranks(int size, const std::function<void(int)>& body, std::chrono::milliseconds limit) {
  const auto start = Clock::now();
  const pid_t test = ::getpid();
  std::vector<Child> children(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    Child& child = children[static_cast<std::size_t>(rank)];
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    child.pid = ::fork();
    if (child.pid < 0) throw std::runtime_error("fork failed");
    if (child.pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != test) ::_exit(1);
      for (const Child& other : children) {
        if (other.pipe >= 0) ::close(other.pipe);
      }
      ::close(ends[0]);
      run_child(rank, ends[1], body);
    }
    ::close(ends[1]);
    child.pipe = ends[0];
  }
  std::vector<RankEnd> results(children.size());
  std::size_t open = children.size();
  while (open > 0) {
    std::vector<pollfd> entries;
    for (const Child& child : children) entries.push_back({child.pipe, POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(start + limit - Clock::now()).count();
    if (left <= 0 || ::poll(entries.data(), entries.size(), static_cast<int>(left)) == 0) {
      for (const Child& child : children) {
        if (child.pipe >= 0) ::kill(child.pid, SIGKILL);
      }
      limit = std::chrono::hours(1);
      continue;
    }
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (entries[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t got = ::read(children[i].pipe, buffer, sizeof buffer);
      if (got > 0) {
        children[i].told.append(buffer, static_cast<std::size_t>(got));
        continue;
      }
      ::close(children[i].pipe);
      children[i].pipe = -1;
      --open;
      int status = 0;
      ::waitpid(children[i].pid, &status, 0);
      RankEnd& end = results[i];
      end.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
      const std::string& told = children[i].told;
      if (told.size() >= sizeof(std::int32_t)) {
        std::int32_t blamed;
        told.copy(reinterpret_cast<char*>(&blamed), sizeof blamed);
        end.blamed = blamed;
        end.error = told.substr(sizeof blamed);
      }
    }
  }
  return results;
}

std::string errors_of(const std::vector<RankEnd>& ends) {
  std::string text;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    const RankEnd& end = ends[rank];
    if (end.ok()) continue;
    text += "rank " + std::to_string(rank) +
            (end.signal != 0 ? " ended by signal " + std::to_string(end.signal) : " failed: " + end.error) + "\n";
  }
  return text;
}

SharedCounter::SharedCounter()
    : value_(static_cast<std::atomic<int>*>(
          ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  if (static_cast<void*>(value_) == MAP_FAILED) throw std::runtime_error("cannot share memory with ranks");
}

SharedCounter::~SharedCounter() { ::munmap(value_, sizeof *value_); }

void SharedCounter::wait_for(int value) const {
  while (*value_ < value) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::string fresh_run_id() {
  static std::atomic<int> count{0};
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

}  // namespace zero::test
