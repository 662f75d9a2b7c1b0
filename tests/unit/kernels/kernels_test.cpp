// The element-wise kernels compared with plain scalar code, on every SIMD target of this CPU, for any division and
// number of threads: always bit for bit.
#include "kernels/elementwise.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include <zero/errors.h>

namespace zero::base::kernels_test {
namespace {

constexpr kernels::Dtype kDtypes[] = {kernels::Dtype::F32, kernels::Dtype::BF16, kernels::Dtype::F16};

// Value of 16 bits with 8 or 5 exponent bits, from the definition of the format.
double decode(std::uint16_t bits, kernels::Dtype dtype) {
  const int fraction_bits = dtype == kernels::Dtype::BF16 ? 7 : 10, bias = dtype == kernels::Dtype::BF16 ? 127 : 15;
  const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 2 * bias + 1) return fraction ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

// Rounds to nearest even by a search: the positive values of a format increase with their bits.
std::uint16_t encode(float value, kernels::Dtype dtype) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0,
                      infinite = dtype == kernels::Dtype::BF16 ? 0x7f80 : 0x7c00;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinite | 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | infinite;
  int low = 0, high = infinite - 1;  // the largest finite value not above the magnitude
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (decode(static_cast<std::uint16_t>(middle), dtype) <= magnitude)
      low = middle;
    else
      high = middle - 1;
  }
  const double below = decode(static_cast<std::uint16_t>(low), dtype);
  // The step above the largest finite value is as wide as the one below it.
  const double above = low == infinite - 1 ? 2 * below - decode(static_cast<std::uint16_t>(low - 1), dtype)
                                           : decode(static_cast<std::uint16_t>(low + 1), dtype);
  const double down = magnitude - below, up = above - magnitude;
  const int nearest = down < up || (down == up && low % 2 == 0) ? low : low + 1;
  return static_cast<std::uint16_t>(sign | nearest);
}

bool is_nan(std::uint16_t bits, kernels::Dtype dtype) {
  return (bits & 0x7fff) > (dtype == kernels::Dtype::BF16 ? 0x7f80 : 0x7c00);
}

// A typed array that reads and writes through the model.
struct Array {
  kernels::Dtype dtype;
  std::vector<char> bytes;
  Array(kernels::Dtype type, std::int64_t numel)
      : dtype(type), bytes(static_cast<std::size_t>(numel) * kernels::size_of(type)) {}
  void* at(std::int64_t i = 0) { return bytes.data() + i * static_cast<std::int64_t>(kernels::size_of(dtype)); }
  const void* at(std::int64_t i = 0) const {
    return bytes.data() + i * static_cast<std::int64_t>(kernels::size_of(dtype));
  }
  float get(std::int64_t i) const {
    if (dtype == kernels::Dtype::F32) {
      float value;
      std::memcpy(&value, at(i), 4);
      return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, at(i), 2);
    return static_cast<float>(decode(bits, dtype));
  }
  void set(std::int64_t i, float value) {
    const auto bits = encode(value, dtype);
    std::memcpy(at(i), dtype == kernels::Dtype::F32 ? static_cast<const void*>(&value) : &bits,
                kernels::size_of(dtype));
  }
  bool operator==(const Array&) const = default;
};

Array random_array(kernels::Dtype dtype, std::int64_t numel, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Array values(dtype, numel);
  for (std::int64_t i = 0; i < numel; ++i) values.set(i, normal(random));
  return values;
}

// Every test runs once per SIMD target.
class Kernels : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    kernels::set_simd_target(GetParam());
    ASSERT_EQ(kernels::simd_target(), GetParam());
  }
  void TearDown() override {
    kernels::set_simd_target("");
    omp_set_num_threads(threads_);
  }
  const int threads_ = omp_get_max_threads();
};
INSTANTIATE_TEST_SUITE_P(Targets, Kernels, testing::ValuesIn(kernels::simd_targets()),
                         [](const auto& info) { return info.param; });

