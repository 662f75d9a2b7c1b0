// The formulas of the schedules. n = max(2, warmup_num_steps), N = total_num_steps; F, G = the two parts of a cycle.
#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/check.h"

namespace zero::optim {
namespace {

using config::PerGroup;
using config::ScheduleType;

// The largest momentum that is also below 1 in fp32.
constexpr double kLargestMomentum = 1 - 0x1p-24;

double of_group(const PerGroup& values, int group) {
  return values.size() == 1 ? values[0] : values[static_cast<std::size_t>(group)];
}

[[noreturn]] void conflict(const std::string& key, const std::string& got_and_expected, const std::string& hint) {
  throw ConfigError(base::join("[Schedule] scheduler.params.", key, ": got ", got_and_expected, ". Hint: ", hint));
}

void check_list(const char* key, const PerGroup& values, std::size_t groups) {
  if (values.size() != 1 && values.size() != groups)
    conflict(key, base::join(values.size(), " values, expected 1, or ", groups, " (one per parameter group)"),
             "give one number for all groups, or a list in the order of the groups, the unnamed group first.");
}

void check_order(const char* low_key, const PerGroup& low, const char* high_key, const PerGroup& high,
                 std::size_t groups) {
  for (std::size_t g = 0; g < groups; ++g) {
    const double from = of_group(low, static_cast<int>(g)), to = of_group(high, static_cast<int>(g));
    if (from > to)
      conflict(low_key, base::join(from, " in parameter group ", g, ", expected at most ", high_key, " = ", to),
               "exchange the two.");
  }
}

}  // namespace

Schedule::Schedule(const config::ScheduleSettings& settings, std::vector<double> base_lr)
    : settings_(settings), base_lr_(std::move(base_lr)) {
  auto& s = settings_;
  const auto groups = base_lr_.size();
  switch (s.type) {
    case ScheduleType::Constant:
      break;
    case ScheduleType::WarmupLR:
    case ScheduleType::WarmupDecayLR:
      check_list("warmup_min_lr", s.warmup_min_lr, groups);
      if (!s.warmup_max_lr.empty()) check_list("warmup_max_lr", s.warmup_max_lr, groups);
      check_order("warmup_min_lr", s.warmup_min_lr, "warmup_max_lr", uses_base_lr() ? base_lr_ : s.warmup_max_lr,
                  groups);
      break;
    case ScheduleType::WarmupCosineLR:
      break;
    case ScheduleType::LRRangeTest:
      check_list("lr_range_test_min_lr", s.range_min_lr, groups);
      break;
    case ScheduleType::OneCycle:
      check_list("cycle_min_lr", s.cycle_min_lr, groups);
      check_list("cycle_max_lr", s.cycle_max_lr, groups);
      check_order("cycle_min_lr", s.cycle_min_lr, "cycle_max_lr", s.cycle_max_lr, groups);
      check_list("cycle_min_mom", s.cycle_min_mom, groups);
      check_list("cycle_max_mom", s.cycle_max_mom, groups);
      if (s.cycle_momentum) check_order("cycle_min_mom", s.cycle_min_mom, "cycle_max_mom", s.cycle_max_mom, groups);
      break;
  }
  if ((s.type == ScheduleType::WarmupDecayLR || s.type == ScheduleType::WarmupCosineLR) &&
      s.total_num_steps < s.warmup_num_steps)
    conflict("total_num_steps",
             base::join(s.total_num_steps, ", expected at least warmup_num_steps = ", s.warmup_num_steps),
             "total_num_steps counts the warm-up too.");
}

bool Schedule::constant() const { return settings_.type == ScheduleType::Constant; }

bool Schedule::uses_base_lr() const {
  switch (settings_.type) {
    case ScheduleType::Constant:
    case ScheduleType::WarmupCosineLR:
      return true;
    case ScheduleType::WarmupLR:
    case ScheduleType::WarmupDecayLR:
      return settings_.warmup_max_lr.empty();
    case ScheduleType::LRRangeTest:
    case ScheduleType::OneCycle:
      break;
  }
  return false;
}

std::int64_t Schedule::warmup_steps() const { return std::max<std::int64_t>(2, settings_.warmup_num_steps); }

double Schedule::warmup(std::int64_t s) const {
  const auto step = static_cast<double>(s), steps = static_cast<double>(warmup_steps());
  return settings_.warmup_log ? std::log(step + 1) / std::log(steps) : step / steps;
}

std::int64_t Schedule::cycle_steps() const {
  return settings_.cycle_first_step_size + settings_.cycle_second_step_size.value_or(settings_.cycle_first_step_size);
}

double Schedule::cycle_position(std::int64_t s) const {
  const bool rising = s <= settings_.cycle_first_step_size;
  const auto size = rising ? settings_.cycle_first_step_size : cycle_steps() - settings_.cycle_first_step_size;
  const auto done = rising ? s : cycle_steps() - s;
  const auto stairs = rising ? settings_.cycle_first_stair_count
                             : settings_.cycle_second_stair_count.value_or(settings_.cycle_first_stair_count);
  // In integers: a quotient in fp64 may be slightly below its stair.
  if (stairs > 0) return static_cast<double>(stairs * done / size) / static_cast<double>(stairs);
  return static_cast<double>(done) / static_cast<double>(size);
}

double Schedule::rate(int group, std::int64_t s) const {
  const auto& c = settings_;
  const double own = base_lr_[static_cast<std::size_t>(group)];
  const auto n = warmup_steps(), total = c.total_num_steps;
  // The fraction of the decay, from the end of the warm-up to the last step, at `steps`.
  const auto of_decay = [&](std::int64_t steps) {
    return static_cast<double>(steps) / static_cast<double>(std::max<std::int64_t>(1, total - n));
  };
  switch (c.type) {
    case ScheduleType::Constant:
      return own;
    case ScheduleType::WarmupLR:
    case ScheduleType::WarmupDecayLR: {
      const double low = of_group(c.warmup_min_lr, group),
                   high = uses_base_lr() ? own : of_group(c.warmup_max_lr, group);
      if (s < 0) return low;
      if (s < n) return low + (high - low) * warmup(s);
      if (c.type == ScheduleType::WarmupLR) return high;
      return low + (high - low) * std::max(0.0, of_decay(total - s));
    }
    case ScheduleType::WarmupCosineLR: {
      const double first = c.warmup_min_ratio, last = c.cos_min_ratio;
      if (s < 0) return 0;  // DeepSpeed's, whatever warmup_min_ratio is
      if (s < n) return own * (first + (1 - first) * warmup(s));
      const double q = std::min(1.0, of_decay(s - n + 1));
      return own * (last + (1 - last) * (1 + std::cos(std::numbers::pi * q)) / 2);
    }
    case ScheduleType::LRRangeTest: {
      const auto step = std::max<std::int64_t>(0, s);
      const double x = c.range_staircase ? static_cast<double>(step / c.range_step_size)
                                         : static_cast<double>(step) / static_cast<double>(c.range_step_size);
      return of_group(c.range_min_lr, group) * (1 + c.range_step_rate * x);
    }
    case ScheduleType::OneCycle: {
      const double low = of_group(c.cycle_min_lr, group), high = of_group(c.cycle_max_lr, group);
      const auto step = std::max<std::int64_t>(0, s), after = step - cycle_steps();
      if (after <= 0) return low + (high - low) * cycle_position(step);
      if (c.decay_step_size == 0 || c.decay_lr_rate == 0) return low;
      return low / (1 + c.decay_lr_rate * static_cast<double>(after) / static_cast<double>(c.decay_step_size));
    }
  }
  return own;
}

std::optional<double> Schedule::momentum(int group, std::int64_t s) const {
  const auto& c = settings_;
  if (c.type != ScheduleType::OneCycle || !c.cycle_momentum) return std::nullopt;
  const double low = of_group(c.cycle_min_mom, group), high = of_group(c.cycle_max_mom, group);
  const auto step = std::max<std::int64_t>(0, s), after = step - cycle_steps();
  if (after <= 0) return high - (high - low) * cycle_position(step);
  if (c.decay_step_size == 0) return high;
  const double grown =
      high * (1 + c.decay_mom_rate * static_cast<double>(after) / static_cast<double>(c.decay_step_size));
  return std::min(grown, kLargestMomentum);
}

}  // namespace zero::optim
