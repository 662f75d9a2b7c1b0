// Masters and optimizer states in 16 bits: stochastic rounding has an exact mean, and an update of stored states is the
// fp32 update between opening and rounding, on every SIMD target and for any division.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>

#include "kernels/cuda/random_bits.h"
#include "kernels/update_simd.h"

namespace zero::kernels::rounding_test {
namespace {

constexpr Dtype kNarrow[] = {Dtype::BF16, Dtype::F16};
using Words = std::vector<std::uint16_t>;

float decoded(std::uint16_t bits, Dtype dtype) {
  float value = 0;
  convert(&value, Dtype::F32, &bits, dtype, 1);
  return value;
}

struct Rounded {
  Words stored;
  std::vector<float> exact;  // what was rounded
};

// What an update stores as value number `which` (0: the master) if it makes it the gradient, and all was -0 before: NaN
// and infinity may become NaN.
Rounded update_to(const std::vector<float>& values, Dtype dtype, std::uint64_t key, std::int64_t first, int which) {
  constexpr Rule kRules[] = {Rule::Sgd, Rule::SgdMomentum, Rule::RmsPropMomentum, Rule::RmsPropCenteredMomentum};
  UpdateConstants c{};
  c.rule = kRules[which];
  c.first = true;
  c.negative_step = c.momentum = c.eps = 1;
  c.beta2 = which == 3 ? 0 : 1, c.new2 = 1 - c.beta2;
  const auto numel = static_cast<std::int64_t>(values.size());
  std::vector<float> exact[4];
  Words stored[4];
  for (int k = 0; k <= which; ++k) exact[k].assign(values.size(), -0.0f), stored[k].assign(values.size(), 0x8000);
  UpdateRange range{.master = exact[0].data(),
                    .slots = {},
                    .gradient = values.data(),
                    .gradient_dtype = Dtype::F32,
                    .parameter = nullptr,
                    .parameter_dtype = Dtype::F32};
  for (int k = 1; k <= which; ++k) range.slots[k - 1] = exact[k].data();
  update_fp32_range(c, range, 1, 0, numel);
  range.master = stored[0].data(), range.master_dtype = dtype, range.slot_dtype = dtype;
  range.key = key, range.first_element = first;
  for (int k = 1; k <= which; ++k) range.slots[k - 1] = stored[k].data();
  update_range(c, range, 1, 0, numel);
  return {stored[which], exact[which]};
}

Words rounded(const std::vector<float>& values, Dtype dtype, std::uint64_t key, std::int64_t first, int which = 0) {
  const auto result = update_to(values, dtype, key, first, which);
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(std::bit_cast<std::uint32_t>(result.exact[i]), std::bit_cast<std::uint32_t>(values[i])) << which;
  return result.stored;
}

// The largest stored value that is not above `value`, and the one above it.
std::pair<double, double> neighbours(float value, Dtype dtype) {
  const float size = std::fabs(value);
  std::uint16_t bits = 0;
  convert(&bits, dtype, &size, Dtype::F32, 1);
  if (decoded(bits, dtype) > size) --bits;
  const double below = decoded(bits, dtype), above = decoded(static_cast<std::uint16_t>(bits + 1), dtype);
  return value < 0 ? std::pair{-above, -below} : std::pair{below, above};
}

class Targets : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { set_simd_target(GetParam()); }
  void TearDown() override { set_simd_target(""); }
};

TEST_P(Targets, TheMeanOfManyRoundingsIsExact) {
  constexpr std::int64_t kDraws = 4'000'000;  // 1e-3 is four standard deviations of their mean, or more
  int which = 0;
  for (const auto dtype : kNarrow)
    for (const float value : {1.0f + 1.0f / 4096, -0.3f, -7e-6f, 123.4567f}) {
      which = (which + 1) % 4;
      const auto [below, above] = neighbours(value, dtype);
      const auto bits = rounded(std::vector<float>(kDraws, value), dtype, 17, 5, which);
      std::vector<float> got(bits.size());
      convert(got.data(), Dtype::F32, bits.data(), dtype, kDraws);
      double sum = 0;
      for (const double one : got) {
        ASSERT_TRUE(one == below || one == above) << value << " became " << one;
        sum += (one - value) / (above - below);
      }
      EXPECT_LT(std::fabs(sum / kDraws), 1e-3) << value << " in " << dtype_name(dtype) << ", value " << which;
    }
}

TEST_P(Targets, BitsAreThoseOfTheScalarCode) {
  std::mt19937 random(3);
  std::vector<float> values{0.0f,
                            -0.0f,
                            1.0f,
                            65504.0f,
                            65519.996f,
                            65520.0f,
                            -65519.0f,
                            1e30f,
                            3.3895e38f,
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            0x1p-14f,
                            0x1.fffffep-15f,
                            0x1p-24f,
                            0x1p-25f,
                            1e-40f};
  while (values.size() < 20'011) {
    const auto bits = static_cast<std::uint32_t>(random());
    const auto near = (bits & 0x80ffffffu) | ((100 + bits % 44) << 23 & 0x7f800000u);  // around fp16's range
    values.push_back(std::bit_cast<float>(values.size() % 2 == 0 ? bits : near));
  }
  constexpr std::uint64_t kKey = 0x123456789abcdef0u;
  constexpr std::int64_t kFirst = (std::int64_t{1} << 32) - 1000;
  for (const auto dtype : kNarrow)
    for (int which = 0; which < 4; ++which) {
      const auto [got, exact] = update_to(values, dtype, kKey, kFirst, which);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto draw = cuda::draw_of(cuda::random_bits(kKey, kFirst + static_cast<std::int64_t>(i)), which);
        const auto wanted =
            dtype == Dtype::BF16 ? cuda::to_bf16_stochastic(exact[i], draw) : cuda::to_f16_stochastic(exact[i], draw);
        if (std::isnan(exact[i]))
          ASSERT_TRUE(std::isnan(decoded(got[i], dtype)) && std::isnan(decoded(wanted, dtype)));
        else
          ASSERT_EQ(got[i], wanted) << exact[i] << " in " << dtype_name(dtype) << ", value " << which;
      }
    }
}

