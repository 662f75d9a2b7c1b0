// Interface between sharded_optimizer.cpp (settings, schedules, threads) and the kernels: one update rule on one
// contiguous range. update_simd.cpp is compiled once per SIMD target.
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

// `parameter` is null if there is no low-precision parameter, or if the master is the parameter. It gets the master's
// new value, rounded to nearest even.
struct UpdateRange {
  void* master;
  void* slots[kMostSlots];  // those that the rule has; the others null
  const void* gradient;
  Dtype gradient_dtype;
  void* parameter;
  Dtype parameter_dtype;
  Dtype master_dtype = Dtype::F32, slot_dtype = Dtype::F32;
  // Slots are in 8 bits (blocks8.h), the first with signs, and begin with a block; slot_dtype has no meaning. Not on
  // GPUs.
  bool slots_in_blocks = false;
  // Of 16-bit masters and slots: 0: rounded to nearest even; else stochastically, by [Note: random bits] in
  // cuda/random_bits.h, with the position of the range's first element in its parameter.
  std::uint64_t key = 0;
  std::int64_t first_element = 0;

  bool is_fp32() const { return master_dtype == Dtype::F32 && slot_dtype == Dtype::F32 && !slots_in_blocks; }
};

// With the number of its elements.
struct SizedRange {
  UpdateRange range;
  std::int64_t numel;
};

// Updates elements [begin, end) of the range in this thread with gradient * factor. begin: with slots_in_blocks of a
// block.
void update_range(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end);

// The same for a range that is_fp32().
void update_fp32_range(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
                       std::int64_t end);

// The key of one update of a parameter; not 0. `parameter` is a hash of its name.
std::uint64_t rounding_key(std::uint64_t seed, std::int64_t update, std::uint64_t parameter);

}  // namespace zero::kernels
