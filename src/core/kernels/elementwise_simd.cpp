// The element-wise kernels, written once with fp32 vectors and compiled for every SIMD target of simd_targets.h. A tail
// is processed by the same vector code on a padded copy, so it has the same bits. Threads and argument checks are in
// elementwise.cpp. Build with -ffp-contract=off.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise_simd.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/elementwise_simd.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {

template <Dtype kIn>
HWY_INLINE const Stored<kIn>* part_at(const void* part, std::int64_t offset) {
  return static_cast<const Stored<kIn>*>(part) + offset;
}

// to[i] = round(from[i] + add[i]), or round(from[i]) without `add`, for whole vectors. Returns the number of elements
// processed. May be in place.
template <Dtype kOut, Dtype kFrom, Dtype kAdd, bool kStream = false>
HWY_INLINE std::int64_t add_vectors(Stored<kOut>* to, const Stored<kFrom>* from, const Stored<kAdd>* add,
                                    std::int64_t numel) {
  const Floats d;
  constexpr std::int64_t kLanes = lanes(Floats());
  std::int64_t i = 0;
  if (add == nullptr) {
    for (; i + kLanes <= numel; i += kLanes) store<kOut, kStream>(d, load<kFrom>(d, from + i), to + i);
  } else {
    for (; i + kLanes <= numel; i += kLanes)
      store<kOut, kStream>(d, hn::Add(load<kFrom>(d, from + i), load<kAdd>(d, add + i)), to + i);
  }
  return i;
}

// Number of elements of `width` bytes before the next cache line, at most `numel`.
HWY_INLINE std::int64_t before_line(const void* to, std::int64_t width, std::int64_t numel) {
  constexpr std::int64_t kLine = 64;
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % kLine);
  return HWY_MIN(numel, (kLine - past) % kLine / width);
}

template <Dtype kOut, Dtype kIn, bool kStream>
void sum_parts_of(void* out, const void* const* parts, int num_parts, std::int64_t offset, std::int64_t numel) {
  const Floats d;
  constexpr std::int64_t kLanes = lanes(Floats()), kTile = 2048;
  alignas(64) float tile[kTile];
  auto* to = static_cast<Stored<kOut>*>(out) + offset;
  const auto sum_some = [&](std::int64_t first, std::int64_t count) {
    auto sum = load_some<kIn>(d, part_at<kIn>(parts[0], offset + first), count);
    for (int p = 1; p < num_parts; ++p)
      sum = hn::Add(sum, load_some<kIn>(d, part_at<kIn>(parts[p], offset + first), count));
    store_some<kOut>(d, sum, to + first, count);
  };
  std::int64_t i = 0;
  if constexpr (kStream) {
    const auto head = before_line(to, sizeof *to, numel);
    for (; i < head; i += HWY_MIN(kLanes, head - i)) sum_some(i, HWY_MIN(kLanes, head - i));
  }
  while (numel - i >= kLanes) {
    const auto count = HWY_MIN(kTile, numel - i);
    const auto at = [&](int p) { return part_at<kIn>(parts[p], offset + i); };
    if (num_parts == 1) {
      i += add_vectors<kOut, kIn, kIn, kStream>(to + i, at(0), nullptr, count);
    } else if (num_parts == 2) {
      i += add_vectors<kOut, kIn, kIn, kStream>(to + i, at(0), at(1), count);
    } else {
      add_vectors<Dtype::F32, kIn, kIn>(tile, at(0), at(1), count);
      for (int p = 2; p + 1 < num_parts; ++p) add_vectors<Dtype::F32, Dtype::F32, kIn>(tile, tile, at(p), count);
      i += add_vectors<kOut, Dtype::F32, kIn, kStream>(to + i, tile, at(num_parts - 1), count);
    }
  }
  if (i < numel) sum_some(i, numel - i);
  if constexpr (kStream) hwy::FlushStream();
}

