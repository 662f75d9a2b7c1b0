// Values of any dtype as fp32 vectors and back, with the dtype known at run time, and stochastic rounding: the vectors
// of cuda/random_bits.h, bit for bit. Included once per target by files with run-time dispatch, after simd_targets.h.
#if defined(ZERO_KERNELS_ROUNDING_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_ROUNDING_INL_H
#undef ZERO_KERNELS_ROUNDING_INL_H
#else
#define ZERO_KERNELS_ROUNDING_INL_H
#endif

#include "kernels/rounding_words.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {

using Words = hn::Rebind<std::uint32_t, Floats>;
using WordVector = hn::Vec<Words>;

HWY_INLINE WordVector word(std::uint32_t value) { return hn::Set(Words(), value); }

// Elements [i, i + lanes) of memory of a dtype; stored to the nearest.
HWY_INLINE FloatVector load_any(Dtype dtype, const void* from, std::int64_t i) {
  const auto* const narrow = static_cast<const std::uint16_t*>(from);
  if (dtype == Dtype::F32) return hn::LoadU(Floats(), static_cast<const float*>(from) + i);
  if (dtype == Dtype::BF16) return load<Dtype::BF16>(Floats(), narrow + i);
  return load<Dtype::F16>(Floats(), narrow + i);
}
HWY_INLINE void store_any(Dtype dtype, FloatVector value, void* to, std::int64_t i) {
  auto* const narrow = static_cast<std::uint16_t*>(to) + i;
  if (dtype == Dtype::F32) return hn::StoreU(value, Floats(), static_cast<float*>(to) + i);
  if (dtype == Dtype::BF16) return store<Dtype::BF16>(Floats(), value, narrow);
  store<Dtype::F16>(Floats(), value, narrow);
}

// With one key; 0: to the nearest.
class Rounding {
 public:
  explicit HWY_INLINE Rounding(std::uint64_t key)
      : at_random_(key != 0),
        low_(word(static_cast<std::uint32_t>(key))),
        high_(word(static_cast<std::uint32_t>(key >> 32))),
        mix1_(word(kRoundingWords.mix1)),
        mix2_(word(kRoundingWords.mix2)),
        third_(word(kRoundingWords.third)),
        fourth_(word(kRoundingWords.fourth)),
        half_(word(kRoundingWords.half)),
        quiet_(word(kRoundingWords.quiet)),
        one_(word(kRoundingWords.one)),
        below_half_(word(kRoundingWords.below_half)) {}
  // random_bits(key, element) of elements in a row.
  HWY_INLINE WordVector bits(std::int64_t first) const {
    if (!at_random_) return hn::Zero(Words());
    auto x = hn::Xor(hn::Iota(Words(), static_cast<std::uint32_t>(first)), low_);
    x = hn::Add(hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), mix1_), high_);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), mix2_);
    return hn::Xor(x, hn::ShiftRight<16>(x));
  }
  // 16 bits: rounded by draw_of(bits, kValue).
  template <int kValue>
  HWY_INLINE void store(Dtype dtype, FloatVector value, WordVector bits, void* to, std::int64_t i) const {
    auto* const narrow = static_cast<std::uint16_t*>(to) + i;
    if (dtype == Dtype::BF16) return store_bf16(value, at_random_ ? draw<kValue>(bits) : nearest_bf16(value), narrow);
    if (dtype == Dtype::F32 || !at_random_) return store_any(dtype, value, to, i);
    store_f16(value, draw<kValue>(bits), narrow);
  }

 private:
  template <int kValue>
  HWY_INLINE WordVector draw(WordVector bits) const {
    if constexpr (kValue == 0) return hn::And(bits, half_);
    if constexpr (kValue == 1) return hn::ShiftRight<16>(bits);
    return hn::ShiftRight<16>(hn::Mul(bits, kValue == 2 ? third_ : fourth_));
  }

  // What rounds to the nearest, to the even one of two, if it is drawn.
  HWY_INLINE WordVector nearest_bf16(FloatVector value) const {
    return hn::Add(hn::And(hn::ShiftRight<16>(hn::BitCast(Words(), value)), one_), below_half_);
  }

  HWY_INLINE void store_bf16(FloatVector value, WordVector draws, std::uint16_t* to) const {
    const hn::Rebind<std::uint16_t, Floats> d16;
    const auto bits = hn::BitCast(Words(), value);
    const auto is_nan = hn::RebindMask(Words(), hn::IsNaN(value));
    const auto rounded = hn::IfThenElse(is_nan, hn::Or(bits, quiet_), hn::Add(bits, draws));
    hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(rounded)), d16, to);
  }

  HWY_INLINE void store_f16(FloatVector value, WordVector draws, std::uint16_t* to) const {
    const Floats f;
    const auto size = hn::Abs(value);
    const auto up = hn::And(hn::Add(hn::BitCast(Words(), size), hn::ShiftRight<3>(draws)), word(~0x1fffu));
    const auto normal = hn::BitCast(f, hn::Min(up, word(0x477fe000u)));
    const auto scaled = hn::Mul(size, hn::Set(f, 0x1p24f));
    const auto whole = hn::Floor(scaled);
    const auto below =
        hn::Mul(hn::ConvertTo(f, hn::BitCast(hn::Rebind<std::int32_t, Floats>(), draws)), hn::Set(f, 0x1p-16f));
    const auto one_more = hn::IfThenElseZero(hn::Lt(below, hn::Sub(scaled, whole)), hn::Set(f, 1.0f));
    const auto small = hn::Mul(hn::Add(whole, one_more), hn::Set(f, 0x1p-24f));
    const auto finite = hn::CopySign(hn::IfThenElse(hn::Lt(size, hn::Set(f, 0x1p-14f)), small, normal), value);
    // A value that fp16 has, so that the store's own rounding changes nothing.
    kernels::HWY_NAMESPACE::store<Dtype::F16>(f, hn::IfThenElse(hn::Lt(size, hn::Set(f, 65520.0f)), finite, value), to);
  }

  bool at_random_;
  WordVector low_, high_, mix1_, mix2_, third_, fourth_, half_, quiet_, one_, below_half_;
};

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#endif
