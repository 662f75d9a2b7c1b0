// The optimizer of this rank's shards: element-wise update rules over flat fp32 masters and moments,
// fused with unscaling, clipping and the cast to the compute dtype, in one pass over the memory.
// It owns no tensors: the engine hands it spans. Norms, overflow tests and communication are not here.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/settings.h"
#include "kernels/elementwise.h"
#include "kernels/update_simd.h"
#include "optim/schedule.h"

namespace zero::optim {

// `numel` consecutive elements of one parameter group. No alignment is needed beyond an element's.
struct Span {
  float* master = nullptr;
  float* slots[2] = {};  // num_slots() of them, in the order of slot_name()
  const void* gradient = nullptr;
  kernels::Dtype gradient_dtype = kernels::Dtype::F32;
  void* parameter = nullptr;  // the compute copy: RNE(master); null, or the fp32 master itself: none
  kernels::Dtype parameter_dtype = kernels::Dtype::F32;
  std::int64_t numel = 0;
  int parameter_group = 0;
  std::int64_t missed_steps =
      0;  // updates so far that left these elements out (frozen); bias correction does not count them
};

// Whether the pattern (* is any run, ? any one character) matches all of a parameter's name, or of one that is tied to
// it.
bool pattern_names(std::string_view pattern, std::string_view name, const std::vector<std::string>& aliases);

// Adam, AdamW, SGD, Adagrad and Lion as in docs/configuration.md ("optimizer"). All are element-wise,
// so spans may be cut anywhere, and the bits depend neither on the cut nor on SIMD target or threads
// ([Note: order of operations] in update_simd.cpp). A step is
//   begin_step();  update(span, factor) for every element of the model's shard once;  end_step();
class ShardedOptimizer {
 public:
  // Group 0 is everything that no entry of `groups` matches; entry i makes group i + 1.
  // Throws ConfigError if there is no optimizer type, if the schedule's lists do not fit the groups,
  // or if a group sets a rate that the schedule would override.
  ShardedOptimizer(const config::OptimizerSettings& optimizer, const config::ScheduleSettings& schedule,
                   const std::vector<config::ParameterGroup>& groups);

  // fp32 values the rule keeps per element beside the master: 0 to 2, all starting at the same value.
  int num_slots() const;
  // "exp_avg", "exp_avg_sq", "momentum_buffer" or "sum": torch's names, used in checkpoints.
  const char* slot_name(int slot) const;
  float slot_initial_value() const;

  int num_parameter_groups() const { return static_cast<int>(groups_.size()); }
  // The group of a parameter by its names: the first pattern that has one of them, else 0.
  int parameter_group_of(std::string_view name, const std::vector<std::string>& aliases = {}) const;

  // The rate of the next update (between begin_step and end_step: of this one).
  double lr(int group = 0) const;
  // From the next update on the group's rate is `lr`. ConfigError for a group that is not there, a rate that is no
  // finite number of at least 0, and where a schedule sets the rates.
  void set_lr(int group, double lr);
  // What set_lr() has set, by group; negative: nothing. All a checkpoint must keep of the rates.
  const std::vector<double>& set_rates() const { return set_rates_; }
  // Of a checkpoint; empty: nothing was set. ConfigError (kCheckpoint) unless there is one for each group.
  void check_rates(const std::vector<double>& rates) const;
  void restore_rates(std::vector<double> rates);

  // Fixes the constants of update number applied_steps() + 1.
  void begin_step();
  // master, slots and parameter <- the update with gradient * factor (see optim/clipping.h). Runs on
  // OpenMP's threads if the span is large. InternalError outside a step or for a span with null pointers.
  void update(const Span& span, float factor);
  void end_step();

  // Updates elements [0, numel) of a range elsewhere than in host memory, as update_range does.
  using RangeUpdate = std::function<void(const kernels::UpdateConstants& constants, const kernels::UpdateRange& range,
                                         float factor, std::int64_t numel)>;
  // From now on update() calls this; null: the spans are in host memory.
  void set_range_update(RangeUpdate range_update) { range_update_ = std::move(range_update); }

  // Updates made so far: what bias correction and schedule go by, and all a checkpoint must keep
  // beside masters and slots.
  std::int64_t applied_steps() const { return applied_; }
  // Throws ConfigError (kCheckpoint) for a negative count.
  void set_applied_steps(std::int64_t applied);

 private:
  struct Group {
    std::string pattern;
    double weight_decay;
  };
  kernels::UpdateConstants constants_of(int group, std::int64_t missed_steps) const;
  kernels::Rule rule() const;

  config::OptimizerSettings settings_;
  std::vector<Group> groups_;
  std::vector<double> set_rates_;
  Schedule schedule_;
  std::int64_t applied_ = 0;
  bool in_step_ = false;
  RangeUpdate range_update_;
  std::vector<kernels::UpdateConstants> constants_;  // per group, while in a step
};

}  // namespace zero::optim