void copy_streaming(void* to, const void* from, std::int64_t bytes) {
  using Bytes = hn::ScalableTag<std::uint8_t>;
  const Bytes d;
  constexpr std::int64_t kLanes = lanes(Bytes());
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  const auto head = before_line(to, 1, bytes);
  std::memcpy(target, source, static_cast<std::size_t>(head));
  std::int64_t i = head;
  if constexpr (kLanes > 1) {  // scalar code has no streaming stores
    for (; i + 4 * kLanes <= bytes; i += 4 * kLanes) {
      const auto a = hn::LoadU(d, source + i), b = hn::LoadU(d, source + i + kLanes),
                 c = hn::LoadU(d, source + i + 2 * kLanes), e = hn::LoadU(d, source + i + 3 * kLanes);
      hn::Stream(a, d, target + i);
      hn::Stream(b, d, target + i + kLanes);
      hn::Stream(c, d, target + i + 2 * kLanes);
      hn::Stream(e, d, target + i + 3 * kLanes);
    }
    hwy::FlushStream();
  }
  std::memcpy(target + i, source + i, static_cast<std::size_t>(bytes - i));
}

template <Dtype kAcc, Dtype kIn>
void accumulate_of(void* acc, const void* in, std::int64_t numel) {
  const Floats d;
  constexpr std::int64_t kLanes = lanes(Floats());
  auto* to = static_cast<Stored<kAcc>*>(acc);
  const auto* from = static_cast<const Stored<kIn>*>(in);
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes)
    store<kAcc>(d, hn::Add(load<kAcc>(d, to + i), load<kIn>(d, from + i)), to + i);
  if (const auto count = numel - i; count > 0)
    store_some<kAcc>(d, hn::Add(load_some<kAcc>(d, to + i, count), load_some<kIn>(d, from + i, count)), to + i, count);
}

template <Dtype kDtype>
void scale_of(void* data, float factor, std::int64_t numel) {
  const Floats d;
  constexpr std::int64_t kLanes = lanes(Floats());
  auto* to = static_cast<Stored<kDtype>*>(data);
  const auto by = hn::Set(d, factor);
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) store<kDtype>(d, hn::Mul(load<kDtype>(d, to + i), by), to + i);
  if (const auto count = numel - i; count > 0)
    store_some<kDtype>(d, hn::Mul(load_some<kDtype>(d, to + i, count), by), to + i, count);
}

// The product of two fp32 values is exact in fp64, so fused and separate multiply-adds agree.
template <Dtype kIn>
void sum_of_squares_of(const void* in, std::int64_t numel, double* sums) {
  using simd::kSquareLanes;
  const hn::ScalableTag<double> d64;
  const hn::Rebind<float, decltype(d64)> d32;
  constexpr int kLanes = static_cast<int>(lanes(hn::ScalableTag<double>()));
  constexpr int kVectors = kSquareLanes / kLanes;
  hn::Vec<decltype(d64)> sum[kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) sum[k] = hn::LoadU(d64, sums + k * kLanes);
  const auto* from = static_cast<const Stored<kIn>*>(in);
  Stored<kIn> padded[kSquareLanes] = {};
  for (std::int64_t i = 0; i < numel; i += kSquareLanes) {
    const auto* row = from + i;
    if (numel - i < kSquareLanes) {
      std::memcpy(padded, row, static_cast<std::size_t>(numel - i) * sizeof *row);
      row = padded;
    }
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const auto x = hn::PromoteTo(d64, load<kIn>(d32, row + k * kLanes));
      sum[k] = hn::Add(sum[k], hn::Mul(x, x));
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) hn::StoreU(sum[k], d64, sums + k * kLanes);
}

template <Dtype kOut, bool kStream>
void sum_parts_to(void* out, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t offset,
                  std::int64_t numel) {
  switch (in_dtype) {
    case Dtype::F32:
      return sum_parts_of<kOut, Dtype::F32, kStream>(out, parts, num_parts, offset, numel);
    case Dtype::BF16:
      return sum_parts_of<kOut, Dtype::BF16, kStream>(out, parts, num_parts, offset, numel);
    case Dtype::F16:
      return sum_parts_of<kOut, Dtype::F16, kStream>(out, parts, num_parts, offset, numel);
  }
}

