// Blocks of 8-bit states as fp32 vectors and back. Included once per target by files with run-time dispatch, after
// simd_targets.h.
#if defined(ZERO_KERNELS_BLOCKS8_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_BLOCKS8_INL_H
#undef ZERO_KERNELS_BLOCKS8_INL_H
#else
#define ZERO_KERNELS_BLOCKS8_INL_H
#endif

#include <limits>

#include "kernels/blocks8.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {

using BlockWords = hn::Rebind<std::uint32_t, Floats>;
using BlockIntegers = hn::Rebind<std::int32_t, Floats>;
using BlockBytes = hn::Rebind<std::uint8_t, Floats>;
static_assert(kStateBlock % lanes(Floats()) == 0);

HWY_INLINE hn::Vec<BlockWords> block_word(std::uint32_t value) { return hn::Set(BlockWords(), value); }

// The lowest byte of each.
HWY_INLINE hn::Vec<BlockBytes> lowest_bytes(hn::Vec<BlockWords> words) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  return hn::Vec<BlockBytes>(_mm512_cvtepi32_epi8(words.raw));  // Highway takes two shuffles
#else
  return hn::TruncateTo(BlockBytes(), words);
#endif
}

// Values of a block with this maximum.
template <CodeMap kMap>
class BlockDecoder {
 public:
  explicit HWY_INLINE BlockDecoder(float maximum)
      : maximum_(hn::Set(Floats(), maximum)),
        zero_(hn::Set(Floats(), -shares_of(kMap).zero * maximum)),
        offset_(block_word(shares_of(kMap).offset)),
        one_(block_word(shares_of(kMap).one)),
        magnitude_(block_word(shares_of(kMap).magnitude)),
        sign_(block_word(shares_of(kMap).sign)) {}
  HWY_INLINE FloatVector operator()(const std::uint8_t* codes) const {
    const Floats d;
    const auto code = hn::PromoteTo(BlockWords(), hn::LoadU(BlockBytes(), codes));
    if constexpr (kMap == CodeMap::Unsigned) return magnitude(code);
    const auto sign = hn::And(hn::ShiftLeft<24>(code), sign_);
    return hn::Or(magnitude(hn::And(code, magnitude_)), hn::BitCast(d, sign));
  }

 private:
  HWY_INLINE FloatVector magnitude(hn::Vec<BlockWords> code) const {
    const Floats d;
    const auto step = hn::ConvertTo(d, hn::BitCast(BlockIntegers(), hn::Add(code, one_)));
    const auto share = hn::Add(hn::ShiftLeft<2>(hn::BitCast(BlockWords(), step)), offset_);
    return fma(hn::BitCast(d, share), maximum_, zero_);
  }
  FloatVector maximum_, zero_;
  hn::Vec<BlockWords> offset_, one_, magnitude_, sign_;
};

// The largest magnitude of values, found by their bits: those of Inf and NaN are larger than others.
class LargestMagnitude {
 public:
  HWY_INLINE LargestMagnitude() : most_(hn::Zero(BlockWords())) {}
  // Gives the magnitudes.
  HWY_INLINE FloatVector add(FloatVector value) {
    const auto size = hn::Abs(value);
    most_ = hn::Max(most_, hn::BitCast(BlockWords(), size));
    return size;
  }
  // What a block stores: 0 if it is too small, NaN if it is not finite.
  HWY_INLINE float maximum() const {
    const auto most = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(BlockWords(), most_)));
    if (!(most <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
    return most < 0x1p-96f ? 0 : most;
  }

 private:
  hn::Vec<BlockWords> most_;
};

// Codes of a block with this maximum, which is not 0 or NaN. In a map without signs, of magnitudes.
template <CodeMap kMap>
class BlockEncoder {
 public:
  explicit HWY_INLINE BlockEncoder(float maximum)
      : inverse_(hn::Set(Floats(), 1 / maximum)),
        zero_(hn::Set(Floats(), shares_of(kMap).zero)),
        back_(block_word(shares_of(kMap).back)),
        one_(block_word(shares_of(kMap).one)),
        codes_(block_word(shares_of(kMap).codes)),
        sign_(block_word(shares_of(kMap).sign >> 24)) {}
  HWY_INLINE void operator()(std::uint8_t* codes, FloatVector value) const {
    const Floats d;
    const auto size = kMap == CodeMap::Signed ? hn::Abs(value) : value;
    const auto share = fma(size, inverse_, zero_);
    const auto bits = hn::ShiftRight<2>(hn::BitCast(BlockWords(), share));
    const auto step = hn::BitCast(d, hn::Add(bits, back_));
    // Rounds to an integer; its lowest 8 bits are the step less 1.
    auto code = hn::BitCast(BlockWords(), hn::Add(step, hn::Set(d, 0x1p23f - 1)));
    if constexpr (kMap == CodeMap::Signed) {
      code = hn::Or(code, hn::And(hn::ShiftRight<24>(hn::BitCast(BlockWords(), value)), sign_));
    } else {  // code 1 at least, if it is not 0
      const auto least = hn::Min(hn::BitCast(BlockWords(), size), one_);
      code = hn::Max(code, hn::Add(least, codes_));
    }
    hn::StoreU(lowest_bytes(code), BlockBytes(), codes);
  }

 private:
  FloatVector inverse_, zero_;
  hn::Vec<BlockWords> back_, one_, codes_, sign_;
};

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#endif
