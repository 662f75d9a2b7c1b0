// The dtypes of parameters, gradients and optimizer states.
#pragma once
#include <cstdint>

#include "config/settings.h"
#include "kernels/blocks8.h"

namespace zero::step {

enum class Dtype : std::uint8_t { U8, F16, BF16, F32 };  // U8: bytes; of optimizer states blocks of 8-bit codes
// Bytes of one element.
constexpr int width(Dtype dtype) { return dtype == Dtype::F32 ? 4 : dtype == Dtype::U8 ? 1 : 2; }

Dtype dtype_of(config::Precision precision);
// Of optimizer states.
Dtype slots_of(const config::Settings& settings);

// As FSDP2's MixedPrecisionPolicy, and the dtypes of what the optimizer stores.
struct MixedPrecisionPolicy {
  Dtype param = Dtype::F32;   // parameters and computation
  Dtype reduce = Dtype::F32;  // gradients during reduction
  Dtype grad = Dtype::F32;    // stored, accumulated gradients
  Dtype master = Dtype::F32;  // fp32, or as param: then the parameter needs no other copy
  Dtype slots = Dtype::F32;   // optimizer states
};

// Elements of an optimizer state that are stored together.
constexpr std::int64_t slot_block(Dtype dtype) { return dtype == Dtype::U8 ? kernels::kStateBlock : 1; }
// The elements of `dtype` that store an optimizer state of `numel` elements: more bytes if it is in blocks.
constexpr std::int64_t slot_numel(Dtype dtype, std::int64_t numel) {
  return dtype == Dtype::U8 ? kernels::state_block_bytes(numel) : numel;
}

}  // namespace zero::step
