#include "gpu/kernel_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "optim/clipping.h"

namespace zero::test {
namespace {

using kernels::Dtype;
using kernels::Rule;

constexpr Dtype kDtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F16};
// Shorter and longer than a quad, a warp, a launch's group; one and several pieces of a square sum.
constexpr std::int64_t kNumels[] = {0, 1, 3, 4, 7, 32, 255, 1027, 4096, 65536, 65537, 200003};

// A typed array that begins `shift` elements behind an address that divides by 64.
class Array {
 public:
  Array(Dtype dtype, std::int64_t numel, int shift = 0)
      : dtype_(dtype), numel_(numel), bytes_(static_cast<std::size_t>(numel + shift) * kernels::size_of(dtype) + 64) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    offset_ = (64 - address % 64) % 64 + static_cast<std::size_t>(shift) * kernels::size_of(dtype);
  }
  Array(const Array& other) : Array(other.dtype_, other.numel_) { std::memcpy(data(), other.data(), size()); }
  Array& operator=(const Array&) = delete;
  void* data() { return bytes_.data() + offset_; }
  const void* data() const { return bytes_.data() + offset_; }
  float* floats() { return static_cast<float*>(data()); }
  Dtype dtype() const { return dtype_; }
  std::size_t size() const { return static_cast<std::size_t>(numel_) * kernels::size_of(dtype_); }
  std::int64_t numel() const { return numel_; }
  std::uint32_t bits(std::int64_t i) const {
    std::uint32_t result = 0;
    std::memcpy(&result, static_cast<const char*>(data()) + i * static_cast<std::int64_t>(kernels::size_of(dtype_)),
                kernels::size_of(dtype_));
    return result;
  }
  void set_bits(std::int64_t i, std::uint32_t bits) {
    std::memcpy(static_cast<char*>(data()) + i * static_cast<std::int64_t>(kernels::size_of(dtype_)), &bits,
                kernels::size_of(dtype_));
  }

 private:
  Dtype dtype_;
  std::int64_t numel_;
  std::vector<char> bytes_;
  std::size_t offset_;
};

bool is_nan(std::uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::F32) return (bits & 0x7fffffffu) > 0x7f800000u;
  return (bits & 0x7fffu) > (dtype == Dtype::BF16 ? 0x7f80u : 0x7c00u);
}

void expect_same(const Array& got, const Array& expected, const std::string& what) {
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const auto a = got.bits(i), b = expected.bits(i);
    if (a == b || (is_nan(a, got.dtype()) && is_nan(b, got.dtype()))) continue;
    ADD_FAILURE() << what << ", element " << i << " of " << expected.numel() << ": got bits 0x" << std::hex << a
                  << ", expected 0x" << b;
    return;
  }
}

// Every pattern of bits is a value: zeros, subnormals, Inf and NaN come up.
void fill_any(Array& array, unsigned seed) {
  std::mt19937 random(seed);
  for (std::int64_t i = 0; i < array.numel(); ++i) array.set_bits(i, static_cast<std::uint32_t>(random()));
}

// Ordinary values around `size`, with a zero now and then.
void fill_near(Array& array, unsigned seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Array exact(Dtype::F32, array.numel());
  for (std::int64_t i = 0; i < array.numel(); ++i) exact.floats()[i] = i % 97 == 5 ? 0.0f : normal(random);
  kernels::convert(array.data(), array.dtype(), exact.data(), Dtype::F32, array.numel());
}

std::string text_of(Dtype a, Dtype b, std::int64_t numel, int shift) {
  return std::string(kernels::dtype_name(a)) + " to " + kernels::dtype_name(b) + ", " + std::to_string(numel) +
         " elements, shifted by " + std::to_string(shift);
}

