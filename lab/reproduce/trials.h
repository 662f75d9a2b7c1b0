// Runs the programs of an experiment, as `zero run` runs ranks: supervised, ended with this process, none left behind.
// What a program measures and prints is its own matter; here are its output, exit code and processor time.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tools/support/console.h"
#include "tools/support/measurement.h"

namespace zero::report {
class ProgressLine;
}

namespace zero::cli {

struct Program {
  std::vector<std::string> words;  // after "zero": {"train", "config.json", "--json"}
  int ranks = 1, threads = 1;
};

struct Trial {
  int exit_code = 0;
  std::string out;     // rank 0's stdout
  std::string reason;  // of a failure: the rank's last error
  double seconds = 0, cpu_seconds = 0;
  // A budget that cannot be met, at start-up or in a step (docs/cli.md section 3).
  bool refused() const { return exit_code == 4; }
};

// Ended by a signal, or a trial failed in another way than it may: `code` is this program's exit code.
struct Stopped {
  int code = 1;
};

class Trials {
 public:
  // command: for messages. One line on stderr tells what is done, if the terminal and `global` allow it.
  Trials(std::string command, const Global& global);
  ~Trials();

  // The next trials are those of an experiment with `count` of them.
  void begin(const std::string& experiment, int count);
  // Runs a program to its end. Throws Stopped after a signal; and, having printed the reason, for an exit code other
  // than 0, and 4 where `may_be_refused`.
  Trial run(const std::string& what, const Program& program, bool may_be_refused = false);
  // A result that is known: printed above the line of progress.
  void tell(const std::string& line);
  double cpu_seconds() const { return cpu_seconds_; }  // of all trials so far

 private:
  std::string command_, experiment_;
  Global global_;
  int count_ = 0, done_ = 0;
  double cpu_seconds_ = 0;
  std::unique_ptr<report::ProgressLine> progress_;
  bool notes_ = false;  // plain lines instead of a line of progress
};

// One JSON document per line, as `zero train --json` prints; lines of another kind are left out.
std::vector<Json> json_lines(const std::string& text);
// One document. Throws InternalError.
Json json_document(const std::string& text, const std::string& program);

}  // namespace zero::cli