TEST_P(Kernels, EverySixteenBitValueIsReadExactlyAndWrittenBack) {
  for (const auto dtype : {kernels::Dtype::BF16, kernels::Dtype::F16}) {
    std::vector<std::uint16_t> all(65536), back(65536);
    std::vector<float> wide(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
    kernels::convert(wide.data(), kernels::Dtype::F32, all.data(), dtype, 65536);
    kernels::convert(back.data(), dtype, wide.data(), kernels::Dtype::F32, 65536);
    for (int i = 0; i < 65536; ++i) {
      if (is_nan(all[i], dtype)) {
        ASSERT_TRUE(std::isnan(wide[i]) && is_nan(back[i], dtype)) << i;
        ASSERT_EQ(all[i] >> 15, back[i] >> 15) << i;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]),
                  std::bit_cast<std::uint32_t>(static_cast<float>(decode(all[i], dtype))))
            << i;
        ASSERT_EQ(all[i], back[i]) << i;
      }
    }
  }
}

TEST_P(Kernels, RoundsToNearestEven) {
  for (const auto dtype : {kernels::Dtype::BF16, kernels::Dtype::F16}) {
    std::vector<float> values;
    for (int i = 0; i < 65536; ++i) {  // around every value and every halfway point
      const auto a = static_cast<float>(decode(static_cast<std::uint16_t>(i), dtype));
      const auto b = static_cast<float>(decode(static_cast<std::uint16_t>(i + 1), dtype));
      const float half = std::isfinite(a) && std::isfinite(b) ? a / 2 + b / 2 : a;
      for (const float x : {a, half}) {
        values.push_back(x);
        values.push_back(std::nextafter(x, INFINITY));
        values.push_back(std::nextafter(x, -INFINITY));
      }
    }
    std::mt19937 random(7);
    for (int i = 0; i < 50001; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    for (const float x :
         {65504.f, 65519.99f, 65520.f, 65536.f, 3.4e38f, 0x1p-25f, 0x1.000002p-25f, 0x1p-24f, -0.f, 1e-45f})
      values.push_back(x);
    // NaNs whose payload would be lost by truncation or overflow by rounding.
    for (const auto bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu})
      values.push_back(std::bit_cast<float>(bits));
    const auto numel = static_cast<std::int64_t>(values.size());
    std::vector<std::uint16_t> got(values.size());
    kernels::convert(got.data(), dtype, values.data(), kernels::Dtype::F32, numel);
    for (std::int64_t i = 0; i < numel; ++i) {
      const auto wanted = encode(values[i], dtype);
      if (is_nan(wanted, dtype)) {
        ASSERT_TRUE(is_nan(got[i], dtype)) << std::hexfloat << values[i];
      } else {
        ASSERT_EQ(got[i], wanted) << std::hexfloat << values[i] << " " << kernels::dtype_name(dtype);
      }
    }
  }
}

TEST_P(Kernels, SumPartsAddsInOrderWithOneRounding) {
  for (const auto in : kDtypes)
    for (const auto out : kDtypes)
      for (int num_parts = 1; num_parts <= 5; ++num_parts)
        for (const std::int64_t numel : {0, 1, 7, 16, 33, 127, 2048, 4129}) {
          std::vector<Array> parts;
          std::vector<const void*> pointers;
          for (int p = 0; p < num_parts; ++p) parts.push_back(random_array(in, numel, 100 + p, p % 2 ? 100.f : 1e-3f));
          for (const auto& part : parts) pointers.push_back(part.at());
          Array wanted(out, numel), got(out, numel);
          for (std::int64_t i = 0; i < numel; ++i) {
            float sum = parts[0].get(i);
            for (int p = 1; p < num_parts; ++p) sum += parts[p].get(i);
            wanted.set(i, sum);
          }
          kernels::sum_parts(got.at(), out, pointers.data(), num_parts, in, numel);
          ASSERT_EQ(got, wanted) << num_parts << " parts of " << numel;
          if (kernels::size_of(in) != kernels::size_of(out)) continue;
          for (int p = 0; p < num_parts; ++p) {  // the result over any of the parts
            const auto saved = parts[p];
            kernels::sum_parts(parts[p].at(), out, pointers.data(), num_parts, in, numel);
            ASSERT_EQ(parts[p].bytes, wanted.bytes) << "over part " << p;
            parts[p] = saved;
            pointers[p] = parts[p].at();
          }
        }
}

