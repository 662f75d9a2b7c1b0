// Charts as SVG without a script, for pages of docs/ and for files that open anywhere: bars and lines of a few series.
// The same data gives the same bytes. The page of `zero report` draws its own, which follow the pointer (page.js).
#pragma once
#include <string>
#include <vector>

namespace zero::report {

struct ChartSeries {
  std::string name;
  std::vector<double> x{};  // of lines
  std::vector<double> y{};  // not finite: nothing is drawn, and a line has a gap
  bool dashed = false;      // a formula or another's figure next to measurements
};

struct Chart {
  enum class Kind { Bars, Stacked, Lines };
  Kind kind = Kind::Bars;
  std::string title, x_name{}, y_name{};
  std::vector<std::string> categories{};  // of bars: y[i] of every series is drawn above the i-th
  std::vector<ChartSeries> series{};
  std::string absent{};               // of bars: text in the place of a value that is not finite
  bool log_x = false, log_y = false;  // base 2 and 10; values are above 0
};

// A complete <svg> element with a white background, 760 wide. InternalError if a series has another number of values
// than there are categories, or than x.
std::string svg_chart(const Chart& chart);

}  // namespace zero::report
