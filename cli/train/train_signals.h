// Signals of a training run: SIGTERM and SIGUSR1 only set a flag, which the ranks agree on at a step
// boundary; SIGINT, or a second SIGTERM, ends the process at once with 130 or 143.
#pragma once

namespace zero::cli {

// While it lives the handlers are installed. `wipe_line`: there is a progress line on stderr to remove.
class StopSignals {
 public:
  explicit StopSignals(bool wipe_line);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // SIGTERM or SIGUSR1 once one came, else 0.
  static int requested();
};

}  // namespace zero::cli
