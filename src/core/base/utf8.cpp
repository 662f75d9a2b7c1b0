// See utf8.h.
#include "base/utf8.h"

namespace zero::base {

Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {static_cast<std::int32_t>(lead), 1};
  const std::size_t n = lead >= 0xf0 && lead < 0xf5 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 0;
  if (n == 0 || lead >= 0xf5 || text.size() < n) return {};
  std::int32_t code = static_cast<std::int32_t>(lead & (0xffu >> (n + 1)));
  for (std::size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = (code << 6) | static_cast<std::int32_t>(byte(i) & 0x3f);
  }
  static constexpr std::int32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return {};
  return {code, n};
}

}  // namespace zero::base
