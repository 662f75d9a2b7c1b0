// `zero run` with real training of a small model, for tests that interrupt it.
#pragma once
#include <sys/types.h>

#include <map>
#include <string>

#include "support/process.h"

namespace zero::test {

class TrainingJob : public Process {
 public:
  // `zero run -n RANKS <options> zero train ... <training>` in `folder`, which gets the text. A line or object a step.
  TrainingJob(int ranks, const Words& options, const Words& training, const std::string& folder);

  std::string run_id() const;  // of the first attempt
  // Throws std::runtime_error if there is none.
  pid_t pid_of(int rank, int attempt = 0) const;
  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
};

// "loss grad_norm" of each step, as --json prints them; a step that was repeated has the last ones.
std::map<std::int64_t, std::string> losses_of(const std::string& out);

}  // namespace zero::test
