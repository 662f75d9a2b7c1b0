// step(): checks and results around the step program's update. Also completes or drops a delayed update.
#pragma once
#include <cstdint>

#include "engine/backward.h"

namespace zero::engine {

class Stepper {
 public:
  Stepper(Parts& parts, const Checks& checks, Backward& backward, ForwardListener& listener);

  StepResult step();
  // As in ProgramSteps.
  double grad_norm(const char* call);
  double clip_grad_norm(double max_norm);
  // Completes a pending delayed update. Collective, between steps.
  void flush();
  // Before states are replaced: drops a pending delayed update and prefetched tiles.
  void begin_replacing(const char* call);
  // Whether step() would update after the next backward(), or now if there was one.
  bool at_boundary() const;
  double lr(int group) const;
  void set_lr(int group, double lr);
  void set_number(int group, const std::string& name, double value);

 private:
  std::vector<double> exchange_norms(double mine);
  std::uint64_t hash_of_choices() const;
  // ConfigError if a rank's hash differs from rank 0's.
  void check_choices(const std::vector<DeviceNorm::Part>& parts) const;
  [[noreturn]] void fail_numerically();
  std::string find_non_finite() const;

  Parts& p_;
  const Checks& checks_;
  Backward& backward_;
  ForwardListener& listener_;
};

}  // namespace zero::engine
