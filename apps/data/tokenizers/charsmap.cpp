// See charsmap.h.
#include "apps/data/tokenizers/charsmap.h"

#include <cstring>
#include <stdexcept>

#include "apps/data/tokenizers/unicode.h"

namespace data {

Charsmap::Charsmap(std::string_view bytes) {
  std::uint32_t size = 0;
  if (bytes.size() < 4) throw std::invalid_argument("a charsmap of " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&size, bytes.data(), 4);
  if (size % 4 != 0 || size > bytes.size() - 4 || size == 0)
    throw std::invalid_argument("a charsmap whose table has " + std::to_string(size) + " bytes");
  units_.resize(size / 4);
  std::memcpy(units_.data(), bytes.data() + 4, size);
  texts_ = bytes.substr(4 + size);
  texts_.push_back('\0');
  if (invalid_utf8(texts_) < texts_.size()) throw std::invalid_argument("a charsmap with bytes that are not UTF-8");
}

Charsmap::Found Charsmap::find(std::string_view text, bool longest) const {
  // Fields of a unit, as darts-clone lays them out: the label (low byte and the highest bit), bit 8: the string may end
  // here, from bit 10 on the distance to the children, times 256 if bit 9 is set.
  const auto offset = [](std::uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); };
  Found found;
  std::uint32_t node = offset(units_[0]);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    node ^= byte;
    if (node >= units_.size() || (units_[node] & 0x800000ff) != byte) break;
    const auto unit = units_[node];
    node ^= offset(unit);
    if ((unit & 0x100) == 0) continue;
    if (node >= units_.size()) break;
    const std::uint32_t at = units_[node] & 0x7fffffff;
    if (at >= texts_.size()) break;
    const std::string_view replacement = texts_.c_str() + at;
    if (invalid_utf8(replacement) < replacement.size()) break;  // it begins inside a character
    found = {i + 1, replacement};
    if (!longest) break;
  }
  return found;
}

std::string base64_decoded(std::string_view text) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const auto digit = kDigits.find(c);
    if (digit == std::string_view::npos) throw std::invalid_argument("a text that is not base64");
    bits = bits << 6 | static_cast<std::uint32_t>(digit);
    count += 6;
    if (count >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8)));
  }
  return bytes;
}

}  // namespace data
