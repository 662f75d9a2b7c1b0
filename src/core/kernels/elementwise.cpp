// Argument checks, division of large ranges among OpenMP threads, and the fixed order in which partial square sums are
// added. The arithmetic is in elementwise_simd.cpp.
#include "kernels/elementwise.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef __SANITIZE_THREAD__
#include <thread>
#endif

#include "base/check.h"
#include "kernels/elementwise_simd.h"
#include "kernels/simd_targets.h"

#include <hwy/targets.h>

// Of libgomp, GCC's OpenMP run time; its header does not declare it.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

namespace zero::kernels {
namespace {

// Ranges are divided at multiples of this many elements: whole cache lines and vectors for every dtype.
constexpr std::int64_t kGrain = 1024;

template <class Pointer>
Pointer at(Pointer data, Dtype dtype, std::int64_t i) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(data) + i * static_cast<std::int64_t>(size_of(dtype));
}

void check_range(const char* where, const void* a, const void* b, std::int64_t numel) {
  ZERO_CHECK(numel >= 0, "[base::", where, "] got ", numel, " elements, expected 0 or more");
  ZERO_CHECK(numel == 0 || (a != nullptr && b != nullptr), "[base::", where, "] got a null pointer for ", numel,
             " elements");
}

double piece_sum(const void* in, Dtype dtype, std::int64_t numel) {
  double sums[simd::kSquareLanes] = {};
  simd::sum_of_squares(in, dtype, numel, sums);
  for (int width = simd::kSquareLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

bool non_finite(const void* in, Dtype dtype, std::int64_t i) {
  if (dtype == Dtype::F32) return !std::isfinite(static_cast<const float*>(in)[i]);
  const int exponent = dtype == Dtype::BF16 ? 0x7f80 : 0x7c00;
  return (static_cast<const std::uint16_t*>(in)[i] & exponent) == exponent;
}

// Calls member(thread, threads) once on each of several threads and waits for them.
template <class Member>
void run_team(int threads, const Member& member) {
#ifdef __SANITIZE_THREAD__
  // libgomp synchronizes by atomics that ThreadSanitizer does not see; it can check plain threads.
  std::vector<std::thread> team;
  for (int thread = 0; thread < threads; ++thread) team.emplace_back(member, thread, threads);
  for (auto& thread : team) thread.join();
#else
  // `#pragma omp parallel num_threads(threads)` as GCC compiles it: clang's would call another run time than
  // libtorch's.
  const auto call = [](void* data) noexcept {
    (*static_cast<const Member*>(data))(omp_get_thread_num(), omp_get_num_threads());
  };
  GOMP_parallel(call, const_cast<Member*>(&member), static_cast<unsigned>(threads), 0);
#endif
}

}  // namespace

const char* dtype_name(Dtype dtype) { return dtype == Dtype::F32 ? "fp32" : dtype == Dtype::BF16 ? "bf16" : "fp16"; }

void parallel_ranges(std::int64_t numel, const std::function<void(std::int64_t, std::int64_t)>& range,
                     std::int64_t max_serial) {
  if (numel <= 0) return;
  const int threads = numel > max_serial && !omp_in_parallel() ? omp_get_max_threads() : 1;
  if (threads == 1) return range(0, numel);
  run_team(threads, [&](std::int64_t me, std::int64_t team) {
    const std::int64_t grains = (numel + kGrain - 1) / kGrain;
    const auto begin = grains * me / team * kGrain, end = std::min(numel, grains * (me + 1) / team * kGrain);
    if (begin < end) range(begin, end);
  });
}

void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t numel,
               Stores stores) {
  ZERO_CHECK(num_parts >= 1 && parts != nullptr, "[base::sum_parts] got ", num_parts, " parts, expected 1 or more");
  for (int p = 0; p < num_parts; ++p) check_range("sum_parts", out, parts[p], numel);
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    simd::sum_parts(out, out_dtype, parts, num_parts, in_dtype, begin, end - begin, stores);
  });
}

