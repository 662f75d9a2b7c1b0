// Line plots for a terminal, such as a loss curve: braille dots where the locale has UTF-8, else
// one ASCII mark per cell.
#pragma once
#include <string>
#include <vector>

namespace zero::report {

struct Series {
  std::string name;
  std::vector<double> y;
  std::vector<double> x;  // empty: 0, 1, 2, ...; else as many as y, in any order
};

struct PlotSettings {
  int columns = 80;  // of the whole plot, labels included
  int height = 12;   // lines of the plot's field
  bool utf8 = false;
  bool color = false;
  bool log_y = false;  // values <= 0 are left out
  std::string title, x_name;
};

// Lines ending in '\n': title, field with the y scale at its left, x scale, and the names when
// there are several series. Points that are not finite break a line. Without colour, several series
// are distinguished by ASCII marks even in UTF-8 locales. Without points: "(nothing to plot)".
// InternalError if x and y of a series differ in length.
std::string line_plot(const std::vector<Series>& series, const PlotSettings& settings = {});

}  // namespace zero::report
