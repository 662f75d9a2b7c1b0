// The seam between sharded_optimizer.cpp (settings, schedules, threads) and update_simd.cpp (one
// compilation per SIMD target): one pass of one update rule over one contiguous range.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

enum class Rule { AdamDecoupled, AdamL2, Sgd, SgdMomentum, Adagrad, Lion };

// Everything an update needs beside the elements; computed in fp64, rounded to fp32 once a step.
struct UpdateConstants {
  Rule rule;
  bool has_weight_decay;  // the L2 term; without it the gradient is not touched
  bool first, nesterov;   // SgdMomentum: the buffer starts as the first gradient
  float weight_decay;     // L2
  float keep;             // decoupled decay: 1 - lr*wd
  float beta1, beta2;     // Adam, Lion
  float new1, new2;       // 1 - beta1, 1 - beta2
  float root2;            // Adam: sqrt(1 - beta2^t)
  float eps;
  float negative_step;       // Adam: -lr / (1 - beta1^t); others: -lr, with Adagrad's decay
  float momentum, undamped;  // SGD: momentum and 1 - dampening
};

// `parameter` is null if there is no compute copy (or if it is the master itself).
struct UpdateRange {
  float* master;
  float* slots[2];
  const void* gradient;
  kernels::Dtype gradient_dtype;
  void* parameter;
  kernels::Dtype parameter_dtype;
};

// Elements [begin, end) of the range, on this thread. The gradient is multiplied by `factor` first.
void update_range(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end);

}  // namespace zero::kernels
