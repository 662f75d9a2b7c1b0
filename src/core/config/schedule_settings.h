// The typed values of a configuration's learning-rate schedule. Plain data, as settings.h, which includes it.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace zero::config {

enum class ScheduleType { Constant, WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle };

// One number, or one per parameter group.
using PerGroup = std::vector<double>;

struct ScheduleSettings {
  ScheduleType type = ScheduleType::Constant;
  PerGroup warmup_min_lr{0}, warmup_max_lr;  // empty max: the optimizer's lr
  std::int64_t warmup_num_steps = 1000, total_num_steps = 0;
  bool warmup_log = true;  // false: linear
  double warmup_min_ratio = 0, cos_min_ratio = 1e-4;
  PerGroup range_min_lr{1e-3};
  std::int64_t range_step_size = 2000;
  double range_step_rate = 1;
  bool range_staircase = false;
  PerGroup cycle_min_lr, cycle_max_lr;
  std::int64_t cycle_first_step_size = 2000;
  std::optional<std::int64_t> cycle_second_step_size;
  std::int64_t cycle_first_stair_count = 0;
  std::optional<std::int64_t> cycle_second_stair_count;
  std::int64_t decay_step_size = 0;
  double decay_lr_rate = 0;
  bool cycle_momentum = true;
  PerGroup cycle_min_mom{0.8}, cycle_max_mom{0.9};
  double decay_mom_rate = 0;
  std::int64_t last_batch_iteration = -1;
};

}  // namespace zero::config
