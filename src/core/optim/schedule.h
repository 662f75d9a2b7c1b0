// Learning rates as a function of the number of updates: DeepSpeed's schedules, with the formulas of
// docs/configuration.md ("scheduler"). Pure functions of settings and index, so a resumed run needs no state.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "config/settings.h"

namespace zero::optim {

class Schedule {
 public:
  // base_lr[g] is the optimizer's learning rate for parameter group g. A list in the settings has one entry for all
  // groups, or one per group. Throws ConfigError for another length, a missing value, and contradicting values (minimum
  // above maximum, total below warm-up).
  Schedule(const config::ScheduleSettings& settings, std::vector<double> base_lr);

  // The index s of the update that follows `applied` updates: applied + last_batch_iteration + 1.
  std::int64_t index(std::int64_t applied) const { return applied + settings_.last_batch_iteration + 1; }
  // The group's learning rate at index s. With last_batch_iteration -2 the Warmup* schedules lag one update behind, as
  // DeepSpeed's do: s = -1 gives warmup_min_lr, or 0 of WarmupCosineLR; the other schedules treat it as 0.
  double rate(int group, std::int64_t s) const;
  // betas[0] at index s if the schedule sets it (OneCycle with cycle_momentum); always below 1.
  std::optional<double> momentum(int group, std::int64_t s) const;
  // Whether no schedule is configured; rate() is then the optimizer's own.
  bool constant() const;
  // Whether rate() depends on the optimizer's learning rate.
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
