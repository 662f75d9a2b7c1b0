// The optimizer of this rank's shards: element-wise update rules over flat masters and optimizer states, fused with
// unscaling, clipping and the cast to the parameters' dtype in one pass. Owns no tensors; the engine passes spans.
// Norms, overflow checks and communication are elsewhere.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/settings.h"
#include "kernels/elementwise.h"
#include "kernels/update_simd.h"
#include "optim/schedule.h"

namespace zero::optim {

// `numel` consecutive elements of one parameter group. Only element alignment is required.
struct Span {
  void* master = nullptr;
  void* slots[kernels::kMostSlots] = {};  // num_slots() states, in the order of slot_name()
  kernels::Dtype master_dtype = kernels::Dtype::F32, slot_dtype = kernels::Dtype::F32;
  bool slots_in_blocks = false;  // in 8 bits, beginning with a block; slot_dtype has no meaning
  const void* gradient = nullptr;
  kernels::Dtype gradient_dtype = kernels::Dtype::F32;
  void* parameter = nullptr;  // receives the master, rounded to nearest even; null or `master`: not written
  kernels::Dtype parameter_dtype = kernels::Dtype::F32;
  std::int64_t numel = 0;
  int parameter_group = 0;
  // Updates without these elements (frozen parameters), which bias correction does not count.
  std::int64_t missed_steps = 0;
  // Of 16-bit masters and states: a hash of the parameter's name, and the position of the first element in it. They
  // decide how values are rounded; a span then has elements of one parameter only.
  std::uint64_t parameter_hash = 0;
  std::int64_t parameter_begin = 0;

  // The rest, from element `at` on; with slots_in_blocks the first of a block.
  Span from(std::int64_t at) const;
};

// An update rule that the program brings: this class then keeps its groups, rates and counts, and has no arithmetic.
struct ProgramRule {
  std::string name;
  std::vector<std::string> states;  // of all parameters together
  double lr = 0;                    // in place of OptimizerSettings::lr
};

// The rules of docs/configuration.md ("optimizer"); of Muon, AdamW for what is no matrix. All are element-wise: spans
// may be divided anywhere, and results do not depend on the division, the SIMD target or the threads ([Note: order of
// operations] in update_simd.cpp). A step is
//   begin_step();  update(span, factor) for every element of the model's shard once;  complete_updates();  end_step();
// or at the end cancel_step(), if the device skipped the update.
class ShardedOptimizer {
 public:
  // Group i + 1 has the parameters that entry i of `groups` matches, group 0 all others. Throws ConfigError if there is
  // no optimizer type and no `program`, or both, if the schedule's lists do not fit the groups, or if a group sets a
  // learning rate that the schedule would override.
  ShardedOptimizer(const config::OptimizerSettings& optimizer, const config::ScheduleSettings& schedule,
                   const std::vector<config::ParameterGroup>& groups,
                   std::optional<ProgramRule> program = std::nullopt);

  // "AdamW", or the name of the program's rule.
  std::string name() const;
  // Names of the states per element besides the master, of all parameters together. Checkpoints have them.
  const std::vector<std::string>& states() const { return states_; }
  // Of an element that update() updates: up to 3, all with the same initial value.
  int num_slots() const { return static_cast<int>(slots_.size()); }
  const char* slot_name(int slot) const;
  float slot_initial_value() const;

  int num_parameter_groups() const { return static_cast<int>(groups_.size()); }
  // The group of the first pattern that matches one of the parameter's names, else 0.
  int parameter_group_of(std::string_view name, const std::vector<std::string>& aliases = {}) const;

