// See deepspeed_scaler.h.
#include "interchange/deepspeed_scaler.h"

#include <algorithm>
#include <cmath>

#include "formats/manifest.h"

namespace zero::interchange {
namespace {

constexpr const char* kScalerModule = "deepspeed.runtime.fp16.loss_scaler";
constexpr const char* kDynamicScaler = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";
constexpr const char* kStaticScaler = "deepspeed.runtime.fp16.loss_scaler.LossScaler";

double scale_in(const PickleView& value) {
  const auto& node = value.node();
  const double scale = node.is(pickle::Kind::Float)     ? node.number
                       : node.is(pickle::Kind::Integer) ? static_cast<double>(node.integer)
                                                        : 0;
  if (!(scale > 0) || !std::isfinite(scale)) value.fail_type("a finite loss scale above 0");
  return scale;
}

std::int64_t at_least_one(const PickleView& value) {
  const auto count = value.count(formats::kMostCount);
  if (count < 1) value.fail_type("a count of 1 or more");
  return count;
}

// At a step without overflow DeepSpeed doubles the scale if iter - last_overflow - 1 is a multiple of the window and
// not 0. The steps since libzero's last change of the scale, so that it doubles at the same step.
std::int64_t good_steps(const PickleView& iteration, const PickleView& overflow, std::int64_t window) {
  const auto next = iteration.count(formats::kMostCount);
  if (!overflow.node().is(pickle::Kind::Integer) || overflow.node().integer < -formats::kMostCount ||
      overflow.node().integer >= next)
    overflow.fail_type("a step before " + std::to_string(next));
  const auto stable = next - overflow.node().integer - 1;  // at the next step
  const auto doubles = std::max<std::int64_t>(1, (stable + window - 1) / window) * window;
  return window - (doubles - stable + 1);
}

}  // namespace

std::optional<SourceScaler> read_deepspeed_scaler(const PickleView& states, bool fp16) {
  SourceScaler scaler;
  if (states.has("loss_scaler")) {
    const auto object = states.at("loss_scaler");
    const auto of = [&](const char* name) { return object.attribute(name); };
    scaler.dynamic = object.is_object(kDynamicScaler);
    if (!scaler.dynamic && !object.is_object(kStaticScaler)) return std::nullopt;
    scaler.scale = scale_in(of("cur_scale"));
    // Runs in bf16 and fp32 have a scaler as well, of 1.
    if (!scaler.dynamic) return fp16 || scaler.scale != 1 ? std::optional(scaler) : std::nullopt;
    scaler.window = at_least_one(of("scale_window"));
    scaler.most_hysteresis = at_least_one(of("delayed_shift"));
    scaler.hysteresis = scaler.most_hysteresis == 1 ? 1 : at_least_one(of("cur_hysteresis"));
    const auto smallest = of("min_scale");
    scaler.smallest = static_cast<std::int64_t>(std::min(scale_in(smallest), 9e15));
    scaler.consecutive =
        of("consecutive_hysteresis").node().is(pickle::Kind::Bool) && of("consecutive_hysteresis").node().integer != 0;
    scaler.good = good_steps(of("cur_iter"), of("last_overflow_iter"), scaler.window);
    return scaler;
  }
  if (!states.has("cur_scale") || !states.has("dynamic_loss_scale")) return std::nullopt;
  scaler.dynamic = states.at("dynamic_loss_scale").node().integer != 0;
  scaler.scale = scale_in(states.at("cur_scale"));
  if (!scaler.dynamic) return fp16 || scaler.scale != 1 ? std::optional(scaler) : std::nullopt;
  // Halves the scale at every overflow.
  scaler.hysteresis = scaler.most_hysteresis = 1;
  scaler.window = at_least_one(states.at("scale_window"));
  scaler.good = good_steps(states.at("cur_iter"), states.at("last_overflow_iter"), scaler.window);
  return scaler;
}

void write_deepspeed_scaler(PickleWriter& pickle, const SourceScaler& scaler, std::int64_t steps) {
  pickle.text("loss_scaler");
  pickle.begin_object(kScalerModule, scaler.dynamic ? "DynamicLossScaler" : "LossScaler");
  const auto number = [&](const char* name, std::int64_t value) {
    pickle.text(name);
    pickle.integer(value);
  };
  const auto flag = [&](const char* name, bool value) {
    pickle.text(name);
    pickle.boolean(value);
  };
  pickle.text("cur_scale");
  pickle.real(scaler.scale);
  flag("dynamic", scaler.dynamic);
  if (scaler.dynamic) {
    number("cur_iter", steps);
    number("last_overflow_iter", steps - scaler.good - 2);
    pickle.text("scale_factor");
    pickle.real(2);
    number("scale_window", scaler.window);
    number("min_scale", scaler.smallest);
    number("delayed_shift", scaler.most_hysteresis);
    number("cur_hysteresis", scaler.hysteresis);
    flag("consecutive_hysteresis", scaler.consecutive);
    flag("raise_error_at_min_scale", true);
    pickle.text("dtype");
    pickle.global("torch", "float16");
  }
  pickle.end_object();
  flag("dynamic_loss_scale", scaler.dynamic);
  flag("overflow", false);
}

}  // namespace zero::interchange