void copy(void* to, const void* from, std::int64_t bytes, Stores stores) {
  check_range("copy", to, from, bytes);
  if (to == from) return;
  parallel_ranges(
      bytes,
      [&](std::int64_t begin, std::int64_t end) {
        auto* const target = static_cast<char*>(to) + begin;
        const auto* const source = static_cast<const char*>(from) + begin;
        if (stores == Stores::Streaming) return simd::copy_streaming(target, source, end - begin);
        std::memcpy(target, source, static_cast<std::size_t>(end - begin));
      },
      kMostSerialBytes);
}

void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  check_range("convert", out, in, numel);
  if (out_dtype != in_dtype) return sum_parts(out, out_dtype, &in, 1, in_dtype, numel);
  if (out == in) return;
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(at(out, out_dtype, begin), at(in, in_dtype, begin),
                static_cast<std::size_t>(end - begin) * size_of(in_dtype));
  });
}

void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  check_range("accumulate", acc, in, numel);
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    simd::accumulate(at(acc, acc_dtype, begin), acc_dtype, at(in, in_dtype, begin), in_dtype, end - begin);
  });
}

void scale(void* data, Dtype dtype, float factor, std::int64_t numel) {
  check_range("scale", data, data, numel);
  if (factor == 1.0f) return;
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    simd::scale(at(data, dtype, begin), dtype, factor, end - begin);
  });
}

double sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, std::int64_t offset) {
  check_range("sum_of_squares", in, in, numel);
  const auto skipped = offset % simd::kSquarePiece;  // of the first piece
  const auto piece = [&](std::int64_t k) {
    const auto begin = std::max<std::int64_t>(k * simd::kSquarePiece - skipped, 0);
    return piece_sum(at(in, in_dtype, begin), in_dtype,
                     std::min((k + 1) * simd::kSquarePiece - skipped, numel) - begin);
  };
  const auto pieces = numel == 0 ? 0 : (skipped + numel + simd::kSquarePiece - 1) / simd::kSquarePiece;
  double total = 0;
  if (numel <= kMostSerialNumel || omp_in_parallel() || omp_get_max_threads() == 1) {
    for (std::int64_t k = 0; k < pieces; ++k) total += piece(k);
    return total;
  }
  std::vector<double> sums(static_cast<std::size_t>(pieces));
  run_team(omp_get_max_threads(), [&](std::int64_t me, std::int64_t team) {
    for (auto k = pieces * me / team; k < pieces * (me + 1) / team; ++k) sums[static_cast<std::size_t>(k)] = piece(k);
  });
  for (const double sum : sums) total += sum;
  return total;
}

std::int64_t first_non_finite(const void* in, Dtype in_dtype, std::int64_t numel) {
  check_range("first_non_finite", in, in, numel);
  for (std::int64_t begin = 0; begin < numel; begin += simd::kSquarePiece) {
    const auto end = std::min(numel, begin + simd::kSquarePiece);
    if (std::isfinite(piece_sum(at(in, in_dtype, begin), in_dtype, end - begin))) continue;
    for (auto i = begin; i < end; ++i)
      if (non_finite(in, in_dtype, i)) return i;
  }
  return -1;
}

std::string simd_target() { return hwy::TargetName(simd::chosen_target()); }

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (auto left = simd::supported_targets(); left != 0; left &= left - 1)
    names.emplace_back(hwy::TargetName(left & -left));
  return names;
}

void set_simd_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  std::int64_t wanted = 0;
  for (auto left = simd::supported_targets(); left != 0; left &= left - 1)
    if (name == hwy::TargetName(left & -left)) wanted = left & -left;
  ZERO_CHECK(name.empty() || wanted != 0, "[base::set_simd_target] got ", name, ", expected one of simd_targets()");
  hwy::SetSupportedTargetsForTest(wanted);
  hwy::GetChosenTarget().DeInit();  // the next call selects a target again
}

}  // namespace zero::kernels
