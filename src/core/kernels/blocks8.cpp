// See blocks8.h.
#include "kernels/blocks8.h"

#include <bit>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "kernels/blocks8_simd.h"

namespace zero::kernels {
namespace {

// Decade i has `first` * 2^i values, the middles of equal parts of [0.1, 1], times 10^(i-6).
std::vector<float> shares(int first) {
  std::vector<float> values{0};
  for (int i = 0; i < 7; ++i) {
    const int count = first << i;
    const double decade = std::pow(10.0, i - 6);
    for (int k = 0; k < count; ++k) values.push_back(static_cast<float>(decade * (0.1 + 0.9 * (k + 0.5) / count)));
  }
  return values;
}

// The smallest share whose code is `code` or a higher one.
float threshold(const std::vector<float>& shares, std::size_t code) {
  const double middle = (static_cast<double>(shares[code - 1]) + static_cast<double>(shares[code])) / 2;
  auto first = static_cast<float>(middle);
  if (first < middle || (first == middle && code % 2 == 1)) first = std::nextafter(first, 2.0f);
  return first;
}

CodeTable make_table(CodeMap map) {
  auto magnitudes = shares(map == CodeMap::Signed ? 1 : 2);  // 128 or 255 values
  if (map == CodeMap::Signed)
    magnitudes.back() = 1;
  else
    magnitudes.push_back(1);
  ZERO_CHECK(magnitudes.size() == (map == CodeMap::Signed ? 128u : 256u), "got ", magnitudes.size(), " magnitudes");
  CodeTable table{};
  for (std::size_t code = 0; code < 256; ++code)
    table.values[code] = code < magnitudes.size() ? magnitudes[code] : -magnitudes[code - 128];
  std::size_t code = 0;  // of the bin's first value
  for (std::size_t bin = 0; bin < CodeTable::kBins; ++bin) {
    const auto begin = CodeTable::kFirstBits + (static_cast<std::uint32_t>(bin) << 16);
    while (code + 1 < magnitudes.size() && threshold(magnitudes, code + 1) <= std::bit_cast<float>(begin)) ++code;
    std::uint32_t above = 0x10000;  // none
    if (code + 1 < magnitudes.size()) {
      const auto next = std::bit_cast<std::uint32_t>(threshold(magnitudes, code + 1));
      if (next - begin < 0x10000) above = next - begin;
    }
    table.entries[bin] = static_cast<std::uint32_t>(code) << 24 | above;
  }
  return table;
}

}  // namespace

const CodeTable& table_of(CodeMap map) {
  static const CodeTable with_sign = make_table(CodeMap::Signed), without = make_table(CodeMap::Unsigned);
  return map == CodeMap::Signed ? with_sign : without;
}

const std::array<float, 256>& values_of(CodeMap map) { return table_of(map).values; }

void encode_blocks(void* out, CodeMap map, const float* in, std::int64_t numel) {
  simd::encode_blocks(out, table_of(map), map == CodeMap::Signed, in, numel);
}

void decode_blocks(float* out, CodeMap map, const void* in, std::int64_t numel) {
  simd::decode_blocks(out, table_of(map), in, numel);
}

}  // namespace zero::kernels
