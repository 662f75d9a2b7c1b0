// Conversions between the dtypes of the step program, libtorch and the kernels.
#pragma once
#include <c10/core/ScalarType.h>

#include "config/settings.h"
#include "kernels/elementwise.h"
#include "step/facts.h"

namespace zero::engine {

inline at::ScalarType scalar_type(step::Dtype dtype) {
  switch (dtype) {
    case step::Dtype::U8:
      return at::kByte;
    case step::Dtype::F16:
      return at::kHalf;
    case step::Dtype::BF16:
      return at::kBFloat16;
    case step::Dtype::F32:
      break;
  }
  return at::kFloat;
}

inline at::ScalarType scalar_type(config::Precision precision) { return scalar_type(step::dtype_of(precision)); }

inline step::Dtype step_dtype(at::ScalarType type) {
  return type == at::kBFloat16 ? step::Dtype::BF16
         : type == at::kHalf   ? step::Dtype::F16
         : type == at::kByte   ? step::Dtype::U8
                               : step::Dtype::F32;
}

inline kernels::Dtype kernels_dtype(step::Dtype dtype) {
  return dtype == step::Dtype::BF16  ? kernels::Dtype::BF16
         : dtype == step::Dtype::F16 ? kernels::Dtype::F16
                                     : kernels::Dtype::F32;
}

inline kernels::Dtype dtype_of(at::ScalarType type) { return kernels_dtype(step_dtype(type)); }

}  // namespace zero::engine
