// Blockwise integers compared with their definition, their error bounds, and values that are not finite.
#include "kernels/quantize.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <random>
#include <vector>

namespace zero::base::quantize_test {
namespace {

std::vector<float> heavy_tailed(std::int64_t numel, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (auto& v : values) v = std::exp(2 * normal(generator)) * normal(generator);
  return values;
}

std::vector<char> quantized(const std::vector<float>& values, int bits) {
  const auto numel = static_cast<std::int64_t>(values.size());
  std::vector<char> out(static_cast<std::size_t>(kernels::quantized_bytes(numel, bits)));
  kernels::quantize(out.data(), bits, values.data(), kernels::Dtype::F32, numel);
  return out;
}

std::vector<float> round_trip(const std::vector<float>& values, int bits) {
  std::vector<float> back(values.size());
  kernels::dequantize(back.data(), kernels::Dtype::F32, quantized(values, bits).data(), bits,
                      static_cast<std::int64_t>(values.size()));
  return back;
}

class Quantize : public testing::TestWithParam<int> {};

TEST_P(Quantize, IsOffByAtMostHalfAScale) {
  const int bits = GetParam();
  const float limit = bits == 8 ? 127 : 7;
  for (const std::int64_t numel : {1, 2, 255, 256, 257, 1000, 100'001}) {
    const auto values = heavy_tailed(numel, 3), back = round_trip(values, bits);
    for (std::int64_t block = 0; block < numel; block += kernels::kQuantizedBlock) {
      const auto end = std::min(numel, block + kernels::kQuantizedBlock);
      float largest = 0;
      for (auto i = block; i < end; ++i) largest = std::max(largest, std::fabs(values[static_cast<std::size_t>(i)]));
      for (auto i = block; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        ASSERT_LE(std::fabs(back[at] - values[at]), largest / limit * 0.5001f) << numel << " elements, element " << i;
      }
    }
  }
}

TEST_P(Quantize, TheLargestAndZeroStayAsTheyAre) {
  std::vector<float> values(300, 0.0f);
  values[7] = -3.5f;
  values[260] = 0.0f;
  const auto back = round_trip(values, GetParam());
  EXPECT_FLOAT_EQ(back[7], -3.5f);
  EXPECT_EQ(back[8], 0.0f);
  EXPECT_EQ(back[260], 0.0f);
}

TEST_P(Quantize, ABlockThatIsNotFiniteIsNanAndNoOther) {
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    std::vector<float> values(600, 1.0f);
    values[300] = bad;
    const auto back = round_trip(values, GetParam());
    for (int i = 0; i < 600; ++i) ASSERT_EQ(std::isnan(back[static_cast<std::size_t>(i)]), i >= 256 && i < 512) << i;
  }
}

TEST_P(Quantize, TinyValuesBecomeZeroWithoutDividingByThem) {
  for (const float v : round_trip(std::vector<float>(256, 1e-44f), GetParam())) ASSERT_EQ(v, 0.0f);
}

TEST_P(Quantize, BytesOfOneScaleABlockAndTheIntegers) {
  const int bits = GetParam();
  EXPECT_EQ(kernels::quantized_bytes(0, bits), 0);
  EXPECT_EQ(kernels::quantized_bytes(1, bits), 8);
  EXPECT_EQ(kernels::quantized_bytes(256, bits), 4 + 32 * bits);
  EXPECT_EQ(kernels::quantized_bytes(1 << 20, bits), (1 << 20) * bits / 8 + 4 * 4096);
}

TEST_P(Quantize, SameBytesWithAnyNumberOfThreadsAndDtype) {
  const auto values = heavy_tailed(3'000'001, 5);
  const auto numel = static_cast<std::int64_t>(values.size());
  const int before = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = quantized(values, GetParam());
  omp_set_num_threads(3);
  EXPECT_EQ(quantized(values, GetParam()), one);
  omp_set_num_threads(before);

  std::vector<std::uint16_t> bf16(values.size()), back(values.size());
  kernels::convert(bf16.data(), kernels::Dtype::BF16, values.data(), kernels::Dtype::F32, numel);
  std::vector<char> out(one.size());
  kernels::quantize(out.data(), GetParam(), bf16.data(), kernels::Dtype::BF16, numel);
  std::vector<float> exact(values.size()), rounded(values.size());
  kernels::dequantize(exact.data(), kernels::Dtype::F32, out.data(), GetParam(), numel);
  kernels::dequantize(back.data(), kernels::Dtype::BF16, out.data(), GetParam(), numel);
  kernels::convert(rounded.data(), kernels::Dtype::F32, back.data(), kernels::Dtype::BF16, numel);
  for (std::size_t i = 0; i < exact.size(); i += 997)
    ASSERT_LE(std::fabs(rounded[i] - exact[i]), std::fabs(exact[i]) / 256) << i;
}

TEST_P(Quantize, AddsToASum) {
  const auto values = heavy_tailed(1000, 9), back = round_trip(values, GetParam());
  std::vector<float> sum(values.size(), 2.0f);
  kernels::add_dequantized(sum.data(), quantized(values, GetParam()).data(), GetParam(), 1000);
  for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], 2.0f + back[i]);
}

// The reason for blocks: with one scale for all, an outlier removes the precision of all other values.
TEST(QuantizeBlocks, ErrIsAThirdOfTheWholeTensorsOnHeavyTails) {
  const auto values = heavy_tailed(1 << 18, 11), back = round_trip(values, 8);
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::fabs(v));
  double by_block = 0, by_tensor = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = largest / 127;
    by_block += std::fabs(back[i] - values[i]);
    by_tensor += std::fabs(std::nearbyint(values[i] / scale) * scale - values[i]);
  }
  EXPECT_GE(by_tensor / by_block, 3);
}

INSTANTIATE_TEST_SUITE_P(Bits, Quantize, testing::Values(8, 4));

}  // namespace
}  // namespace zero::base::quantize_test
