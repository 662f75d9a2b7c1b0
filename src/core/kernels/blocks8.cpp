// See blocks8.h.
#include "kernels/blocks8.h"

#include <bit>

namespace zero::kernels {

const Shares kShares[2] = {{0x33800000u, 0x33200000u, 0x1p-28f, 0x7fu, 0x80000000u, 1, 0x4b000000u},
                           {0x31800000u, 0x33a00000u, 0x1p-32f, 0xffu, 0, 1, 0x4b000000u}};

namespace {

std::array<float, 256> make_values(CodeMap map) {
  const auto& shares = shares_of(map);
  std::array<float, 256> values{};
  for (std::uint32_t code = 0; code < 256; ++code) {
    const auto step = std::bit_cast<std::uint32_t>(static_cast<float>((code & shares.magnitude) + 1));
    const float share = std::bit_cast<float>(4 * step + shares.offset) - shares.zero;
    values[code] = (code & shares.magnitude) == code ? share : -share;
  }
  return values;
}

}  // namespace

const std::array<float, 256>& values_of(CodeMap map) {
  static const auto with_sign = make_values(CodeMap::Signed), without = make_values(CodeMap::Unsigned);
  return map == CodeMap::Signed ? with_sign : without;
}

}  // namespace zero::kernels
