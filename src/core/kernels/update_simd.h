// Interface between sharded_optimizer.cpp (settings, schedules, threads) and update_simd.cpp (compiled once per SIMD
// target): one update rule on one contiguous range.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

enum class Rule { AdamDecoupled, AdamL2, Sgd, SgdMomentum, Adagrad, Lion };

// Constants of an update: computed in fp64, rounded to fp32 once per step.
struct UpdateConstants {
  Rule rule;
  bool has_weight_decay;  // L2 term; if false, the gradient is unchanged
  bool first, nesterov;   // SgdMomentum: first: the buffer becomes the gradient
  float weight_decay;     // L2
  float keep;             // decoupled decay: 1 - lr*wd
  float beta1, beta2;     // Adam, Lion
  float new1, new2;       // 1 - beta1, 1 - beta2
  float root2;            // Adam: sqrt(1 - beta2^t)
  float eps;
  float negative_step;       // Adam: -lr / (1 - beta1^t); others: -lr, with Adagrad's decay
  float momentum, undamped;  // SGD: momentum and 1 - dampening
};

// `parameter` is null if there is no low-precision parameter, or if the master is the parameter.
struct UpdateRange {
  float* master;
  float* slots[2];
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
