// Signals of a training run. SIGTERM and SIGUSR1 set a flag, which ranks agree on at a step boundary. SIGINT, or a
// second SIGTERM, ends the process at once with 130 or 143.
#pragma once

namespace zero::cli {

// RAII: installs the handlers. wipe_line: erase a progress line on stderr first.
class StopSignals {
 public:
  explicit StopSignals(bool wipe_line);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // SIGTERM or SIGUSR1 after one was received, else 0.
  static int requested();
};

}  // namespace zero::cli
