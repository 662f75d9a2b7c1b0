// The loss scale of mixed-precision training (Micikevicius et al., 1710.03740) and the rule that ends a run after
// repeated overflows. The same for all stages and tiers. It differs from DeepSpeed's, see [Note: loss scale]. Does not
// access gradients.
#pragma once
#include <cstdint>

#include "config/settings.h"

namespace zero::optim {

// [Note: loss scale] U = scale() is read once per optimizer step and used for all of its micro-batches:
// losses are multiplied by U, gradients divided by it. Then update(bad), with
// bad = any rank holds a non-finite gradient:
//   bad, dynamic     if h > 1: h -= 1; else if S > min: S = max(S/2, min); else floor += 1;  good = 0
//   bad, otherwise   floor += 1
//   good             floor = 0; good += 1; dynamic: consecutive: h = H; at good == window:
//                    S = min(2S, 2^max(32, initial power)), good = 0, h = H
// A halving does not refill h. DeepSpeed grows one step later the first time, has no upper bound and
// counts from the last bad step's number; tests/unit/optim/scaler_test.cpp shows both side by side.
class LossScaler {
 public:
  // The state that checkpoints store.
  struct State {
    double scale = 1;             // S
    std::int64_t hysteresis = 1;  // h: bad steps until a halving, including that one
    // Clean steps since the last change of S or bad step; -1: the first of them does not count, as in DeepSpeed.
    std::int64_t good = 0;
    std::int64_t floor = 0;  // consecutive bad steps at the smallest scale
    bool operator==(const State&) const = default;
  };

  // Where the settings scale the loss: dynamic with static_scale 0, else that fixed scale. 1 elsewhere.
  explicit LossScaler(const config::Settings& settings);

  double scale() const { return state_.scale; }
  bool dynamic() const { return dynamic_; }
  // Call once per optimizer step, with the same `bad` on all ranks. Returns true after max_skipped_steps consecutive
  // bad steps without a smaller scale to try: the caller must end the run with an error.
  bool update(bool bad);

  const State& state() const { return state_; }
  // Restores a checkpoint's state. A static scale of this run is kept. Values outside this run's settings (minimum,
  // window or hysteresis) are moved to the nearest allowed one. Throws ConfigError (kCheckpoint) for an impossible
  // scale or count.
  void set_state(const State& state);

 private:
  config::ScalerSettings settings_;
  std::int64_t max_skipped_steps_;
  bool dynamic_;
  double largest_;
  State state_;
};

}  // namespace zero::optim