// Variants 0 to 3: plain; with weight decay; a first step; Nesterov's momentum, and both ways of torch's lerp.
kernels::UpdateConstants constants_of(Rule rule, int variant) {
  kernels::UpdateConstants c{};
  c.rule = rule;
  c.has_weight_decay = variant % 2 == 1;
  c.first = variant == 2;
  c.nesterov = variant == 3;
  c.weight_decay = 0.013f;
  c.keep = 1 - 3e-3f * 0.013f;
  c.beta1 = variant == 3 ? 0.3f : 0.9f;
  c.beta2 = 0.999f;
  c.new1 = 1 - c.beta1;
  c.new2 = 1 - c.beta2;
  c.root2 = 0.1235f;
  c.eps = 1e-8f;
  c.negative_step = -3e-3f;
  c.momentum = 0.9f;
  c.undamped = 0.95f;
  c.decoupled = variant == 3;
  c.adaptive = variant != 2;
  c.correction2 = 0.37f;
  c.moment_step = -2e-3f;
  return c;
}

double square_sum(Kernels& kernels, const Array& in, std::int64_t numel) {
  return kernels.sums_of_squares({{in.data(), in.dtype(), numel}})[0];
}

}  // namespace

void check_conversions(Kernels& kernels) {
  // All 16-bit values.
  for (const auto in_dtype : {Dtype::BF16, Dtype::F16}) {
    Array in(in_dtype, 65536);
    for (std::int64_t i = 0; i < 65536; ++i) in.set_bits(i, static_cast<std::uint32_t>(i));
    for (const auto out_dtype : kDtypes) {
      Array got(out_dtype, 65536), expected(out_dtype, 65536);
      kernels.convert(got.data(), out_dtype, in.data(), in_dtype, 65536);
      kernels::convert(expected.data(), out_dtype, in.data(), in_dtype, 65536);
      expect_same(got, expected, "every " + text_of(in_dtype, out_dtype, 65536, 0));
    }
  }
  // fp32 values: random ones, midpoints between two 16-bit values, and their neighbours.
  constexpr std::int64_t kNumel = 1 << 19;
  Array in(Dtype::F32, kNumel);
  fill_any(in, 1);
  for (std::int64_t i = 0; i < kNumel; i += 2) {
    const auto bits = in.bits(i);
    const int places = i % 4 == 0 ? 16 : 13;
    in.set_bits(i, (bits & ~((1u << places) - 1u)) + (1u << (places - 1)) + static_cast<std::uint32_t>(i / 4 % 3) - 1u);
  }
  for (std::int64_t i = 0; i < 32768; ++i)  // fp16's subnormals and its overflow
    in.set_bits(i, (i % 2 == 0 ? 0x33000000u : 0x477f0000u) + static_cast<std::uint32_t>(i / 2) * 0x801u % 0x5800000u);
  for (const auto out_dtype : {Dtype::BF16, Dtype::F16}) {
    Array got(out_dtype, kNumel), expected(out_dtype, kNumel);
    kernels.convert(got.data(), out_dtype, in.data(), Dtype::F32, kNumel);
    kernels::convert(expected.data(), out_dtype, in.data(), Dtype::F32, kNumel);
    expect_same(got, expected, text_of(Dtype::F32, out_dtype, kNumel, 0));
  }
}

void check_sums(Kernels& kernels) {
  unsigned seed = 0;
  for (const auto in_dtype : kDtypes) {
    for (const auto out_dtype : kDtypes) {
      for (const auto numel : kNumels) {
        for (const int shift : {0, 1, 4}) {
          const auto what = text_of(in_dtype, out_dtype, numel, shift);
          for (const int num_parts : {1, 2, 3, 9}) {
            std::vector<Array> parts;
            std::vector<const void*> pointers;
            parts.reserve(static_cast<std::size_t>(num_parts));
            for (int p = 0; p < num_parts; ++p) {
              parts.emplace_back(in_dtype, numel, p == 0 ? shift : 0);
              p == 1 ? fill_any(parts.back(), ++seed) : fill_near(parts.back(), ++seed, 100.0f);
              pointers.push_back(parts.back().data());
            }
            Array got(out_dtype, numel, shift), expected(out_dtype, numel);
            kernels.sum_parts(got.data(), out_dtype, pointers.data(), num_parts, in_dtype, numel);
            kernels::sum_parts(expected.data(), out_dtype, pointers.data(), num_parts, in_dtype, numel);
            expect_same(got, expected, std::to_string(num_parts) + " parts, " + what);
          }
          Array in(in_dtype, numel, shift), got(out_dtype, numel, shift);
          fill_near(in, ++seed, 3.0f);
          fill_near(got, ++seed, 100.0f);
          Array expected(got);
          kernels.accumulate(got.data(), out_dtype, in.data(), in_dtype, numel);
          kernels::accumulate(expected.data(), out_dtype, in.data(), in_dtype, numel);
          expect_same(got, expected, "accumulated, " + what);
        }
      }
    }
  }
}

