// Optimizer states in 8 bits: the codes of a search through all values, on every SIMD target; a decoded block encodes
// to itself; an update of stored states is the fp32 update between decoding and encoding.
#include "kernels/blocks8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "kernels/update_simd.h"
#include "support/blocks8_reference.h"

namespace zero::kernels::blocks8_test {
namespace {

using Bytes = std::vector<char>;

Bytes encoded(CodeMap map, const std::vector<float>& values) {
  Bytes out(static_cast<std::size_t>(state_block_bytes(static_cast<std::int64_t>(values.size()))), '\x55');
  encode_blocks(out.data(), map, values.data(), static_cast<std::int64_t>(values.size()));
  return out;
}

std::vector<float> decoded(CodeMap map, const Bytes& bytes, std::size_t numel) {
  std::vector<float> out(numel);
  decode_blocks(out.data(), map, bytes.data(), static_cast<std::int64_t>(numel));
  return out;
}

float maximum_of(const Bytes& bytes, std::size_t block) {
  float maximum = 0;
  std::memcpy(&maximum, bytes.data() + block * kStateBlockBytes, sizeof maximum);
  return maximum;
}

int code_of(const Bytes& bytes, std::size_t i) {
  return static_cast<unsigned char>(bytes[i / kStateBlock * kStateBlockBytes + 4 + i % kStateBlock]);
}

// Whether the code is the nearest of all magnitudes, by a search; either one in the middle of two, as far as fp32 can
// tell. What is not 0 in a map without signs is not 0. Very small shares: nearest in their bits.
bool is_nearest(CodeMap map, int code, float value, float maximum) {
  const bool with_sign = map == CodeMap::Signed;
  if (with_sign && (code >= 128) != std::signbit(value)) return false;
  const int magnitude = with_sign ? code % 128 : code;
  if (!with_sign && (magnitude == 0) != (value == 0)) return false;
  const float zero = with_sign ? 0x1p-28f : 0x1p-32f;
  const float share = std::fabs(value) * (1 / maximum) + zero;
  const auto distance = [&](int of) {
    const float other = values_of(map)[static_cast<std::size_t>(of)] + zero;
    if (share >= (with_sign ? 0x1p-20f : 0x1p-24f))
      return std::fabs(static_cast<double>(other) - static_cast<double>(share)) / static_cast<double>(share);
    return std::fabs(static_cast<double>(std::bit_cast<std::uint32_t>(other)) - std::bit_cast<std::uint32_t>(share)) *
           0x1p-23;
  };
  double least = 1e9;
  for (int of = !with_sign && value != 0 ? 1 : 0; of < (with_sign ? 128 : 256); ++of)
    least = std::min(least, distance(of));
  return distance(magnitude) <= least + 0x1p-21;
}

// 32 codes from 1/2 to 1 and so on down to 1/16, then half as many for each of four powers of two; with a sign, half.
TEST(Blocks8, MapsHaveMoreCodesForLargerShares) {
  const auto& positive = values_of(CodeMap::Unsigned);
  const auto& with_sign = values_of(CodeMap::Signed);
  EXPECT_EQ(std::set<float>(positive.begin(), positive.end()).size(), 256u);
  EXPECT_EQ(std::set<float>(with_sign.begin(), with_sign.end()).size(), 255u);  // 0 twice
  for (std::size_t code = 1; code < 256; ++code) EXPECT_LT(positive[code - 1], positive[code]);
  for (std::size_t code = 0; code < 128; ++code) {
    EXPECT_EQ(with_sign[128 + code], -with_sign[code]);
    if (code > 0) EXPECT_LT(with_sign[code - 1], with_sign[code]);
  }
  EXPECT_EQ(positive[0], 0.0f);
  EXPECT_EQ(positive[255], 1.0f);
  EXPECT_EQ(with_sign[127], 1.0f);
  for (std::size_t step = 1; step <= 32; ++step)
    EXPECT_FLOAT_EQ(positive[255 - step], 1 - static_cast<float>(step) / 64);
  for (std::size_t step = 1; step <= 16; ++step)
    EXPECT_FLOAT_EQ(with_sign[127 - step], 1 - static_cast<float>(step) / 32);
  for (int k = 0; k < 7; ++k) {
    EXPECT_NEAR(positive[(256u >> k) - 1], std::ldexp(1.0f, -4 * k), 0x1p-32);
    if (k < 6) EXPECT_NEAR(with_sign[(128u >> k) - 1], std::ldexp(1.0f, -4 * k), 0x1p-28);
  }
  EXPECT_NEAR(positive[103], 0x1.8p-6f, 0x1p-31);  // half way from 2^-6 to 2^-5
  EXPECT_EQ(positive[1], 0x1p-28f - 0x1p-32f);
}

class BlockTargets : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { set_simd_target(GetParam()); }
  void TearDown() override { set_simd_target(""); }
};

TEST_P(BlockTargets, CodesAreThoseOfASearch) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const auto map : {CodeMap::Signed, CodeMap::Unsigned}) {
    std::vector<float> values;
    const auto& shares = values_of(map);
    const test::Blocks8Reference reference(map == CodeMap::Signed);
    const std::size_t count = map == CodeMap::Signed ? 128 : 256;
    // Blocks whose maximum is 1, with both sides of every border between two codes.
    for (std::size_t code = 1; code < count; ++code)
      for (const float share : {shares[code], (shares[code - 1] + shares[code]) / 2}) {
        if (values.size() % kStateBlock == 0) values.push_back(1);
        for (const float near : {std::nextafter(share, 0.0f), share, std::nextafter(share, 2.0f)}) {
          if (values.size() % kStateBlock == 0) values.push_back(1);
          values.push_back(std::min(near, 1.0f));
        }
      }
    for (const float tiny : {1e-12f, 1e-30f, 1e-40f}) values.insert(values.end(), {1, tiny});
    while (values.size() % kStateBlock != 0) values.push_back(0);
    for (const float scale : {1e-25f, 3e-5f, 0.7f, 1e20f})
      for (int i = 0; i < 4 * kStateBlock; ++i)
        values.push_back(scale * std::pow(10.0f, -std::fabs(normal(random)) * 2) *
                         (map == CodeMap::Signed && i % 3 ? -1 : 1));
    values.resize(values.size() - 100);  // a last block that is not whole
    const auto bytes = encoded(map, values);
    for (std::size_t block = 0; block * kStateBlock < values.size(); ++block) {
      float maximum = 0;
      const auto end = std::min(values.size(), (block + 1) * kStateBlock);
      for (auto i = block * kStateBlock; i < end; ++i) maximum = std::max(maximum, std::fabs(values[i]));
      ASSERT_EQ(maximum_of(bytes, block), maximum);
      for (auto i = block * kStateBlock; i < end; ++i) {
        ASSERT_EQ(code_of(bytes, i), reference.code(values[i], maximum)) << values[i] << " of " << maximum;
        ASSERT_TRUE(is_nearest(map, code_of(bytes, i), values[i], maximum))
            << values[i] << " of " << maximum << " has code " << code_of(bytes, i);
      }
      for (auto i = end; i < (block + 1) * kStateBlock; ++i) ASSERT_EQ(code_of(bytes, i), 0);
    }
    const auto back = decoded(map, bytes, values.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]),
                std::bit_cast<std::uint32_t>(reference.value(code_of(bytes, i), maximum_of(bytes, i / kStateBlock))))
          << i;
  }
}