// What a dtype has is not moved, infinity and the largest value of fp16 included.
TEST_P(Targets, StoredValuesStay) {
  for (const auto dtype : kNarrow) {
    std::vector<float> values;
    Words words;
    for (unsigned bits = 0; bits < 65536; ++bits) {
      const float value = decoded(static_cast<std::uint16_t>(bits), dtype);
      if (std::isnan(value)) continue;
      values.push_back(value);
      words.push_back(static_cast<std::uint16_t>(bits));
    }
    EXPECT_EQ(rounded(values, dtype, 99, 0), words) << dtype_name(dtype);
  }
}

TEST_P(Targets, ADivisionChangesNothingAndAKeyDoes) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<float> values(3001);
  for (auto& value : values) value = normal(random);
  const auto whole = rounded(values, Dtype::BF16, 7, 40);
  for (const std::size_t cut : {1, 16, 1023, 2999}) {
    auto parts = rounded({values.begin(), values.begin() + static_cast<std::ptrdiff_t>(cut)}, Dtype::BF16, 7, 40);
    const auto rest = rounded({values.begin() + static_cast<std::ptrdiff_t>(cut), values.end()}, Dtype::BF16, 7,
                              40 + static_cast<std::int64_t>(cut));
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, whole) << cut;
  }
  EXPECT_NE(rounded(values, Dtype::BF16, 8, 40), whole);
  EXPECT_NE(rounded(values, Dtype::BF16, 7, 41), whole);
  EXPECT_NE(rounded(values, Dtype::BF16, 7, 40, 1), whole);
}

// Draws of pairs that a training might notice: of one element, of neighbours, of updates in a row.
TEST(RandomBits, DrawsAreUniformAndIndependentInPairs) {
  constexpr std::int64_t kElements = 1'000'000;
  const auto key = rounding_key(1234, 7, 99), next = rounding_key(1234, 8, 99), other = rounding_key(1234, 7, 100);
  struct Draw {
    std::uint64_t key;
    std::int64_t offset;
    int value;
  };
  std::vector<Draw> draws;
  for (int value = 0; value < 4; ++value) draws.push_back({key, 0, value});
  for (const std::int64_t offset : {1, 2, 16, 256, 65536}) draws.push_back({key, offset, 0});
  draws.insert(draws.end(), {{key, 1, 1}, {key, 1, 2}, {next, 0, 0}, {next, 0, 2}, {next, 1, 0}, {other, 0, 0}});
  const auto drawn = [](const Draw& d, std::int64_t i) {
    return cuda::draw_of(cuda::random_bits(d.key, i + d.offset), d.value);
  };
  for (std::size_t a = 0; a < draws.size(); ++a) {
    double sum = 0;
    for (std::int64_t i = 0; i < kElements; ++i) sum += (drawn(draws[a], i) + 0.5) / 65536;
    EXPECT_LT(std::fabs(sum / kElements - 0.5), 1e-3) << a;
    for (std::size_t b = a + 1; b < draws.size(); ++b) {
      // Chi squared of 16 x 16 classes, of the highest and of the lowest bits: 255 +- 22.6.
      std::vector<int> high(256), low(256);
      for (std::int64_t i = 0; i < kElements; ++i) {
        const auto x = drawn(draws[a], i), y = drawn(draws[b], i);
        ++high[(x >> 12) * 16 + (y >> 12)];
        ++low[(x & 15) * 16 + (y & 15)];
      }
      for (const auto& counts : {high, low}) {
        double squares = 0;
        for (const int count : counts) squares += std::pow(count - kElements / 256.0, 2) / (kElements / 256.0);
        EXPECT_LT(squares, 255 + 5 * 22.6) << a << " " << b;
        EXPECT_GT(squares, 255 - 5 * 22.6) << a << " " << b;
      }
    }
  }
}