void check_scaling(Kernels& kernels) {
  unsigned seed = 100;
  for (const auto dtype : kDtypes) {
    for (const auto numel : kNumels) {
      for (const int shift : {0, 3}) {
        for (const float factor : {1.0f, 0.25f, 1.0f / 3, -3e38f}) {
          Array got(dtype, numel, shift);
          fill_any(got, ++seed);
          Array expected(got);
          kernels.scale(got.data(), dtype, factor, numel);
          kernels::scale(expected.data(), dtype, factor, numel);
          expect_same(got, expected, "scaled, " + text_of(dtype, dtype, numel, shift));
        }
      }
    }
  }
}

void check_square_sums(Kernels& kernels) {
  unsigned seed = 200;
  for (const auto dtype : kDtypes) {
    for (const auto numel : kNumels) {
      for (const int shift : {0, 1}) {
        Array in(dtype, numel, shift);
        fill_near(in, ++seed, 10.0f);
        EXPECT_EQ(square_sum(kernels, in, numel), kernels::sum_of_squares(in.data(), dtype, numel))
            << text_of(dtype, dtype, numel, shift);
      }
    }
    Array in(dtype, 200003);
    fill_near(in, ++seed, 10.0f);
    in.set_bits(131080, dtype == Dtype::F32 ? 0x7f800000u : dtype == Dtype::BF16 ? 0x7f80u : 0x7c00u);
    EXPECT_TRUE(std::isinf(square_sum(kernels, in, 200003)));
    in.set_bits(70000, dtype == Dtype::F32 ? 0x7fc00000u : 0x7fc0u | (dtype == Dtype::F16 ? 0x7e00u : 0u));
    EXPECT_TRUE(std::isnan(square_sum(kernels, in, 200003)));
  }
  // More vectors than one launch takes, of all dtypes, some without elements.
  std::vector<Array> arrays;
  std::vector<Kernels::Vector> vectors;
  arrays.reserve(1200);
  for (int k = 0; k < 1200; ++k) {
    const auto dtype = kDtypes[k % 3];
    const std::int64_t numel = k % 7 == 3 ? 0 : k % 97 == 5 ? 70000 : k % 1500;
    arrays.emplace_back(dtype, numel);
    fill_near(arrays.back(), ++seed, 10.0f);
    vectors.push_back({arrays.back().data(), dtype, numel});
  }
  const auto sums = kernels.sums_of_squares(vectors);
  ASSERT_EQ(sums.size(), vectors.size());
  for (std::size_t k = 0; k < sums.size(); ++k)
    EXPECT_EQ(sums[k], kernels::sum_of_squares(vectors[k].in, vectors[k].dtype, vectors[k].numel)) << "vector " << k;
}

void check_non_finite(Kernels& kernels) {
  for (const auto dtype : kDtypes) {
    const std::uint32_t infinite = dtype == Dtype::F32 ? 0xff800000u : dtype == Dtype::BF16 ? 0xff80u : 0xfc00u;
    for (const auto numel : kNumels) {
      Array in(dtype, numel);
      fill_near(in, 300, 1.0f);
      EXPECT_EQ(kernels.first_non_finite(in.data(), dtype, numel), -1);
      if (numel == 0) continue;
      in.set_bits(numel - 1, infinite);
      EXPECT_EQ(kernels.first_non_finite(in.data(), dtype, numel), numel - 1);
      in.set_bits(numel / 3, infinite | 1u);
      EXPECT_EQ(kernels.first_non_finite(in.data(), dtype, numel), numel / 3) << "of two, the first";
    }
  }
}

