// The bits of every kernel and of the models' fused loops, on any machine: results for inputs that are made by integer
// arithmetic have the hashes of tests/golden/kernel_bits.txt, which were recorded on x86-64. ZERO_WRITE_GOLDEN=1 writes
// the file. A NaN counts as one value: its payload is unspecified.
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "kernels/blocks8.h"
#include "kernels/cuda/random_bits.h"
#include "kernels/quantize.h"
#include "kernels/update_simd.h"
#include "models/fused_loops.h"

namespace zero::kernels::kernel_bits_test {
namespace {

const char* const kFile = ZERO_SOURCE_DIR "/tests/golden/kernel_bits.txt";
constexpr Dtype kDtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F16};
constexpr std::int64_t kNumel = 3001;  // no multiple of any vector, block or piece

// FNV-1a.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* const from = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) value_ = (value_ ^ from[i]) * 0x100000001b3ull;
  }
  // Elements of a dtype.
  void add(const void* data, Dtype dtype, std::int64_t numel) {
    const bool wide = dtype == Dtype::F32;
    const std::uint32_t magnitude = wide ? 0x7fffffffu : 0x7fffu,
                        infinity = wide ? 0x7f800000u : (dtype == Dtype::BF16 ? 0x7f80u : 0x7c00u);
    for (std::int64_t i = 0; i < numel; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, static_cast<const char*>(data) + i * static_cast<std::int64_t>(size_of(dtype)),
                  size_of(dtype));
      if ((bits & magnitude) > infinity) bits = magnitude;
      add(&bits, sizeof bits);
    }
  }
  std::string text() const {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value_));
    return digits;
  }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

// splitmix64.
std::uint64_t next(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

using Values = std::vector<float>;

// Signs and mantissas at random, magnitudes from 2^least to 2^(least + octaves); every 13th is 0 or -0.
Values finite(std::uint64_t seed, std::int64_t numel = kNumel, int least = -12, int octaves = 14) {
  Values values(static_cast<std::size_t>(numel));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = next(seed);
    const auto exponent = static_cast<std::uint32_t>(127 + least) +
                          static_cast<std::uint32_t>(bits >> 40) % static_cast<std::uint32_t>(octaves);
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 32 & 1u) << 31;
    values[i] =
        std::bit_cast<float>(i % 13 == 5 ? sign : sign | exponent << 23 | static_cast<std::uint32_t>(bits & 0x7fffffu));
  }
  return values;
}

Values not_negative(std::uint64_t seed, std::int64_t numel = kNumel) {
  auto values = finite(seed, numel, -20, 16);
  for (auto& value : values) value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  return values;
}

