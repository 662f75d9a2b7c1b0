#include "config/byte_count.h"

#include <cctype>
#include <charconv>
#include <cmath>

namespace zero::config {

std::optional<std::int64_t> byte_count(std::string_view text) {
  const auto skip_spaces = [&] {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  };
  const auto next_is = [&](char c) {
    if (text.empty() || std::tolower(static_cast<unsigned char>(text.front())) != c) return false;
    text.remove_prefix(1);
    return true;
  };
  skip_spaces();
  if (text.empty() || !std::isdigit(static_cast<unsigned char>(text.front()))) return {};
  // Whole numbers keep all digits; a double has only 53 bits.
  std::int64_t whole = 0;
  double number = 0;
  const char *end = text.data() + text.size(), *after = text.data();
  if (const auto [stop, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
      error != std::errc())
    return {};
  else
    after = stop;
  const auto [whole_stop, whole_error] = std::from_chars(text.data(), end, whole);
  const bool is_whole = whole_error == std::errc() && whole_stop == after;
  text.remove_prefix(static_cast<std::size_t>(after - text.data()));
  skip_spaces();
  int power = 0;
  constexpr std::string_view kLetters = "kmgtp";
  for (std::size_t i = 0; i < kLetters.size() && power == 0; ++i)
    if (next_is(kLetters[i])) power = static_cast<int>(i) + 1;
  const bool binary = power > 0 && next_is('i');
  next_is('b');
  skip_spaces();
  if (!text.empty()) return {};
  if (power == 0 && is_whole) return whole;
  const double bytes = number * std::pow(binary ? 1024.0 : 1000.0, power);
  if (!(bytes < 9.2e18)) return {};
  if (power == 0 && bytes != std::floor(bytes)) return {};
  return static_cast<std::int64_t>(bytes);
}

}  // namespace zero::config
