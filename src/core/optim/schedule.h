// Learning rates as a function of the number of updates: DeepSpeed's schedules by name and key, with
// the formulas of docs/configuration.md ("scheduler"). Pure functions of settings and index: no
// state, so a resumed run has its rate at once.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "config/settings.h"

namespace zero::optim {

class Schedule {
 public:
  // `base_lr[g]` is the optimizer's rate for parameter group g. A list of the settings has one entry
  // (for all groups) or one per group. Throws ConfigError for another length, for values that
  // contradict each other (minimum above maximum, total below warm-up), and for a missing one.
  Schedule(const config::ScheduleSettings& settings, std::vector<double> base_lr);

  // The index s of the update that follows `applied` updates: applied + last_batch_iteration + 1.
  std::int64_t index(std::int64_t applied) const { return applied + settings_.last_batch_iteration + 1; }
  // Group's rate at index s. s = -1 (last_batch_iteration -2: the Warmup* schedules then lag one
  // update behind, as DeepSpeed's do) is the minimum; the other schedules take it as 0.
  double rate(int group, std::int64_t s) const;
  // betas[0] at index s if the schedule sets it (OneCycle with cycle_momentum), always below 1.
  std::optional<double> momentum(int group, std::int64_t s) const;
  // True: no schedule was configured, and rate() is the optimizer's own.
  bool constant() const;
  // True: rate() depends on the optimizer's own rate; false: the schedule brings its own.
  bool uses_base_lr() const;

 private:
  double warmup(std::int64_t s) const;          // gamma(s)
  std::int64_t warmup_steps() const;            // n
  double cycle_position(std::int64_t s) const;  // k: 0 at the ends, 1 at the peak
  std::int64_t cycle_steps() const;             // F + G

  config::ScheduleSettings settings_;
  std::vector<double> base_lr_;
};

}  // namespace zero::optim