TEST_P(Kernels, StreamedSumsHaveTheSameBitsAndTouchNothingElse) {
  for (const auto in : kDtypes)
    for (const auto out : kDtypes)
      for (int num_parts = 1; num_parts <= 3; ++num_parts)
        for (const std::int64_t numel : {0, 1, 31, 2047, 2048, 5001}) {
          std::vector<Array> parts;
          std::vector<const void*> pointers;
          for (int p = 0; p < num_parts; ++p) parts.push_back(random_array(in, numel, 200 + p));
          for (const auto& part : parts) pointers.push_back(part.at());
          for (const std::int64_t first : {0, 1, 13}) {  // where cache lines do not begin
            auto wanted = random_array(out, numel + 100, 7), got = wanted;
            kernels::sum_parts(wanted.at(first), out, pointers.data(), num_parts, in, numel);
            kernels::sum_parts(got.at(first), out, pointers.data(), num_parts, in, numel, kernels::Stores::Streaming);
            ASSERT_EQ(got, wanted) << num_parts << " parts of " << numel << " from " << first;
          }
          if (kernels::size_of(in) != kernels::size_of(out) || num_parts < 2) continue;
          Array wanted(out, numel);
          kernels::sum_parts(wanted.at(), out, pointers.data(), num_parts, in, numel);
          kernels::sum_parts(parts[1].at(), out, pointers.data(), num_parts, in, numel, kernels::Stores::Streaming);
          ASSERT_EQ(parts[1].bytes, wanted.bytes) << "over a part";
        }
}

TEST_P(Kernels, CopiesAreWholeAndTouchNothingElse) {
  std::vector<unsigned char> from(3 << 20);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31 + i / 256);
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    for (const auto stores : {kernels::Stores::Cached, kernels::Stores::Streaming})
      for (const std::size_t bytes : {0, 1, 63, 64, 65, 255, 256, 257, 511, 4096, 10007, (2 << 20) + 77})
        for (const std::size_t first : {0, 1, 32, 63})
          for (const std::size_t source : {0, 5}) {
            std::vector<unsigned char> got(first + bytes + 64, 0xee), wanted = got;
            std::memcpy(wanted.data() + first, from.data() + source, bytes);
            kernels::copy(got.data() + first, from.data() + source, static_cast<std::int64_t>(bytes), stores);
            ASSERT_EQ(got, wanted) << bytes << " bytes to " << first << " from " << source;
          }
  }
}

TEST_P(Kernels, MinusZeroAndSpecialsPass) {
  const float a[] = {-0.f, INFINITY, INFINITY, 3e38f, NAN}, b[] = {-0.f, 1, -INFINITY, 3e38f, 1};
  const void* parts[] = {a, b};
  float one[5], two[5];
  kernels::sum_parts(one, kernels::Dtype::F32, parts, 1, kernels::Dtype::F32, 5);
  EXPECT_TRUE(std::signbit(one[0]));
  kernels::sum_parts(two, kernels::Dtype::F32, parts, 2, kernels::Dtype::F32, 5);
  EXPECT_TRUE(std::signbit(two[0]));
  EXPECT_EQ(two[1], INFINITY);
  EXPECT_TRUE(std::isnan(two[2]));
  EXPECT_EQ(two[3], INFINITY);
  EXPECT_TRUE(std::isnan(two[4]));
}