// Masters and states in 16 bits, rounded to the nearest and stochastically.
void check_narrow_updates(Kernels& kernels) {
  unsigned seed = 900;
  for (int number = 0; number <= static_cast<int>(Rule::Adadelta); ++number) {
    const auto c = constants_of(static_cast<Rule>(number), 0);
    for (const auto master_dtype : kDtypes)
      for (const auto slot_dtype : {Dtype::F32, Dtype::BF16})
        for (const std::uint64_t key : {std::uint64_t{0}, std::uint64_t{0x1234567890abcdefu}})
          for (const auto& [numel, shift] : {std::pair{1, 0}, {1027, 0}, {1026, 1}, {66000, 0}}) {
            Array gradient(Dtype::BF16, numel, shift), master(master_dtype, numel, shift), m(slot_dtype, numel, shift),
                v(slot_dtype, numel, shift), w(slot_dtype, numel, shift), parameter(Dtype::BF16, numel, shift);
            fill_near(gradient, ++seed, 30.0f);
            fill_near(master, ++seed, 0.02f);
            for (auto* slot : {&m, &v, &w}) fill_near(*slot, ++seed, 1e-3f);
            Array master2(master), m2(m), v2(v), w2(w), parameter2(parameter);
            const auto range_of = [&](Array& p, Array& a, Array& b, Array& d, Array& copy) {
              return kernels::UpdateRange{.master = p.data(),
                                          .slots = {a.data(), b.data(), d.data()},
                                          .gradient = gradient.data(),
                                          .gradient_dtype = Dtype::BF16,
                                          .parameter = copy.data(),
                                          .parameter_dtype = Dtype::BF16,
                                          .master_dtype = master_dtype,
                                          .slot_dtype = slot_dtype,
                                          .key = key,
                                          .first_element = 4711};
            };
            const float factor = 1.0f / 1024 * 0.731f;
            kernels.update(c, factor, {{range_of(master, m, v, w, parameter), numel}});
            kernels::update_range(c, range_of(master2, m2, v2, w2, parameter2), factor, 0, numel);
            const auto what = "rule " + std::to_string(number) + ", key " + std::to_string(key) + ", " +
                              text_of(master_dtype, slot_dtype, numel, shift);
            expect_same(master, master2, "master, " + what);
            expect_same(m, m2, "first slot, " + what);
            expect_same(v, v2, "second slot, " + what);
            expect_same(w, w2, "third slot, " + what);
            expect_same(parameter, parameter2, "copy, " + what);
            if (testing::Test::HasFailure()) return;
          }
  }
}