TEST_P(BlockTargets, ADecodedBlockEncodesToItself) {
  std::mt19937 random(2);
  for (const auto map : {CodeMap::Signed, CodeMap::Unsigned})
    for (int round = 0; round < 300; ++round) {
      std::vector<float> values(3 * kStateBlock + 17);
      for (auto& value : values) {
        const auto size =
            std::ldexp(1.0f + static_cast<float>(random() % 1000) / 1000, static_cast<int>(random() % 60) - 95);
        value = map == CodeMap::Signed && random() % 2 ? -size : size;
      }
      const auto bytes = encoded(map, values);
      ASSERT_EQ(encoded(map, decoded(map, bytes, values.size())), bytes) << round;
    }
}

TEST_P(BlockTargets, BlocksThatAreTinyOrNotFinite) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const auto map : {CodeMap::Signed, CodeMap::Unsigned}) {
    for (const float tiny : {0.0f, 1e-40f, 0x1.fffffep-97f}) {
      const auto bytes = encoded(map, std::vector<float>(300, tiny));
      EXPECT_EQ(bytes, Bytes(bytes.size(), 0)) << tiny;
      EXPECT_EQ(decoded(map, bytes, 300), std::vector<float>(300, 0.0f));
    }
    EXPECT_EQ(decoded(map, encoded(map, std::vector<float>(300, 0x1p-96f)), 300), std::vector<float>(300, 0x1p-96f));
    for (const float bad : {kInfinite, -kInfinite, kNan}) {
      std::vector<float> values(600, 1.0f);
      values[300] = bad;
      const auto back = decoded(map, encoded(map, values), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (i / kStateBlock == 1)
          EXPECT_TRUE(std::isnan(back[i])) << i;
        else
          EXPECT_EQ(back[i], 1.0f) << i;
      }
    }
  }
}

