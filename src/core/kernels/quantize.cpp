// Plain loops over one block at a time, which compilers vectorize. Conversions are those of elementwise.h.
#include "kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace zero::kernels {
namespace {

constexpr std::int64_t kBlock = kQuantizedBlock;

std::int64_t blocks_of(std::int64_t numel) { return (numel + kBlock - 1) / kBlock; }

float limit_of(int bits) { return bits == 8 ? 127.0f : 7.0f; }

// Rounds magnitudes below 2^22 to nearest even, with instructions that all vector units have.
inline float nearest(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  return (x + kShift) - kShift;
}

struct Parts {
  float* scales;
  std::int8_t* integers;
  Parts(void* data, std::int64_t numel)
      : scales(static_cast<float*>(data)), integers(reinterpret_cast<std::int8_t*>(scales + blocks_of(numel))) {}
};

void check(const char* where, const void* a, const void* b, int bits, std::int64_t numel) {
  ZERO_CHECK(bits == 8 || bits == 4, "[base::", where, "] got ", bits, " bits, expected 8 or 4");
  ZERO_CHECK(numel >= 0 && (numel == 0 || (a != nullptr && b != nullptr)), "[base::", where, "] got ", numel,
             " elements at a null pointer");
}

// Returns the scale; replaces values by whole numbers.
float quantize_block(float* values, std::int64_t numel, int bits) {
  float largest = 0, poison = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    largest = std::max(largest, std::fabs(values[i]));
    poison += values[i] * 0.0f;  // NaN if any is not finite
  }
  if (std::isnan(poison)) {
    std::fill_n(values, numel, 0.0f);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float limit = limit_of(bits), scale = largest / limit;
  const float inverse = scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
  for (std::int64_t i = 0; i < numel; ++i) values[i] = std::min(limit, std::max(-limit, nearest(values[i] * inverse)));
  return inverse == 0.0f ? 0.0f : scale;
}

void read_block(float* values, const std::int8_t* integers, float scale, int bits, std::int64_t numel) {
  if (bits == 8) {
    for (std::int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>(integers[i]) * scale;
    return;
  }
  for (std::int64_t i = 0; i < numel; ++i) {
    const int both = static_cast<std::uint8_t>(integers[i / 2]);
    values[i] = static_cast<float>((i % 2 == 0 ? both & 15 : both >> 4) - 8) * scale;
  }
}

// Calls body(values, first element, count) for each dequantized block.
template <class Body>
void for_blocks(const void* in, int bits, std::int64_t numel, const Body& body) {
  const Parts parts(const_cast<void*>(in), numel);
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    float values[kBlock];
    for (std::int64_t at = begin; at < end; at += kBlock) {
      const auto count = std::min(kBlock, end - at);
      read_block(values, parts.integers + at * bits / 8, parts.scales[at / kBlock], bits, count);
      body(values, at, count);
    }
  });
}

}  // namespace

void quantize(void* out, int bits, const void* in, Dtype in_dtype, std::int64_t numel) {
  check("quantize", out, in, bits, numel);
  const Parts parts(out, numel);
  const auto* bytes = static_cast<const char*>(in);
  parallel_ranges(numel, [&](std::int64_t begin, std::int64_t end) {
    float values[kBlock + 1];
    for (std::int64_t at = begin; at < end; at += kBlock) {
      const auto count = std::min(kBlock, end - at);
      convert(values, Dtype::F32, bytes + at * static_cast<std::int64_t>(size_of(in_dtype)), in_dtype, count);
      parts.scales[at / kBlock] = quantize_block(values, count, bits);
      std::int8_t* const to = parts.integers + at * bits / 8;
      if (bits == 8) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::int8_t>(values[i]);
        continue;
      }
      values[count] = 0;  // the second nibble of an odd count
      for (std::int64_t i = 0; i < count; i += 2) {
        const int low = static_cast<int>(values[i]) + 8, high = static_cast<int>(values[i + 1]) + 8;
        to[i / 2] = static_cast<std::int8_t>(low | high << 4);
      }
    }
  });
}

void dequantize(void* out, Dtype out_dtype, const void* in, int bits, std::int64_t numel) {
  check("dequantize", out, in, bits, numel);
  auto* bytes = static_cast<char*>(out);
  for_blocks(in, bits, numel, [&](const float* values, std::int64_t at, std::int64_t count) {
    convert(bytes + at * static_cast<std::int64_t>(size_of(out_dtype)), out_dtype, values, Dtype::F32, count);
  });
}

void add_dequantized(float* sum, const void* in, int bits, std::int64_t numel) {
  check("add_dequantized", sum, in, bits, numel);
  for_blocks(in, bits, numel, [&](const float* values, std::int64_t at, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) sum[at + i] += values[i];
  });
}

}  // namespace zero::kernels