TEST_P(Kernels, AccumulateAndScaleRoundOnce) {
  for (const auto acc : kDtypes)
    for (const auto in : kDtypes)
      for (const std::int64_t numel : {1, 8, 31, 200}) {
        auto sum = random_array(acc, numel, 1), add = random_array(in, numel, 2, 0.1f);
        Array wanted(acc, numel), scaled(acc, numel);
        for (std::int64_t i = 0; i < numel; ++i) wanted.set(i, sum.get(i) + add.get(i));
        kernels::accumulate(sum.at(), acc, add.at(), in, numel);
        ASSERT_EQ(sum, wanted);
        for (std::int64_t i = 0; i < numel; ++i) scaled.set(i, sum.get(i) * 0.3f);
        kernels::scale(sum.at(), acc, 0.3f, numel);
        ASSERT_EQ(sum, scaled);
      }
}

TEST_P(Kernels, NothingBehindTheRangeIsTouched) {
  for (const auto dtype : kDtypes)
    for (std::int64_t numel = 0; numel < 70; ++numel) {
      auto out = random_array(dtype, numel + 40, 3);
      const auto before = out;
      const auto in = random_array(kernels::Dtype::F32, numel, 4);
      kernels::convert(out.at(), dtype, in.at(), kernels::Dtype::F32, numel);
      kernels::accumulate(out.at(), dtype, in.at(), kernels::Dtype::F32, numel);
      kernels::scale(out.at(), dtype, 3, numel);
      for (std::int64_t i = numel; i < numel + 40; ++i)
        ASSERT_EQ(std::memcmp(out.at(i), before.at(i), kernels::size_of(dtype)), 0);
    }
}

TEST_P(Kernels, SameBitsForAnyThreadsAndAnyCut) {
  const std::int64_t numel = (1 << 20) + 12345;
  for (const auto dtype : {kernels::Dtype::F32, kernels::Dtype::BF16}) {
    const auto a = random_array(dtype, numel, 5), b = random_array(dtype, numel, 6, 30);
    const void* parts[] = {a.at(), b.at()};
    const auto run = [&](auto&& cut) {
      Array out(dtype, numel);
      cut(out);
      return out;
    };
    const auto whole = [&](Array& out) {
      kernels::sum_parts(out.at(), dtype, parts, 2, dtype, numel);
      kernels::accumulate(out.at(), dtype, a.at(), dtype, numel);
      kernels::scale(out.at(), dtype, 1.7f, numel);
    };
    omp_set_num_threads(1);
    const auto wanted = run(whole);
    for (const int threads : {2, 3, 7}) {
      omp_set_num_threads(threads);
      ASSERT_EQ(run(whole), wanted) << threads << " threads";
    }
    ASSERT_EQ(run([&](Array& out) {
                std::mt19937 random(11);
                for (std::int64_t begin = 0, end; begin < numel; begin = end) {
                  end = std::min<std::int64_t>(numel, begin + 1 + static_cast<std::int64_t>(random() % 50000));
                  const void* cut[] = {a.at(begin), b.at(begin)};
                  kernels::sum_parts(out.at(begin), dtype, cut, 2, dtype, end - begin);
                  kernels::accumulate(out.at(begin), dtype, a.at(begin), dtype, end - begin);
                  kernels::scale(out.at(begin), dtype, 1.7f, end - begin);
                }
              }),
              wanted);
  }
}

// The documented order, written down again.
double model_of_squares(const Array& values, std::int64_t numel) {
  double total = 0;
  for (std::int64_t piece = 0; piece < numel; piece += 65536) {
    double sums[32] = {};
    for (auto i = piece; i < std::min<std::int64_t>(numel, piece + 65536); ++i) {
      const double x = values.get(i);
      sums[(i - piece) % 32] += x * x;
    }
    for (int width = 16; width > 0; width /= 2)
      for (int k = 0; k < width; ++k) sums[k] += sums[k + width];
    total += sums[0];
  }
  return total;
}

