// The transitions of the loss scaler (see the note in loss_scaler.h).
#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace zero::optim {

LossScaler::LossScaler(const config::Settings& settings)
    : settings_(settings.scaler),
      max_skipped_steps_(settings.max_skipped_steps),
      dynamic_(settings.scales_loss() && settings.scaler.static_scale == 0),
      largest_(std::ldexp(1.0, std::max(32, settings.scaler.initial_scale_power))) {
  if (dynamic_) {
    state_.scale = std::ldexp(1.0, settings_.initial_scale_power);
    state_.hysteresis = settings_.hysteresis;
  } else if (settings.scales_loss()) {
    state_.scale = settings_.static_scale;
  }
}

bool LossScaler::update(bool bad) {
  auto& [scale, hysteresis, good, floor] = state_;
  if (bad) {
    good = 0;
    const auto smallest = static_cast<double>(settings_.min_scale);
    if (dynamic_ && hysteresis > 1) {
      --hysteresis;
    } else if (dynamic_ && scale > smallest) {
      scale = std::max(scale / 2, smallest);
    } else {
      return ++floor >= max_skipped_steps_;
    }
    return false;
  }
  floor = 0;
  ++good;
  if (!dynamic_) return false;
  if (settings_.consecutive_hysteresis) hysteresis = settings_.hysteresis;
  if (good >= settings_.window) {
    scale = std::min(2 * scale, largest_);
    good = 0;
    hysteresis = settings_.hysteresis;
  }
  return false;
}

void LossScaler::set_state(const State& state) {
  if (!(state.scale > 0) || !std::isfinite(state.scale) || state.hysteresis < 1 || state.good < -1 || state.floor < 0)
    throw ConfigError(
        base::join("[LossScaler::set_state] got scale ", state.scale, ", hysteresis ", state.hysteresis, ", good ",
                   state.good, ", floor ", state.floor,
                   ", expected a finite scale above 0, hysteresis of 1 or more, good of -1 or more, and floor of 0 or "
                   "more. "
                   "Hint: the checkpoint is damaged; load an older one."),
        ExitCode::kCheckpoint);
  state_.good = state.good;
  state_.floor = state.floor;
  if (!dynamic_) return;
  // A scale above the bound may come from a larger initial power; one below, from a smaller minimum.
  state_.scale = std::clamp(state.scale, static_cast<double>(settings_.min_scale),
                            std::max(largest_, static_cast<double>(settings_.min_scale)));
  state_.hysteresis = std::min(state.hysteresis, settings_.hysteresis);
  state_.good = std::min(state.good, settings_.window - 1);
}

}  // namespace zero::optim
