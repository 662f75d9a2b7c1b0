// Interface between sharded_optimizer.cpp (settings, schedules, threads) and update_simd.cpp (compiled once per SIMD
// target): one update rule on one contiguous range.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

enum class Rule {
  AdamDecoupled,
  AdamL2,
  AmsgradDecoupled,
  AmsgradL2,
  Sgd,
  SgdMomentum,
  Adagrad,
  Lion,
  RmsProp,
  RmsPropMomentum,
  RmsPropCentered,
  RmsPropCenteredMomentum,
  NAdam,
  RAdam,
  Adamax,
  Adadelta,
};
inline constexpr int kMostSlots = 3;  // states of a rule

// Constants of an update: computed in fp64, rounded to fp32 once per step.
struct UpdateConstants {
  Rule rule;
  bool has_weight_decay;  // L2 term; if false, the gradient is unchanged
  bool first, nesterov;   // SgdMomentum: first: the buffer becomes the gradient
  bool decoupled;         // NAdam, RAdam: keep in place of weight_decay
  bool adaptive;          // RAdam: divides by the root of the second moment
  float weight_decay;     // L2
  float keep;             // decoupled decay: 1 - lr*wd
  float beta1, beta2;     // of the moments; beta2: RMSprop's alpha, Adadelta's rho
  float new1, new2;       // 1 - beta1, 1 - beta2
  float root2;            // Adam: sqrt(1 - beta2^t)
  float correction2;      // NAdam: 1 - beta2^t
  float eps;
  float negative_step;       // of sharded_optimizer.cpp: -lr, or with a rule's corrections
  float moment_step;         // NAdam: of the first moment; negative_step: of the gradient
  float momentum, undamped;  // SGD: momentum and 1 - dampening
};

// `parameter` is null if there is no low-precision parameter, or if the master is the parameter.
struct UpdateRange {
  float* master;
  float* slots[kMostSlots];
  const void* gradient;
  kernels::Dtype gradient_dtype;
  void* parameter;
  kernels::Dtype parameter_dtype;
};

// With the number of its elements.
struct SizedRange {
  UpdateRange range;
  std::int64_t numel;
};

// Updates elements [begin, end) of the range in this thread with gradient * factor.
void update_range(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end);

}  // namespace zero::kernels
