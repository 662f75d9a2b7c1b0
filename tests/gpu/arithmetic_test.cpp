// The arithmetic of GPU threads, compiled for the CPU, gives the bits of the SIMD kernels. The last test verifies that
// the checks detect a difference.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "gpu/host_kernels.h"
#include "gpu/kernel_checks.h"
#include "kernels/cuda/elements.h"

namespace zero::test::arithmetic_test {
namespace {

class OnHost : public Kernels {
 public:
  void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
                 std::int64_t numel) override {
    EXPECT_EQ(table().sum_parts({}, out, out_dtype, parts, num_parts, in_dtype, numel), 0);
  }
  void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    EXPECT_EQ(table().convert({}, out, out_dtype, in, in_dtype, numel), 0);
  }
  void accumulate(void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    EXPECT_EQ(table().accumulate({}, to, to_dtype, in, in_dtype, numel), 0);
  }
  void scale(void* data, Dtype dtype, float factor, std::int64_t numel) override {
    EXPECT_EQ(table().scale({}, data, dtype, factor, numel), 0);
  }
  std::vector<double> sums_of_squares(const std::vector<Vector>& vectors) override {
    std::vector<double> results(vectors.size(), -1);
    std::vector<cuda::SquaredVector> all;
    std::int64_t num_pieces = 0;
    for (const auto& [in, dtype, numel] : vectors) {
      all.push_back({in, dtype, numel, &results[all.size()]});
      num_pieces += cuda::square_pieces(numel);
    }
    std::vector<double> pieces(static_cast<std::size_t>(num_pieces));
    EXPECT_EQ(table().sums_of_squares({}, all.data(), static_cast<int>(all.size()), pieces.data()), 0);
    return results;
  }
  std::int64_t first_non_finite(const void* in, Dtype dtype, std::int64_t numel) override {
    std::int64_t result = -2;
    EXPECT_EQ(table().first_non_finite({}, in, dtype, numel, &result), 0);
    return result;
  }
  void update(const kernels::UpdateConstants& constants, float factor,
              const std::vector<kernels::SizedRange>& ranges) override {
    EXPECT_EQ(table().update({}, &constants, factor, ranges.data(), static_cast<int>(ranges.size())), 0);
  }
  void update_by_norm(const kernels::UpdateConstants& constants, const cuda::StepNorm& norm,
                      const std::vector<kernels::SizedRange>& ranges) override {
    EXPECT_EQ(table().update_by_norm({}, &constants, &norm, ranges.data(), static_cast<int>(ranges.size())), 0);
  }
  std::vector<double> add_sums(const std::vector<double>& sums, const std::vector<int>& order,
                               std::uint64_t tag) override {
    std::vector<double> out(2, -1);
    EXPECT_EQ(table().add_sums({}, sums.data(), order.data(), static_cast<int>(order.size()), tag, out.data()), 0);
    return out;
  }
  cuda::StepNorm step_norm(const std::vector<double>& parts, const cuda::NormSettings& settings) override {
    cuda::StepNorm norm{-1, -1, -1};
    EXPECT_EQ(table().step_norm({}, parts.data(), static_cast<int>(parts.size() / 2), settings, &norm), 0);
    return norm;
  }

 private:
  static const cuda::Interface& table() { return host_kernels(); }
};

OnHost kernels;

}  // namespace

TEST(GpuArithmetic, ConvertsAsTheCpuDoes) { check_conversions(kernels); }
TEST(GpuArithmetic, AddsAsTheCpuDoes) { check_sums(kernels); }
TEST(GpuArithmetic, ScalesAsTheCpuDoes) { check_scaling(kernels); }
TEST(GpuArithmetic, SquareSumsHaveTheCpusOrder) { check_square_sums(kernels); }
TEST(GpuArithmetic, FindsTheFirstNonFiniteValue) { check_non_finite(kernels); }
TEST(GpuArithmetic, EveryUpdateRuleHasTheCpusBits) { check_updates(kernels); }
TEST(GpuArithmetic, NormAndFactorHaveTheHostsBits) { check_norms(kernels); }

// A multiply-add that is not fused differs in its last bit somewhere.
TEST(GpuArithmetic, AFusedMultiplyAddRoundsOnce) {
  int different = 0;
  for (int i = 1; i < 1000; ++i) {
    const float a = 1.0f + static_cast<float>(i) * 0x1p-12f, c = -1.0f;
    different += cuda::fused_multiply_add(a, a, c) != cuda::add(cuda::multiply(a, a), c);
  }
  EXPECT_GT(different, 100);
}

}  // namespace zero::test::arithmetic_test
