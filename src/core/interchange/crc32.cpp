// See crc32.h.
#include "interchange/crc32.h"

#include <array>
#include <cstring>

namespace zero::interchange {
namespace {

constexpr std::uint32_t kPolynomial = 0xedb88320u;

// Tables [k]: the effect of a byte that k further bytes follow.
using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    auto value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}
constexpr Tables kTables = make_tables();

// Product of two polynomials modulo kPolynomial; bit 31 is the coefficient of x^0.
std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return sum;
}

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    std::uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 255] ^ kTables[6][low >> 8 & 255] ^ kTables[5][low >> 16 & 255] ^ kTables[4][low >> 24] ^
          kTables[3][high & 255] ^ kTables[2][high >> 8 & 255] ^ kTables[1][high >> 16 & 255] ^ kTables[0][high >> 24];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 255];
  return ~crc;
}

std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::uint64_t bytes) {
  // The bytes that follow multiply by x^(8 bytes).
  std::uint32_t power = 0x00800000u;  // x^8
  std::uint32_t factor = 0x80000000u;
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) factor = product(factor, power);
    power = product(power, power);
  }
  return product(factor, first) ^ second;
}

}  // namespace zero::interchange
