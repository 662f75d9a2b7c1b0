// Blocks of 8-bit states with fp32 vectors, compiled for every SIMD target of kernels/simd_targets.h.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/blocks8_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

#include "kernels/blocks8-inl.h"
#include "kernels/blocks8.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = zero::kernels::HWY_NAMESPACE;
using simd::Floats;

constexpr std::int64_t kLanes = simd::lanes(Floats());

template <CodeMap kMap>
void encode_all(char* out, const float* in, std::int64_t numel) {
  const auto encode = [&](const float* values) {
    simd::LargestMagnitude largest;
    for (std::int64_t i = 0; i < kStateBlock; i += kLanes) largest.add(hn::LoadU(Floats(), values + i));
    const float maximum = largest.maximum();
    std::memcpy(out, &maximum, sizeof maximum);
    auto* const codes = reinterpret_cast<std::uint8_t*>(out) + sizeof maximum;
    out += kStateBlockBytes;
    if (!(maximum > 0)) {
      std::memset(codes, 0, kStateBlock);
      return;
    }
    const simd::BlockEncoder<kMap> encoder(maximum);
    for (std::int64_t i = 0; i < kStateBlock; i += kLanes) {
      const auto value = hn::LoadU(Floats(), values + i);
      encoder(codes + i, kMap == CodeMap::Signed ? value : hn::Abs(value));
    }
  };
  std::int64_t i = 0;
  for (; i + kStateBlock <= numel; i += kStateBlock) encode(in + i);
  if (i == numel) return;
  float last[kStateBlock] = {};
  std::memcpy(last, in + i, static_cast<std::size_t>(numel - i) * sizeof *in);
  encode(last);
}

void encode_blocks(void* out, CodeMap map, const float* in, std::int64_t numel) {
  if (map == CodeMap::Signed) return encode_all<CodeMap::Signed>(static_cast<char*>(out), in, numel);
  encode_all<CodeMap::Unsigned>(static_cast<char*>(out), in, numel);
}

template <CodeMap kMap>
void decode_all(float* out, const char* in, std::int64_t numel) {
  const auto decode = [&](float* values) {
    float maximum = 0;
    std::memcpy(&maximum, in, sizeof maximum);
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(in) + sizeof maximum;
    const simd::BlockDecoder<kMap> decoder(maximum);
    for (std::int64_t i = 0; i < kStateBlock; i += kLanes) hn::StoreU(decoder(codes + i), Floats(), values + i);
    in += kStateBlockBytes;
  };
  std::int64_t i = 0;
  for (; i + kStateBlock <= numel; i += kStateBlock) decode(out + i);
  if (i == numel) return;
  float last[kStateBlock];
  decode(last);
  std::memcpy(out + i, last, static_cast<std::size_t>(numel - i) * sizeof *out);
}

void decode_blocks(float* out, CodeMap map, const void* in, std::int64_t numel) {
  if (map == CodeMap::Signed) return decode_all<CodeMap::Signed>(out, static_cast<const char*>(in), numel);
  decode_all<CodeMap::Unsigned>(out, static_cast<const char*>(in), numel);
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels {
HWY_EXPORT(encode_blocks);
HWY_EXPORT(decode_blocks);
void encode_blocks(void* out, CodeMap map, const float* in, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(encode_blocks)(out, map, in, numel);
}
void decode_blocks(float* out, CodeMap map, const void* in, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(decode_blocks)(out, map, in, numel);
}
}  // namespace zero::kernels
#endif
