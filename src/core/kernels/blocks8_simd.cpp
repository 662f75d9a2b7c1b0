// Blocks of 8-bit states with fp32 vectors, compiled for every SIMD target of kernels/simd_targets.h.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/blocks8_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/blocks8_simd.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = zero::kernels::HWY_NAMESPACE;
using simd::Floats;
using V = simd::FloatVector;
using Words = hn::Rebind<std::uint32_t, Floats>;
using Indices = hn::Rebind<std::int32_t, Floats>;
using Bytes = hn::Rebind<std::uint8_t, Floats>;

constexpr std::int64_t kLanes = simd::lanes(Floats());
static_assert(kStateBlock % kLanes == 0);

// 0 and no codes for a block that is too small, NaN for one that is not finite.
HWY_INLINE float maximum_of(const float* in) {
  const Floats d;
  V most = hn::Zero(d), sum = hn::Zero(d);  // the sum of differences is NaN if a value is Inf or NaN
  for (std::int64_t i = 0; i < kStateBlock; i += kLanes) {
    const V value = hn::LoadU(d, in + i);
    most = hn::Max(most, hn::Abs(value));
    sum = hn::Add(sum, hn::Sub(value, value));
  }
  if (!(hn::GetLane(hn::SumOfLanes(d, sum)) == 0)) return std::numeric_limits<float>::quiet_NaN();
  const float maximum = hn::GetLane(hn::MaxOfLanes(d, most));
  return maximum < 0x1p-96f ? 0 : maximum;
}

template <bool kSigned>
HWY_INLINE void encode_block(char* out, const CodeTable& table, const float* in) {
  const Floats d;
  const Words w;
  const float maximum = maximum_of(in);
  std::memcpy(out, &maximum, sizeof maximum);
  auto* const codes = reinterpret_cast<std::uint8_t*>(out) + sizeof maximum;
  if (!(maximum > 0)) {
    std::memset(codes, 0, kStateBlock);
    return;
  }
  const V inverse = hn::Set(d, 1 / maximum);
  const auto first = hn::Set(w, CodeTable::kFirstBits);
  for (std::int64_t i = 0; i < kStateBlock; i += kLanes) {
    const V value = hn::LoadU(d, in + i);
    const auto bits = hn::Max(hn::BitCast(w, hn::Mul(hn::Abs(value), inverse)), first);
    const auto bin = hn::ShiftRight<16>(hn::Sub(bits, first));
    const auto entry = hn::GatherIndex(w, table.entries.data(), hn::BitCast(Indices(), bin));
    const auto from = hn::BitCast(Indices(), hn::And(entry, hn::Set(w, 0x1ffffu)));
    const auto below = hn::RebindMask(w, hn::Gt(from, hn::BitCast(Indices(), hn::And(bits, hn::Set(w, 0xffffu)))));
    auto code = hn::Add(hn::ShiftRight<24>(entry), hn::IfThenZeroElse(below, hn::Set(w, 1u)));
    if constexpr (kSigned) {
      code = hn::Or(code, hn::ShiftLeft<7>(hn::ShiftRight<31>(hn::BitCast(w, value))));
    } else {
      const auto is_zero = hn::RebindMask(w, hn::Eq(value, hn::Zero(d)));
      code = hn::Max(code, hn::IfThenZeroElse(is_zero, hn::Set(w, 1u)));
    }
    hn::StoreU(hn::TruncateTo(Bytes(), code), Bytes(), codes + i);
  }
}

template <bool kSigned>
void encode_all(char* out, const CodeTable& table, const float* in, std::int64_t numel) {
  std::int64_t i = 0;
  for (; i + kStateBlock <= numel; i += kStateBlock, out += kStateBlockBytes) encode_block<kSigned>(out, table, in + i);
  if (i == numel) return;
  float last[kStateBlock] = {};
  std::memcpy(last, in + i, static_cast<std::size_t>(numel - i) * sizeof *in);
  encode_block<kSigned>(out, table, last);
}

void encode_blocks(void* out, const CodeTable& table, bool has_sign, const float* in, std::int64_t numel) {
  if (has_sign) return encode_all<true>(static_cast<char*>(out), table, in, numel);
  encode_all<false>(static_cast<char*>(out), table, in, numel);
}

HWY_INLINE void decode_block(float* out, const CodeTable& table, const char* in) {
  const Floats d;
  float maximum = 0;
  std::memcpy(&maximum, in, sizeof maximum);
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(in) + sizeof maximum;
  const V most = hn::Set(d, maximum);
  for (std::int64_t i = 0; i < kStateBlock; i += kLanes) {
    const auto code = hn::PromoteTo(Indices(), hn::LoadU(Bytes(), codes + i));
    hn::StoreU(hn::Mul(hn::GatherIndex(d, table.values.data(), code), most), d, out + i);
  }
}

void decode_blocks(float* out, const CodeTable& table, const void* in, std::int64_t numel) {
  const auto* from = static_cast<const char*>(in);
  std::int64_t i = 0;
  for (; i + kStateBlock <= numel; i += kStateBlock, from += kStateBlockBytes) decode_block(out + i, table, from);
  if (i == numel) return;
  float last[kStateBlock];
  decode_block(last, table, from);
  std::memcpy(out + i, last, static_cast<std::size_t>(numel - i) * sizeof *out);
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels::simd {
HWY_EXPORT(encode_blocks);
HWY_EXPORT(decode_blocks);
void encode_blocks(void* out, const CodeTable& table, bool has_sign, const float* in, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(encode_blocks)(out, table, has_sign, in, numel);
}
void decode_blocks(float* out, const CodeTable& table, const void* in, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(decode_blocks)(out, table, in, numel);
}
}  // namespace zero::kernels::simd
#endif