TEST_P(BlockTargets, AnUpdateDecodesAndEncodes) {
  constexpr std::int64_t kNumel = 5 * kStateBlock * 4 + 100;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto values = [&](float size) {
    std::vector<float> made(kNumel);
    for (auto& value : made) value = size * normal(random);
    return made;
  };
  UpdateConstants c{};
  c.rule = Rule::AdamDecoupled;
  c.keep = 0.999f;
  c.beta1 = 0.9f, c.beta2 = 0.99f, c.new1 = 0.1f, c.new2 = 0.01f;
  c.root2 = 0.3f, c.eps = 1e-8f, c.negative_step = -0.01f;
  for (const auto master_dtype : {Dtype::F32, Dtype::BF16}) {
    auto p = values(1), m = values(0.1f), v = values(0.01f);
    const auto g = values(0.3f);
    for (auto& one : v) one = std::fabs(one);
    std::vector<char> master(p.size() * size_of(master_dtype));
    convert(master.data(), master_dtype, p.data(), Dtype::F32, kNumel);
    auto first = encoded(CodeMap::Signed, m), second = encoded(CodeMap::Unsigned, v);
    // The reference: whole vectors in fp32, then one rounding each.
    convert(p.data(), Dtype::F32, master.data(), master_dtype, kNumel);
    m = decoded(CodeMap::Signed, first, m.size());
    v = decoded(CodeMap::Unsigned, second, v.size());
    update_fp32_range(c, {p.data(), {m.data(), v.data()}, g.data(), Dtype::F32, nullptr, Dtype::F32}, 0.5f, 0, kNumel);
    auto wanted = master;
    convert(wanted.data(), master_dtype, p.data(), Dtype::F32, kNumel);
    const UpdateRange range{.master = master.data(),
                            .slots = {first.data(), second.data()},
                            .gradient = g.data(),
                            .gradient_dtype = Dtype::F32,
                            .parameter = nullptr,
                            .parameter_dtype = Dtype::F32,
                            .master_dtype = master_dtype,
                            .slots_in_blocks = true};
    update_range(c, range, 0.5f, 0, 4 * kStateBlock);
    update_range(c, range, 0.5f, 4 * kStateBlock, kNumel);
    EXPECT_EQ(master, wanted);
    EXPECT_EQ(first, encoded(CodeMap::Signed, m));
    EXPECT_EQ(second, encoded(CodeMap::Unsigned, v));
  }
}

// Adamax makes a norm of 0 its eps.
TEST_P(BlockTargets, WhatLiesBehindTheLastElementIsZero) {
  constexpr std::int64_t kNumel = kStateBlock + 37;
  UpdateConstants c{};
  c.rule = Rule::Adamax;
  c.beta1 = c.beta2 = 0.5f, c.new1 = 0.5f, c.eps = 1e-3f, c.negative_step = -0.01f;
  std::vector<float> master(kNumel, 1.0f), gradient(kNumel, 1e-8f);
  auto first = encoded(CodeMap::Signed, std::vector<float>(kNumel)),
       second = encoded(CodeMap::Unsigned, std::vector<float>(kNumel));
  const UpdateRange range{.master = master.data(),
                          .slots = {first.data(), second.data()},
                          .gradient = gradient.data(),
                          .gradient_dtype = Dtype::F32,
                          .parameter = nullptr,
                          .parameter_dtype = Dtype::F32,
                          .slots_in_blocks = true};
  update_range(c, range, 1, 0, kNumel);
  const auto norms = decoded(CodeMap::Unsigned, second, 2 * kStateBlock);
  for (std::int64_t i = 0; i < 2 * kStateBlock; ++i)
    EXPECT_EQ(norms[static_cast<std::size_t>(i)] != 0, i < kNumel) << i;
}

INSTANTIATE_TEST_SUITE_P(All, BlockTargets, testing::ValuesIn(simd_targets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace zero::kernels::blocks8_test
