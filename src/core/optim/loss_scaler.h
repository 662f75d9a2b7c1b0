// The loss scale of mixed-precision training (Micikevicius et al., 1710.03740) and the rule when a
// step with bad gradients ends the run. One algorithm for all stages and tiers; it differs from
// DeepSpeed's, see [Note: loss scale]. Neither tests gradients nor scales anything itself.
#pragma once
#include <cstdint>

#include "config/settings.h"

namespace zero::optim {

// [Note: loss scale] U = scale() is read once and serves all micro-batches of an optimizer step:
// losses are multiplied by it, gradients divided by the same U. Then update(bad), with
// bad = any rank holds a non-finite gradient:
//   bad, dynamic     if h > 1: h -= 1; else if S > min: S = max(S/2, min); else floor += 1;  good = 0
//   bad, otherwise   floor += 1
//   good             floor = 0; good += 1; dynamic: consecutive: h = H; at good == window:
//                    S = min(2S, 2^max(32, initial power)), good = 0, h = H
// A halving does not refill h. DeepSpeed grows one step later the first time, has no upper bound and
// counts from the last bad step's number; tests/unit/optim/scaler_test.cpp shows both side by side.
class LossScaler {
 public:
  // What a checkpoint keeps.
  struct State {
    double scale = 1;             // S
    std::int64_t hysteresis = 1;  // h: bad steps until a halving, counting that one
    std::int64_t good = 0;        // clean steps since the last change of S or bad step
    std::int64_t floor = 0;       // bad steps in a row that no smaller scale could answer
    bool operator==(const State&) const = default;
  };

  // Dynamic for fp16 with static_scale 0; that fixed scale for fp16 otherwise; 1 for bf16 and fp32.
  explicit LossScaler(const config::Settings& settings);

  double scale() const { return state_.scale; }
  bool dynamic() const { return dynamic_; }
  // Once per optimizer step, with the same `bad` on all ranks. True: max_skipped_steps bad steps in a
  // row had no remedy, and the run must stop (the caller throws, with the culprit's name).
  bool update(bool bad);

  const State& state() const { return state_; }
  // Takes a checkpoint's state. A scale that is fixed in this run stays; values that this run's
  // settings do not allow (another minimum, window or hysteresis) are moved to the nearest allowed.
  // Throws ConfigError (kCheckpoint) for a scale that no run can have had, or a negative count.
  void set_state(const State& state);

 private:
  config::ScalerSettings settings_;
  std::int64_t max_skipped_steps_;
  bool dynamic_;
  double largest_;
  State state_;
};

}  // namespace zero::optim