// Any bits, and those where rounding to 16 bits is decided: half way between two values, subnormal, near the largest.
Values any(std::uint64_t seed) {
  Values values = finite(seed, kNumel, -28, 46);
  for (std::size_t i = 0; i < values.size(); ++i) {
    auto bits = std::bit_cast<std::uint32_t>(values[i]);
    if (i % 5 == 1) bits = static_cast<std::uint32_t>(next(seed));
    if (i % 5 == 2) bits = (bits & ~0xffffu) | 0x8000u;
    if (i % 5 == 3) bits = (bits & ~0x1fffu) | 0x1000u;
    if (i % 41 == 7) bits = 0x477fe000u + static_cast<std::uint32_t>(next(seed) % 0x2000u);
    if (i % 41 == 8) bits &= 0x807fffffu;
    if (i % 41 == 9) bits = 0x7f800000u | (bits & 0x80000000u);
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

// In memory of a dtype.
std::vector<char> stored(const Values& values, Dtype dtype) {
  std::vector<char> out(values.size() * size_of(dtype));
  convert(out.data(), dtype, values.data(), Dtype::F32, static_cast<std::int64_t>(values.size()));
  return out;
}

using Hashes = std::map<std::string, std::string>;

void hash_conversions(Hashes& hashes) {
  for (const auto from : kDtypes) {
    // All values of 16 bits.
    std::vector<std::uint16_t> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const auto some = any(1);
    const auto numel = from == Dtype::F32 ? kNumel : static_cast<std::int64_t>(all.size());
    const void* const in = from == Dtype::F32 ? static_cast<const void*>(some.data()) : all.data();
    for (const auto to : kDtypes) {
      std::vector<char> out(static_cast<std::size_t>(numel) * size_of(to));
      convert(out.data(), to, in, from, numel);
      Hash hash;
      hash.add(out.data(), to, numel);
      hashes[std::string("convert ") + dtype_name(from) + " to " + dtype_name(to)] = hash.text();
    }
  }
}

void hash_sums(Hashes& hashes) {
  for (const auto in : kDtypes)
    for (const auto out : kDtypes) {
      Hash hash;
      std::vector<std::vector<char>> parts;
      for (std::uint64_t p = 0; p < 4; ++p) parts.push_back(stored(p == 3 ? any(2) : finite(3 + p), in));
      std::vector<const void*> pointers;
      for (const auto& part : parts) pointers.push_back(part.data());
      std::vector<char> sum(kNumel * size_of(out));
      for (const auto stores : {Stores::Cached, Stores::Streaming})
        for (int count = 1; count <= 4; ++count) {
          sum_parts(sum.data(), out, pointers.data(), count, in, kNumel, stores);
          hash.add(sum.data(), out, kNumel);
        }
      accumulate(sum.data(), out, parts[1].data(), in, kNumel);
      hash.add(sum.data(), out, kNumel);
      scale(sum.data(), out, 0.3f, kNumel);
      hash.add(sum.data(), out, kNumel);
      hashes[std::string("sum ") + dtype_name(in) + " to " + dtype_name(out)] = hash.text();
    }
  for (const auto dtype : kDtypes) {
    Hash hash;
    const auto values = stored(finite(9, 200003), dtype);
    for (const std::int64_t offset : {0, 64, 65472}) {
      const double sum = sum_of_squares(values.data(), dtype, 200003, offset);
      hash.add(&sum, sizeof sum);
    }
    hashes[std::string("square sum ") + dtype_name(dtype)] = hash.text();
  }
}

void hash_integers(Hashes& hashes) {
  for (const int bits : {8, 4})
    for (const auto dtype : kDtypes) {
      Hash hash;
      auto values = finite(11, kNumel, -40, 30);
      values[700] = std::bit_cast<float>(0x7f800000u);
      const auto in = stored(values, dtype);
      // The scales, then the integers.
      std::vector<char> packed(static_cast<std::size_t>(quantized_bytes(kNumel, bits)));
      quantize(packed.data(), bits, in.data(), dtype, kNumel);
      const std::int64_t blocks = (kNumel + kQuantizedBlock - 1) / kQuantizedBlock;
      hash.add(packed.data(), Dtype::F32, blocks);
      hash.add(packed.data() + 4 * blocks, static_cast<std::size_t>((kNumel * bits + 7) / 8));
      std::vector<char> out(kNumel * size_of(dtype));
      dequantize(out.data(), dtype, packed.data(), bits, kNumel);
      hash.add(out.data(), dtype, kNumel);
      auto sum = finite(12);
      add_dequantized(sum.data(), packed.data(), bits, kNumel);
      hash.add(sum.data(), Dtype::F32, kNumel);
      hashes["quantize " + std::to_string(bits) + " bits " + dtype_name(dtype)] = hash.text();
    }
  for (const auto map : {CodeMap::Signed, CodeMap::Unsigned}) {
    Hash hash;
    hash.add(values_of(map).data(), Dtype::F32, 256);
    auto values = map == CodeMap::Signed ? finite(13, kNumel, -40, 30) : not_negative(14);
    values[700] = std::bit_cast<float>(0x7fc00000u);
    for (std::size_t i = 1024; i < 1280; ++i) values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(i));
    std::vector<char> blocks(static_cast<std::size_t>(state_block_bytes(kNumel)));
    encode_blocks(blocks.data(), map, values.data(), kNumel);
    for (std::size_t at = 0; at < blocks.size(); at += kStateBlockBytes) {
      hash.add(blocks.data() + at, Dtype::F32, 1);
      hash.add(blocks.data() + at + 4, kStateBlock);
    }
    decode_blocks(values.data(), map, blocks.data(), kNumel);
    hash.add(values.data(), Dtype::F32, kNumel);
    hashes[map == CodeMap::Signed ? "blocks8 with signs" : "blocks8 without signs"] = hash.text();
  }
}

// Of the scalar code; rounding_test compares the vectors with it.
void hash_roundings(Hashes& hashes) {
  std::vector<std::uint32_t> drawn(kNumel);
  for (std::int64_t i = 0; i < kNumel; ++i)
    drawn[static_cast<std::size_t>(i)] = cuda::random_bits(0x0123456789abcdefull, (std::int64_t{1} << 32) - 1000 + i);
  Hash random;
  random.add(drawn.data(), 4 * drawn.size());
  hashes["random bits"] = random.text();
  const auto values = any(21);
  for (const auto dtype : {Dtype::BF16, Dtype::F16}) {
    Hash hash;
    std::vector<std::uint16_t> out(kNumel);
    for (int value = 0; value < 4; ++value) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        const auto draw = cuda::draw_of(drawn[i], value);
        out[i] =
            dtype == Dtype::BF16 ? cuda::to_bf16_stochastic(values[i], draw) : cuda::to_f16_stochastic(values[i], draw);
      }
      hash.add(out.data(), dtype, kNumel);
    }
    hashes[std::string("rounding to ") + dtype_name(dtype)] = hash.text();
  }
}

