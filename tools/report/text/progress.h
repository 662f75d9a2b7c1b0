// The progress line on stderr: one line, at most ten redraws a second, wiped before anything else
// is written and at the end. Whether it may be drawn at all is progress_wanted() (terminal.h); a
// disabled one passes log lines through and draws nothing.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace zero::report {

class ProgressLine {
 public:
  struct Settings {
    bool enabled = false;
    bool dumb = false;  // wipe with spaces, not with an escape code
    int columns = 80;   // the line never reaches the last column
    bool utf8 = false;  // a finer bar
    std::string unit;   // "step": "step 20/40 50%  detail  eta 10s", without a rate
    // The output (one call per write) and the clock in seconds; by default file descriptor 2
    // and the steady clock.
    std::function<void(std::string_view)> write;
    std::function<double()> clock;
  };
  explicit ProgressLine(Settings settings);
  ~ProgressLine();  // wipes
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `done` of `total` (0: unknown) units, followed by a text ("loss 3.24"). Cheap to call often.
  // Rate and remaining time are computed from recent updates. Thread-safe.
  void update(std::int64_t done, std::int64_t total, std::string_view detail = {});
  // Writes whole lines above the progress line; adds a missing newline. Thread-safe.
  void print(std::string_view lines);
  // Clears the line and stops drawing.
  void finish();

 private:
  void wipe();
  std::string line() const;
  Settings settings_;
  std::mutex mutex_;
  std::int64_t done_ = 0, total_ = 0;
  std::string detail_;
  std::size_t drawn_width_ = 0;
  double drawn_at_ = -1e9;
  double rate_at_ = -1;  // when rate_ was last taken
  std::int64_t rate_done_ = 0;
  double rate_ = 0;  // units a second; 0: not known
};

}  // namespace zero::report