void check_updates(Kernels& kernels) {
  unsigned seed = 400;
  for (int number = 0; number <= static_cast<int>(Rule::Adadelta); ++number) {
    const auto rule = static_cast<Rule>(number);
    for (int variant = 0; variant < 4; ++variant) {
      const auto c = constants_of(rule, variant);
      for (const auto gradient_dtype : kDtypes) {
        for (int copy = -1; copy < 3; ++copy) {
          for (const auto& [numel, shift] : {std::pair{1, 0}, {1027, 0}, {1026, 1}, {66000, 0}}) {
            const auto parameter_dtype = copy < 0 ? Dtype::F32 : kDtypes[copy];
            Array gradient(gradient_dtype, numel, shift), master(Dtype::F32, numel, shift), m(Dtype::F32, numel, shift),
                v(Dtype::F32, numel, shift), w(Dtype::F32, numel, shift), parameter(parameter_dtype, numel, shift);
            fill_near(gradient, ++seed, 30.0f);
            if (variant == 1) fill_any(gradient, ++seed);
            fill_near(master, ++seed, 0.02f);
            fill_near(m, ++seed, 1e-3f);
            fill_near(v, ++seed, 1e-3f);
            fill_near(w, ++seed, 1e-3f);
            for (std::int64_t i = 0; i < numel; ++i) v.floats()[i] = std::fabs(v.floats()[i]);
            if (rule >= Rule::RmsProp && rule != Rule::NAdam && rule != Rule::RAdam)  // a mean of squares
              for (std::int64_t i = 0; i < numel; ++i) m.floats()[i] = std::fabs(m.floats()[i]);
            Array master2(master), m2(m), v2(v), w2(w), parameter2(parameter);
            const float factor = 1.0f / 1024 * 0.731f;
            const kernels::UpdateRange got{master.floats(), {m.floats(), v.floats(), w.floats()},  gradient.data(),
                                           gradient_dtype,  copy < 0 ? nullptr : parameter.data(), parameter_dtype};
            const kernels::UpdateRange expected{
                master2.floats(), {m2.floats(), v2.floats(), w2.floats()}, gradient.data(),
                gradient_dtype,   copy < 0 ? nullptr : parameter2.data(),  parameter_dtype};
            kernels.update(c, factor, {{got, numel}});
            kernels::update_range(c, expected, factor, 0, numel);
            const auto what = "rule " + std::to_string(static_cast<int>(rule)) + ", variant " +
                              std::to_string(variant) + ", " + text_of(gradient_dtype, parameter_dtype, numel, shift);
            expect_same(master, master2, "master, " + what);
            expect_same(m, m2, "first slot, " + what);
            expect_same(v, v2, "second slot, " + what);
            expect_same(w, w2, "third slot, " + what);
            expect_same(parameter, parameter2, "copy, " + what);
            if (testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
  check_narrow_updates(kernels);
  // More ranges than one launch takes, some without elements, some not aligned for quads.
  const auto c = constants_of(Rule::AdamDecoupled, 0);
  std::vector<Array> all;
  all.reserve(6000);
  const auto next = [&](std::int64_t numel, int shift, float size) -> Array& {
    fill_near(all.emplace_back(Dtype::F32, numel, shift), ++seed, size);
    return all.back();
  };
  std::vector<kernels::SizedRange> ranges;
  std::vector<std::pair<const Array*, const Array*>> compared;
  for (int k = 0; k < 600; ++k) {
    const std::int64_t numel = k % 7 == 3 ? 0 : k % 97 == 5 ? 30000 : k % 1500;
    const int shift = k % 5 == 2 ? 1 : 0;
    auto &gradient = next(numel, shift, 30.0f), &master = next(numel, shift, 0.02f), &m = next(numel, shift, 1e-3f),
         &v = next(numel, shift, 1e-3f);
    for (std::int64_t i = 0; i < numel; ++i) v.floats()[i] = std::fabs(v.floats()[i]);
    auto &master2 = all.emplace_back(master), &m2 = all.emplace_back(m), &v2 = all.emplace_back(v);
    const auto range_of = [&](Array& p, Array& a, Array& b) {
      return kernels::UpdateRange{p.floats(), {a.floats(), b.floats()}, gradient.data(), Dtype::F32, nullptr,
                                  Dtype::F32};
    };
    ranges.push_back({range_of(master, m, v), numel});
    kernels::update_range(c, range_of(master2, m2, v2), 0.5f, 0, numel);
    for (const auto& pair : {std::pair{&master, &master2}, {&m, &m2}, {&v, &v2}}) compared.push_back(pair);
  }
  kernels.update(c, 0.5f, ranges);
  for (std::size_t k = 0; k < compared.size(); ++k)
    expect_same(*compared[k].first, *compared[k].second, "range " + std::to_string(k / 3));
}

namespace {

double as_double(std::uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void expect_same_double(double got, double expected, const std::string& what) {
  EXPECT_TRUE(std::memcmp(&got, &expected, sizeof got) == 0 || (std::isnan(got) && std::isnan(expected)))
      << what << ": got " << got << ", expected " << expected;
}

// Groups of 0 to 70 sums, in an order of their own.
void check_orders(Kernels& kernels) {
  std::mt19937 random(5);
  for (const int groups : {1, 2, 13, 40}) {
    std::vector<double> sums(2000);
    for (auto& sum : sums) sum = std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 40) - 50);
    std::vector<int> order;
    double total = 0;
    for (int g = 0; g < groups; ++g) {
      double group = 0;
      for (auto count = g % 3 == 1 ? 0 : random() % 71; count > 0; --count) {
        order.push_back(static_cast<int>(random() % sums.size()));
        group += sums[static_cast<std::size_t>(order.back())];
      }
      order.push_back(-1);
      total += group;
    }
    const auto out = kernels.add_sums(sums, order, 0x7ff0123456789abcu);  // as a double a NaN
    expect_same_double(out[0], total, std::to_string(groups) + " groups");
    EXPECT_EQ(std::memcmp(&out[1], "\xbc\x9a\x78\x56\x34\x12\xf0\x7f", 8), 0) << "the tag's bits";
  }
}

void check_factors(Kernels& kernels) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  std::vector<double> sums{0, 1, 4.0000001, 0.3, 1e-320, 1e-30, 3e20, 1e300, kInf, std::nan("")};
  std::mt19937 random(6);
  for (int k = 0; k < 200; ++k)
    sums.push_back(std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 90) - 60));
  for (const double sum : sums)
    for (const double scale : {1.0, 1024.0, 65536.0, 3.0})
      for (const double clip : {0.0, 0.5, 1.0, 1e-3})
        for (const double post : {1.0, 1.0 / 3})
          for (const int checks : {0, 1}) {
            const auto norm = kernels.step_norm({sum, as_double(7)}, {scale, clip, post, checks});
            const double host = std::sqrt(sum) * post / scale;
            const float factor = optim::gradient_factor(scale, std::isfinite(host) ? host : -1, clip, post);
            const auto what = "sum " + std::to_string(sum) + ", scale " + std::to_string(scale) + ", clip " +
                              std::to_string(clip) + ", factor " + std::to_string(post);
            expect_same_double(norm.total, sum, what);
            EXPECT_EQ(norm.skip, checks != 0 && !std::isfinite(sum)) << what;
            EXPECT_EQ(norm.factor, factor) << what;
            if (testing::Test::HasFailure()) return;
          }
  // Of several ranks, in rank order.
  std::vector<double> parts;
  double total = 0;
  for (int rank = 0; rank < 5; ++rank) {
    parts.push_back(sums[static_cast<std::size_t>(20 + rank)]);
    parts.push_back(as_double(0xfff8000000000001u));  // a NaN
    total += parts[static_cast<std::size_t>(2 * rank)];
  }
  auto norm = kernels.step_norm(parts, {1, 0, 1, 1});
  expect_same_double(norm.total, total, "five ranks");
  EXPECT_EQ(norm.skip, 0) << "equal tags";
  parts[9] = as_double(0xfff8000000000002u);
  EXPECT_EQ(kernels.step_norm(parts, {1, 0, 1, 1}).skip, 1) << "another tag";
}

}  // namespace

void check_norms(Kernels& kernels) {
  check_orders(kernels);
  check_factors(kernels);
  const auto c = constants_of(Rule::AdamDecoupled, 0);
  for (const int skip : {0, 1}) {
    Array gradient(Dtype::F32, 1027), master(Dtype::F32, 1027), m(Dtype::F32, 1027), v(Dtype::F32, 1027);
    unsigned seed = 900;
    for (auto* array : {&gradient, &master, &m, &v}) fill_near(*array, ++seed, 0.5f);
    for (std::int64_t i = 0; i < 1027; ++i) v.floats()[i] = std::fabs(v.floats()[i]);
    Array master2(master), m2(m), v2(v);
    const auto range_of = [&](Array& p, Array& a, Array& b) {
      return kernels::UpdateRange{p.floats(), {a.floats(), b.floats()}, gradient.data(), Dtype::F32, nullptr,
                                  Dtype::F32};
    };
    kernels.update_by_norm(c, {1, 0.37f, skip}, {{range_of(master, m, v), 1027}});
    if (skip == 0) kernels::update_range(c, range_of(master2, m2, v2), 0.37f, 0, 1027);
    for (const auto& [got, expected] : {std::pair{&master, &master2}, {&m, &m2}, {&v, &v2}})
      expect_same(*got, *expected, skip == 0 ? "by the norm's factor" : "skipped");
  }
}

}  // namespace zero::test