TEST(RoundingKey, DependsOnSeedUpdateAndParameter) {
  std::set<std::uint64_t> keys;
  for (const std::uint64_t seed : {0, 1, 1234})
    for (const std::int64_t update : {1, 2, 3})
      for (const std::uint64_t parameter : {0, 5, 6}) keys.insert(rounding_key(seed, update, parameter));
  EXPECT_EQ(keys.size(), 27u);
  EXPECT_FALSE(keys.contains(0));
}

// Element i of a vector in some dtype.
struct Stored {
  Dtype dtype;
  std::vector<char> bytes;
  Stored(Dtype of, const std::vector<float>& values) : dtype(of), bytes(values.size() * size_of(of)) {
    convert(bytes.data(), dtype, values.data(), Dtype::F32, static_cast<std::int64_t>(values.size()));
  }
  std::vector<float> fp32() const {
    std::vector<float> values(bytes.size() / size_of(dtype));
    convert(values.data(), Dtype::F32, bytes.data(), dtype, static_cast<std::int64_t>(values.size()));
    return values;
  }
  // Element by element with the scalar code.
  void round_from(const std::vector<float>& values, std::uint64_t key, std::int64_t first, int value) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      cuda::store(bytes.data(), dtype, at,
                  cuda::as_stored(values[i], dtype, key, cuda::random_bits(key, first + at), value));
    }
  }
};

UpdateConstants adam() {
  UpdateConstants c{};
  c.rule = Rule::AmsgradDecoupled;
  c.keep = 0.999f;
  c.beta1 = 0.9f, c.beta2 = 0.99f, c.new1 = 0.1f, c.new2 = 0.01f;
  c.root2 = 0.3f, c.eps = 1e-8f, c.negative_step = -0.01f;
  return c;
}

TEST_P(Targets, AnUpdateOpensAndRounds) {
  constexpr std::int64_t kNumel = 2500, kFirst = 77;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto values = [&](float size) {
    std::vector<float> made(kNumel);
    for (auto& value : made) value = std::fabs(size * normal(random));
    return made;
  };
  const auto p = values(1), m = values(0.1f), v = values(0.01f), w = values(0.02f), g = values(0.3f);
  for (const auto master_dtype : {Dtype::F32, Dtype::BF16, Dtype::F16})
    for (const auto slot_dtype : {Dtype::F32, Dtype::BF16})
      for (const std::uint64_t key : {0, 12345})
        for (const auto copy_dtype : {Dtype::BF16, Dtype::F16}) {
          Stored master(master_dtype, p), slots[] = {{slot_dtype, m}, {slot_dtype, v}, {slot_dtype, w}};
          Stored copy(copy_dtype, std::vector<float>(kNumel));
          auto wanted = master, wanted_copy = copy;
          Stored wanted_slots[] = {slots[0], slots[1], slots[2]};
          // The reference: whole vectors in fp32, then one rounding each.
          auto fp32 = master.fp32();
          std::vector<float> states[] = {slots[0].fp32(), slots[1].fp32(), slots[2].fp32()};
          update_fp32_range(adam(),
                            {fp32.data(),
                             {states[0].data(), states[1].data(), states[2].data()},
                             g.data(),
                             Dtype::F32,
                             nullptr,
                             Dtype::F32},
                            0.5f, 0, kNumel);
          wanted.round_from(fp32, key, kFirst, 0);
          for (int k = 0; k < 3; ++k) wanted_slots[k].round_from(states[k], key, kFirst, 1 + k);
          wanted_copy = Stored(copy_dtype, wanted.fp32());
          const UpdateRange range{.master = master.bytes.data(),
                                  .slots = {slots[0].bytes.data(), slots[1].bytes.data(), slots[2].bytes.data()},
                                  .gradient = g.data(),
                                  .gradient_dtype = Dtype::F32,
                                  .parameter = copy.bytes.data(),
                                  .parameter_dtype = copy_dtype,
                                  .master_dtype = master_dtype,
                                  .slot_dtype = slot_dtype,
                                  .key = key,
                                  .first_element = kFirst};
          std::int64_t begin = 0;
          for (const std::int64_t end : {std::int64_t{1}, std::int64_t{1030}, std::int64_t{2300}, kNumel}) {
            update_range(adam(), range, 0.5f, begin, end);
            begin = end;
          }
          const auto what =
              std::string(dtype_name(master_dtype)) + " " + dtype_name(slot_dtype) + " key " + std::to_string(key);
          EXPECT_EQ(master.bytes, wanted.bytes) << what;
          for (int k = 0; k < 3; ++k) EXPECT_EQ(slots[k].bytes, wanted_slots[k].bytes) << what << " state " << k;
          EXPECT_EQ(copy.bytes, wanted_copy.bytes) << what;
        }
}

INSTANTIATE_TEST_SUITE_P(All, Targets, testing::ValuesIn(simd_targets()), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace zero::kernels::rounding_test