struct RuleCase {
  const char* name;
  Rule rule;
  int slots;
};
constexpr RuleCase kRules[] = {
    {"adamw", Rule::AdamDecoupled, 2},
    {"adam", Rule::AdamL2, 2},
    {"amsgrad decoupled", Rule::AmsgradDecoupled, 3},
    {"amsgrad", Rule::AmsgradL2, 3},
    {"sgd", Rule::Sgd, 0},
    {"sgd momentum", Rule::SgdMomentum, 1},
    {"adagrad", Rule::Adagrad, 1},
    {"lion", Rule::Lion, 1},
    {"rmsprop", Rule::RmsProp, 1},
    {"rmsprop momentum", Rule::RmsPropMomentum, 2},
    {"rmsprop centered", Rule::RmsPropCentered, 2},
    {"rmsprop centered momentum", Rule::RmsPropCenteredMomentum, 3},
    {"nadam", Rule::NAdam, 2},
    {"radam", Rule::RAdam, 2},
    {"adamax", Rule::Adamax, 2},
    {"adadelta", Rule::Adadelta, 2},
};

UpdateConstants constants_of(Rule rule, int step) {
  UpdateConstants c{};
  c.rule = rule;
  c.has_weight_decay = true;
  c.first = step == 0;
  c.nesterov = c.decoupled = step % 2 == 1;
  c.adaptive = true;
  c.weight_decay = 0.1f, c.keep = 0.999f;
  c.beta1 = step == 2 ? 0.3f : 0.9f, c.new1 = step == 2 ? 0.7f : 0.1f;  // both ways of the moments' lerp
  c.beta2 = 0.95f, c.new2 = 0.05f;
  c.root2 = 0.223606798f, c.correction2 = 0.0975f;
  c.eps = 1e-8f;
  c.negative_step = -0.01f, c.moment_step = -0.003f;
  c.momentum = 0.8f, c.undamped = 0.7f;
  return c;
}

// What holds the states between updates.
enum class Held { Fp32, Bf16, Fp16Stochastic, Blocks8 };
constexpr std::pair<Held, const char*> kHeld[] = {
    {Held::Fp32, "fp32"}, {Held::Bf16, "bf16"}, {Held::Fp16Stochastic, "fp16 at random"}, {Held::Blocks8, "8 bits"}};

// Three updates. States are not negative, as those of which a rule takes the root.
std::string hash_of_updates(const RuleCase& each, Held held) {
  const auto dtype = held == Held::Bf16 ? Dtype::BF16 : held == Held::Fp16Stochastic ? Dtype::F16 : Dtype::F32;
  auto master = stored(finite(31), dtype);
  std::vector<char> slots[kMostSlots];
  for (int k = 0; k < each.slots; ++k) {
    if (held == Held::Blocks8) {
      slots[k].resize(static_cast<std::size_t>(state_block_bytes(kNumel)));
      encode_blocks(slots[k].data(), state_map(k), not_negative(32).data(), kNumel);
    } else {
      slots[k] = stored(not_negative(32 + static_cast<std::uint64_t>(k)), dtype);
    }
  }
  Hash hash;
  for (int step = 0; step < 3; ++step) {
    const auto in = kDtypes[step], out = kDtypes[(step + 1) % 3];
    const auto gradient = stored(finite(41 + static_cast<std::uint64_t>(step), kNumel, -20, 16), in);
    std::vector<char> parameter(kNumel * size_of(out));
    UpdateRange range{.master = master.data(),
                      .slots = {},
                      .gradient = gradient.data(),
                      .gradient_dtype = in,
                      .parameter = parameter.data(),
                      .parameter_dtype = out,
                      .master_dtype = dtype,
                      .slot_dtype = dtype,
                      .slots_in_blocks = held == Held::Blocks8};
    for (int k = 0; k < each.slots; ++k) range.slots[k] = slots[k].data();
    if (held == Held::Fp16Stochastic) range.key = rounding_key(7, step, 0xfeedull), range.first_element = 12345;
    update_range(constants_of(each.rule, step), range, 0.37f, 0, kNumel);
    hash.add(parameter.data(), out, kNumel);
  }
  hash.add(master.data(), dtype, kNumel);
  Values opened(kNumel);
  for (int k = 0; k < each.slots; ++k) {
    if (held == Held::Blocks8) {
      decode_blocks(opened.data(), state_map(k), slots[k].data(), kNumel);
      hash.add(opened.data(), Dtype::F32, kNumel);
    } else {
      hash.add(slots[k].data(), dtype, kNumel);
    }
  }
  return hash.text();
}