TEST_P(Kernels, SquareSumsHaveOneOrder) {
  for (const auto dtype : kDtypes)
    for (const std::int64_t numel : {0, 1, 31, 32, 33, 1000, 65536, 65537, (1 << 20) + 777}) {
      const auto values = random_array(dtype, numel, 9);
      const double wanted = model_of_squares(values, numel);
      for (const int threads : {1, 2, 5}) {
        omp_set_num_threads(threads);
        ASSERT_EQ(kernels::sum_of_squares(values.at(), dtype, numel), wanted)
            << numel << " elements, " << threads << " threads";
      }
      long double exact = 0;
      for (std::int64_t i = 0; i < numel; ++i) exact += static_cast<long double>(values.get(i)) * values.get(i);
      ASSERT_NEAR(wanted, static_cast<double>(exact), 1e-13 * static_cast<double>(exact));
    }
}

// The end of a range is added in the pieces of the range.
TEST_P(Kernels, SumOfSquaresOfTheEndOfARange) {
  for (const auto dtype : kDtypes)
    for (const std::int64_t offset : {0, 64, 65472, 65536, 70016, 131072}) {
      const std::int64_t numel = 200003 - offset;
      const auto values = random_array(dtype, numel, 12);
      double wanted = 0;
      for (std::int64_t begin = 0; begin < numel;) {
        const auto end = std::min<std::int64_t>(numel, ((offset + begin) / 65536 + 1) * 65536 - offset);
        wanted += kernels::sum_of_squares(values.at(begin), dtype, end - begin);
        begin = end;
      }
      EXPECT_EQ(kernels::sum_of_squares(values.at(), dtype, numel, offset), wanted) << "offset " << offset;
    }
}

TEST_P(Kernels, NonFiniteValuesAreSeenWhereverTheyAre) {
  for (const auto dtype : kDtypes)
    for (const float bad : {INFINITY, -INFINITY, NAN})
      for (const std::int64_t where : {0, 1, 30, 32, 65535, 65536, 65570}) {
        auto values = random_array(dtype, 65571, 10);
        ASSERT_EQ(kernels::first_non_finite(values.at(), dtype, 65571), -1);
        values.set(where, bad);
        ASSERT_FALSE(std::isfinite(kernels::sum_of_squares(values.at(), dtype, 65571)));
        ASSERT_EQ(kernels::first_non_finite(values.at(), dtype, 65571), where);
      }
  const std::vector<float> large(100000, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(kernels::sum_of_squares(large.data(), kernels::Dtype::F32, 100000)));
  EXPECT_EQ(kernels::first_non_finite(large.data(), kernels::Dtype::F32, 100000), -1);
}

TEST(KernelTargets, ScalarIsAlwaysThereAndUnknownOnesAreRefused) {
  const auto targets = kernels::simd_targets();
  EXPECT_EQ(targets.back(), "SCALAR");
  EXPECT_EQ(kernels::simd_target(), targets.front());  // the best one
  EXPECT_THROW(kernels::set_simd_target("MMX"), InternalError);
}

TEST(KernelArguments, ContractViolationsAreInternalErrors) {
  float x = 1;
  const void* parts[] = {&x};
  EXPECT_THROW(kernels::sum_parts(&x, kernels::Dtype::F32, parts, 0, kernels::Dtype::F32, 1), InternalError);
  EXPECT_THROW(kernels::convert(nullptr, kernels::Dtype::BF16, &x, kernels::Dtype::F32, 1), InternalError);
  EXPECT_THROW(kernels::scale(&x, kernels::Dtype::F32, 2, -1), InternalError);
  EXPECT_THROW(kernels::copy(&x, nullptr, 4), InternalError);
  EXPECT_NO_THROW(kernels::accumulate(nullptr, kernels::Dtype::F32, nullptr, kernels::Dtype::BF16, 0));
}

TEST(ParallelRanges, CoversEveryElementOnce) {
  for (const std::int64_t numel : {0, 1, 1000, (1 << 20) + 1, 3000000}) {
    std::vector<int> seen(static_cast<std::size_t>(numel));
    kernels::parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
    });
    for (const int times : seen) ASSERT_EQ(times, 1);
  }
}

}  // namespace
}  // namespace zero::base::kernels_test
