// A child process with captured streams, for tests of programs: start, signal, wait with a limit.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "support/folder.h"

namespace zero::test {

using Words = std::vector<std::string>;
Words operator+(Words a, const Words& b);

class Process {
 public:
  struct Settings {
    std::vector<std::string> arguments;    // [0] is a path
    std::vector<std::string> environment;  // "NAME=value", added; "NAME" alone removes
    std::string folder;                    // working directory, empty: inherited
    int out = -1;                          // a descriptor for stdout instead of the capture
  };
  explicit Process(Settings settings);
  explicit Process(std::vector<std::string> arguments) : Process(Settings{std::move(arguments), {}, {}, -1}) {}
  ~Process();  // SIGKILLs it, if it still runs
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // Reads its streams until `text` was seen in stdout or stderr; false after the limit.
  bool wait_for(const std::string& text, double seconds = 20);
  // Until it ends: its exit code, or 1000 + signal. 2000 when the limit passed.
  int wait(double seconds = 30);
  // Bytes of its stdout that are in the pipe.
  int unread_out() const;
  // Closes this end of its stdout.
  void close_out();

  std::string out, err;
  double seconds = 0;  // from the start, or the last signal(), to the end

 private:
  bool pump(int milliseconds);
  pid_t pid_ = -1;
  int pipes_[2] = {-1, -1};
  int status_ = 0;
  mutable std::chrono::steady_clock::time_point since_;
};

// A program from start to end: its exit code as Process::wait(), and what it wrote.
struct Ended {
  int code = 0;
  std::string out, err;
};
Ended run_to_end(Process::Settings settings, double seconds = 30);

// Lines of a text; without the ones that start with `except`.
std::vector<std::string> lines(const std::string& text, const std::string& except = "");
// Processes of the machine that have NAME=value in their environment.
std::vector<pid_t> with_environment(const std::string& entry);
// As above, but waits up to `seconds` until there is none; returns those that are left.
std::vector<pid_t> left_behind(const std::string& entry, double seconds = 20);

}  // namespace zero::test
