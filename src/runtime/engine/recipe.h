// The dtypes of a run: of parameters and compute, of gradients kept, of gradients on the wire.
// Masters and moments are fp32 always; with fp32 parameters the parameter is its own master.
#pragma once
#include <c10/core/ScalarType.h>

#include "config/settings.h"
#include "kernels/elementwise.h"

namespace zero::engine {

struct Recipe {
  at::ScalarType parameter;  // compute dtype
  at::ScalarType gradient;   // of the kept, accumulated gradient
  at::ScalarType wire;       // of a gradient while it is reduced
  bool separate_master() const { return parameter != at::kFloat; }
};

inline at::ScalarType scalar_type(config::Precision precision) {
  switch (precision) {
    case config::Precision::Bf16:
      return at::kBFloat16;
    case config::Precision::Fp16:
      return at::kHalf;
    case config::Precision::Fp32:
      break;
  }
  return at::kFloat;
}

inline kernels::Dtype dtype_of(at::ScalarType type) {
  return type == at::kBFloat16 ? kernels::Dtype::BF16 : type == at::kHalf ? kernels::Dtype::F16 : kernels::Dtype::F32;
}

// Accumulation over several micro-batches loses bits in 16-bit types, so it is fp32 unless asked.
inline Recipe recipe_of(const config::Settings& settings, std::int64_t accumulation_steps) {
  Recipe recipe;
  recipe.parameter = scalar_type(settings.precision);
  recipe.gradient = settings.grad_accum_dtype ? scalar_type(*settings.grad_accum_dtype)
                    : accumulation_steps > 1  ? at::kFloat
                                              : recipe.parameter;
  recipe.wire = settings.communication_dtype ? scalar_type(*settings.communication_dtype) : recipe.parameter;
  return recipe;
}

}  // namespace zero::engine