template <bool kStream>
void sum_parts_by(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
                  std::int64_t offset, std::int64_t numel) {
  switch (out_dtype) {
    case Dtype::F32:
      return sum_parts_to<Dtype::F32, kStream>(out, parts, num_parts, in_dtype, offset, numel);
    case Dtype::BF16:
      return sum_parts_to<Dtype::BF16, kStream>(out, parts, num_parts, in_dtype, offset, numel);
    case Dtype::F16:
      return sum_parts_to<Dtype::F16, kStream>(out, parts, num_parts, in_dtype, offset, numel);
  }
}

void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t offset,
               std::int64_t numel, Stores stores) {
  const auto sum = stores == Stores::Streaming ? sum_parts_by<true> : sum_parts_by<false>;
  sum(out, out_dtype, parts, num_parts, in_dtype, offset, numel);
}

template <Dtype kAcc>
void accumulate_to(void* acc, const void* in, Dtype in_dtype, std::int64_t numel) {
  switch (in_dtype) {
    case Dtype::F32:
      return accumulate_of<kAcc, Dtype::F32>(acc, in, numel);
    case Dtype::BF16:
      return accumulate_of<kAcc, Dtype::BF16>(acc, in, numel);
    case Dtype::F16:
      return accumulate_of<kAcc, Dtype::F16>(acc, in, numel);
  }
}

void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  switch (acc_dtype) {
    case Dtype::F32:
      return accumulate_to<Dtype::F32>(acc, in, in_dtype, numel);
    case Dtype::BF16:
      return accumulate_to<Dtype::BF16>(acc, in, in_dtype, numel);
    case Dtype::F16:
      return accumulate_to<Dtype::F16>(acc, in, in_dtype, numel);
  }
}

void scale(void* data, Dtype dtype, float factor, std::int64_t numel) {
  switch (dtype) {
    case Dtype::F32:
      return scale_of<Dtype::F32>(data, factor, numel);
    case Dtype::BF16:
      return scale_of<Dtype::BF16>(data, factor, numel);
    case Dtype::F16:
      return scale_of<Dtype::F16>(data, factor, numel);
  }
}

void sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, double* sums) {
  switch (in_dtype) {
    case Dtype::F32:
      return sum_of_squares_of<Dtype::F32>(in, numel, sums);
    case Dtype::BF16:
      return sum_of_squares_of<Dtype::BF16>(in, numel, sums);
    case Dtype::F16:
      return sum_of_squares_of<Dtype::F16>(in, numel, sums);
  }
}

std::int64_t target() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels {
HWY_EXPORT(sum_parts);
HWY_EXPORT(copy_streaming);
HWY_EXPORT(accumulate);
HWY_EXPORT(scale);
HWY_EXPORT(sum_of_squares);
HWY_EXPORT(target);

namespace simd {

void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t offset,
               std::int64_t numel, Stores stores) {
  HWY_DYNAMIC_DISPATCH(sum_parts)(out, out_dtype, parts, num_parts, in_dtype, offset, numel, stores);
}
void copy_streaming(void* to, const void* from, std::int64_t bytes) {
  HWY_DYNAMIC_DISPATCH(copy_streaming)(to, from, bytes);
}
void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(accumulate)(acc, acc_dtype, in, in_dtype, numel);
}
void scale(void* data, Dtype dtype, float factor, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(scale)(data, dtype, factor, numel);
}
void sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, double* sums) {
  HWY_DYNAMIC_DISPATCH(sum_of_squares)(in, in_dtype, numel, sums);
}
std::int64_t supported_targets() { return hwy::SupportedTargets() & HWY_TARGETS; }
std::int64_t chosen_target() { return HWY_DYNAMIC_DISPATCH(target)(); }

}  // namespace simd
}  // namespace zero::kernels
#endif
