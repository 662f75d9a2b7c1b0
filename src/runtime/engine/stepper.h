// step(): what the step program does at a boundary, between what a program sees of it. And what ends a delayed update.
#pragma once
#include <cstdint>

#include "engine/backward.h"

namespace zero::engine {

class Stepper {
 public:
  Stepper(Parts& parts, const Checks& checks, Backward& backward, ForwardListener& listener);

  StepResult step();
  // An update that is still on its way is finished. Collective, between steps.
  void flush();
  // Before states are replaced: an update on its way is dropped, nothing is read ahead.
  void begin_replacing();
  // step() would act after the next backward(), or would now after one.
  bool at_boundary() const;
  double lr(int group) const;
  void set_lr(int group, double lr);

 private:
  std::vector<double> exchange_norms(double mine);
  std::uint64_t hash_of_choices() const;
  [[noreturn]] void fail_numerically();
  std::string find_non_finite() const;

  Parts& p_;
  const Checks& checks_;
  Backward& backward_;
  ForwardListener& listener_;
};

}  // namespace zero::engine