  // The learning rate of the next update; between begin_step and end_step, of the current one.
  double lr(int group = 0) const;
  // Sets the group's learning rate from the next update on. ConfigError for an unknown group, a negative or non-finite
  // rate, and if a schedule sets the rates.
  void set_lr(int group, double lr);
  // With what set_number() has changed.
  const config::OptimizerSettings& numbers(int group) const { return settings_of(group); }
  // The learning rates from set_lr(), by group; negative: not set. Checkpoints store them.
  const std::vector<double>& set_rates() const { return set_rates_; }
  // Changes "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "alpha" or "rho" of a group
  // from the next update on. Checkpoints do not store it. ConfigError for another name, a number that the rule cannot
  // have, and momentum where the rule was made without.
  void set_number(int group, const std::string& name, double value);
  // A text of all numbers that were set, which ranks compare.
  std::string set_numbers() const;
  // Rates of a checkpoint; empty: none was set. ConfigError (kCheckpoint) unless there is one per group.
  void check_rates(const std::vector<double>& rates) const;
  void restore_rates(std::vector<double> rates);

  // Computes the constants of update applied_steps() + 1.
  void begin_step();
  // Updates master, slots and parameter with gradient * factor (see optim/clipping.h). Uses OpenMP threads for large
  // spans. InternalError outside a step or for null pointers.
  void update(const Span& span, float factor) { update(std::span(&span, 1), factor); }
  void update(std::span<const Span> spans, std::optional<float> factor);
  void complete_updates();
  void end_step();
  void cancel_step();

  // Updates ranges that are not in host memory, as update_range does. No factor: the one that is in device memory, too.
  using Factor = std::optional<float>;
  using RangesUpdate = std::function<void(const kernels::UpdateConstants& constants, Factor factor,
                                          std::span<const kernels::SizedRange> ranges)>;
  // Spans are not in host memory: update() notes them, and complete_updates() calls the function for those with the
  // same constants together. Until then they are not freed. null: spans are in host memory.
  void set_ranges_update(RangesUpdate ranges_update) { ranges_update_ = std::move(ranges_update); }

  // Updates performed; determines bias correction and schedule. Stored in checkpoints.
  std::int64_t applied_steps() const { return applied_; }
  // Throws ConfigError (kCheckpoint) for a negative count.
  void set_applied_steps(std::int64_t applied);

  // From now on 16-bit masters and states are rounded stochastically ([Note: random bits] in
  // kernels/cuda/random_bits.h).
  void round_stochastically(std::uint64_t seed) { seed_ = seed; }
  bool rounds_stochastically() const { return seed_.has_value(); }

 private:
  struct Group {
    std::string pattern;
    config::OptimizerSettings settings;  // with the group's own weight decay, and what set_number() has changed
    bool has_rate = false;               // of its own, not the optimizer's
  };
  const config::OptimizerSettings& settings_of(int group) const {
    return groups_[static_cast<std::size_t>(group)].settings;
  }
  kernels::UpdateConstants constants_of(int group, std::int64_t missed_steps) const;
  kernels::UpdateConstants constants_in_step(int group, std::int64_t missed_steps) const {
    return missed_steps == 0 ? constants_[static_cast<std::size_t>(group)] : constants_of(group, missed_steps);
  }
  kernels::Rule rule() const;
  kernels::UpdateRange range_of(const Span& span) const;
  double mu_product(int group, std::int64_t updates) const;

  config::OptimizerSettings settings_;
  std::optional<ProgramRule> program_;
  std::vector<std::string> states_, slots_;
  std::vector<Group> groups_;
  std::vector<double> set_rates_;
  std::map<std::pair<int, std::string>, double> set_numbers_;  // by group and name
  struct MuProduct {
    std::int64_t updates = 0;
    double product = 1;
  };
  mutable std::map<int, MuProduct> mu_products_;  // NAdam's, by group; computed when asked for
  Schedule schedule_;
  std::int64_t applied_ = 0;
  std::optional<std::uint64_t> seed_;  // of stochastic rounding
  bool in_step_ = false;
  RangesUpdate ranges_update_;
  std::map<std::pair<int, std::int64_t>, std::vector<kernels::SizedRange>> noted_;  // by group and missed steps
  Factor noted_factor_;
  std::vector<kernels::UpdateConstants> constants_;  // per group, while in a step
};

}  // namespace zero::optim
