// Formatting of numbers with units, and widths of text. Malformed bytes are counted, not dropped, so that a user's text
// can be shown unchanged.
#include "tools/report/text/text.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "base/utf8.h"

namespace zero::report {
namespace {

using base::Character;
using base::first_character;

template <class... Values>
std::string print(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

std::string three_digits(double value, const char* unit) {
  return print("%.*f%s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, unit);
}

}  // namespace

std::string printed(const char* format, double value) { return print(format, value); }

namespace {

struct Range {
  std::int32_t first, last;
};
constexpr std::array<Range, 15> kZeroWidth{{{0x300, 0x36f},
                                            {0x483, 0x489},
                                            {0x591, 0x5bd},
                                            {0x610, 0x61a},
                                            {0x64b, 0x65f},
                                            {0x900, 0x902},
                                            {0x93c, 0x93c},
                                            {0xe34, 0xe3a},
                                            {0x1160, 0x11ff},
                                            {0x1ab0, 0x1aff},
                                            {0x1dc0, 0x1dff},
                                            {0x200b, 0x200f},
                                            {0x20d0, 0x20ff},
                                            {0xfe00, 0xfe0f},
                                            {0xfe20, 0xfe2f}}};
constexpr std::array<Range, 13> kWide{{{0x1100, 0x115f},
                                       {0x2e80, 0x303e},
                                       {0x3041, 0x33ff},
                                       {0x3400, 0x4dbf},
                                       {0x4e00, 0x9fff},
                                       {0xa000, 0xa4cf},
                                       {0xac00, 0xd7a3},
                                       {0xf900, 0xfaff},
                                       {0xfe30, 0xfe6f},
                                       {0xff00, 0xff60},
                                       {0xffe0, 0xffe6},
                                       {0x1f300, 0x1faff},
                                       {0x20000, 0x3fffd}}};

template <std::size_t N>
bool in(const std::array<Range, N>& ranges, std::int32_t code) {
  for (const Range& r : ranges)
    if (code >= r.first && code <= r.last) return true;
  return false;
}

std::size_t width_of(std::int32_t code) {
  if (code < 0) return 1;
  if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return 0;
  if (code < 0x300) return 1;
  return in(kZeroWidth, code) ? 0 : in(kWide, code) ? 2 : 1;
}

}  // namespace

std::string human_bytes(std::uint64_t bytes) {
  if (bytes < 1024) return std::to_string(bytes) + "B";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return three_digits(value, kUnits[unit]);
}

std::string human_count(double count) {
  if (!std::isfinite(count)) return "?";
  if (count < 0) return "-" + human_count(-count);
  if (count < 999.5) return count == std::floor(count) ? print("%.0f", count) : three_digits(count, "");
  static constexpr const char* kUnits[] = {"k", "M", "G", "T", "P", "E"};
  double value = count / 1000;
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) value /= 1000, ++unit;
  return three_digits(value, kUnits[unit]);
}

std::string human_parameters(double count) {
  auto text = human_count(count);
  if (text.back() == 'G') text.back() = 'B';
  return text;
}

std::string human_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 0.9995e-3) return print("%.0fus", seconds * 1e6);
  if (seconds < 0.9995) return print("%.0fms", seconds * 1e3);
  if (seconds < 59.95) return print("%.1fs", seconds);
  const long long s = std::llround(seconds), m = s / 60, h = m / 60;
  if (h == 0) return print("%lldm%02llds", m, s % 60);
  if (h < 24) return print("%lldh%02lldm", h, m % 60);
  return print("%lldd%02lldh", h / 24, h % 24);
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  while (!text.empty()) {
    const Character c = first_character(text);
    width += width_of(c.code);
    text.remove_prefix(c.bytes);
  }
  return width;
}

std::string_view prefix_of_width(std::string_view text, std::size_t width) {
  std::size_t at = 0, used = 0;
  while (at < text.size()) {
    const Character c = first_character(text.substr(at));
    if (used + width_of(c.code) > width) break;
    used += width_of(c.code);
    at += c.bytes;
  }
  return text.substr(0, at);
}

std::string fit(std::string_view text, std::size_t width, Align align, bool utf8) {
  std::string out(text);
  if (display_width(out) > width) {
    const std::string_view mark = utf8 ? "\u2026" : "..";
    const std::size_t mark_width = utf8 ? 1 : 2;
    out = width < mark_width ? std::string(prefix_of_width(text, width))
                             : std::string(prefix_of_width(text, width - mark_width)).append(mark);
  }
  const std::size_t used = display_width(out);
  if (used < width) out.insert(align == Align::Left ? out.size() : 0, width - used, ' ');
  return out;
}

std::string html_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const Character c = first_character(text);
    switch (c.code) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '\t':
      case '\n':
        out += text[0];
        break;
      default:
        if (c.code < 0) {
          out += "\ufffd";
        } else if (c.code < 0x20 || c.code == 0x7f) {
          out += '?';
        } else {
          out.append(text.substr(0, c.bytes));
        }
    }
    text.remove_prefix(c.bytes);
  }
  return out;
}

}  // namespace zero::report