// The loops of models/fused_loops.h, for rows of 100 elements.
template <class T>
std::string hash_of_fused_loops(Dtype dtype) {
  namespace loops = models::fused_loops;
  constexpr std::int64_t kRows = 30, kWidth = 100, kAll = kRows * kWidth;
  const auto memory = [&](std::uint64_t seed) {
    const auto bytes = stored(finite(seed, kAll, -6, 9), dtype);
    std::vector<T> values(kAll);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  };
  const auto x = memory(51), y = memory(52), z = memory(53);
  const auto weight = finite(54, kWidth);
  std::vector<T> out(kAll), other(kAll);
  Values scales(kRows), slopes(kWidth);
  Hash hash;
  const auto add = [&](const std::vector<T>& values) { hash.add(values.data(), dtype, kAll); };
  loops::norm(x.data(), weight.data(), out.data(), scales.data(), kRows, kWidth, 1e-5f);
  add(out);
  hash.add(scales.data(), Dtype::F32, kRows);
  loops::norm_backward(y.data(), x.data(), weight.data(), scales.data(), out.data(), slopes.data(), kRows, kWidth);
  add(out);
  hash.add(slopes.data(), Dtype::F32, kWidth);
  for (const float sign : {1.0f, -1.0f}) {
    loops::turned(x.data(), y.data(), z.data(), out.data(), kRows, kWidth, sign);
    add(out);
  }
  loops::gated(x.data(), y.data(), out.data(), kAll);
  add(out);
  loops::gated_backward(z.data(), x.data(), y.data(), out.data(), other.data(), kAll);
  add(out);
  add(other);
  return hash.text();
}

Hashes all_hashes() {
  Hashes hashes;
  hash_conversions(hashes);
  hash_sums(hashes);
  hash_integers(hashes);
  hash_roundings(hashes);
  for (const auto& rule : kRules)
    for (const auto& [held, name] : kHeld)
      hashes[std::string("update ") + rule.name + ", " + name] = hash_of_updates(rule, held);
  hashes["fused loops fp32"] = hash_of_fused_loops<float>(Dtype::F32);
  hashes["fused loops bf16"] = hash_of_fused_loops<models::fused_loops::Half16>(Dtype::BF16);
  return hashes;
}

// A line an entry: the hash, then the name.
Hashes recorded() {
  Hashes hashes;
  std::ifstream in(kFile);
  for (std::string line; std::getline(in, line);)
    if (line.size() > 17) hashes[line.substr(17)] = line.substr(0, 16);
  return hashes;
}

class KernelBits : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { set_simd_target(GetParam()); }
  void TearDown() override { set_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(Targets, KernelBits, testing::ValuesIn(simd_targets()),
                         [](const auto& info) { return info.param; });

TEST_P(KernelBits, AreThoseThatWereRecorded) {
  const auto got = all_hashes();
  if (const char* const asked = std::getenv("ZERO_WRITE_GOLDEN"); asked != nullptr && std::string(asked) == "1") {
    std::ofstream out(kFile);
    for (const auto& [name, hash] : got) out << hash << " " << name << "\n";
    return;
  }
  const auto wanted = recorded();
  EXPECT_EQ(got.size(), wanted.size()) << kFile << ": entries that no kernel has, or kernels without an entry";
  for (const auto& [name, hash] : got) {
    const auto entry = wanted.find(name);
    EXPECT_EQ(hash, entry == wanted.end() ? "none" : entry->second) << name << " on " << GetParam();
  }
}

}  // namespace
}  // namespace zero::kernels::kernel_bits_test
