// Readable text: sizes, times and counts with units, and the width of UTF-8 on a terminal.
// Pure functions, independent of streams (terminal.h) and layout (table.h, plot.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zero::report {

enum class Align { Left, Right };

// One number as std::printf writes it; `format` has one %.
std::string printed(const char* format, double value);

// Three significant digits and a binary unit: "0B", "1023B", "1.00KiB", "9.46GiB".
std::string human_bytes(std::uint64_t bytes);
// "850us", "13ms", "4.2s", "3m10s", "1h02m", "2d03h"; "?" for a negative or non-finite value.
std::string human_duration(double seconds);
// "999", "1.50k", "29.5M", "1.20G": powers of 1000.
std::string human_count(double count);
// The same for numbers of parameters: "355M", "7.50B", "1.00T".
std::string human_parameters(double count);

// Terminal columns that the UTF-8 text takes: 0 for combining marks and control characters, 2 for
// wide East Asian characters and emoji; a byte that is not UTF-8 counts as 1.
std::size_t display_width(std::string_view text);
// The longest prefix of whole characters that takes at most `width` columns.
std::string_view prefix_of_width(std::string_view text, std::size_t width);
// The text in exactly `width` columns: padded on the side away from `align`, or cut with a mark
// at its end ("…" when `utf8`, else "..").
std::string fit(std::string_view text, std::size_t width, Align align = Align::Left, bool utf8 = true);

// Escapes the content of an HTML element or of a quoted attribute; control characters other than tab and new line
// become '?', bytes that are not UTF-8 become U+FFFD.
std::string html_text(std::string_view text);

}  // namespace zero::report
