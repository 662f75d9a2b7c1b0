// Scales, and a field of dots rendered as braille or as one ASCII mark per cell.
#include "tools/report/text/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <limits>

#include "base/check.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

constexpr char kMarks[] = {'*', '+', 'o', 'x', '@', '%'};
constexpr int kColors[] = {36, 33, 35, 32, 31, 34};

std::string number(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", v);
  return text;
}

struct Scale {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double v) {
    low = std::min(low, v);
    high = std::max(high, v);
  }
  // Widens a range of a single value.
  void widen() {
    if (high > low) return;
    const double half = std::max(std::abs(low), 1.0) * 0.05;
    low -= half;
    high += half;
  }
  int at(double v, int cells) const {
    return std::clamp(static_cast<int>(std::lround((v - low) / (high - low) * (cells - 1))), 0, cells - 1);
  }
};

// A field of dots: with `fine` 2 x 4 dots per cell (braille), else one.
class Field {
 public:
  Field(int width, int height, bool fine)
      : width_(width), height_(height), fine_(fine), cells_(static_cast<std::size_t>(width * height)) {}
  int dots_across() const { return fine_ ? width_ * 2 : width_; }
  int dots_up() const { return fine_ ? height_ * 4 : height_; }

  void dot(int x, int y, int series) {  // y counts from the bottom
    const int down = dots_up() - 1 - y;
    Cell& cell = cells_[static_cast<std::size_t>((fine_ ? down / 4 : down) * width_ + (fine_ ? x / 2 : x))];
    static constexpr std::uint8_t kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    cell.bits |= fine_ ? kBits[down % 4][x % 2] : 1;
    cell.series = series;
  }
  void line(int x0, int y0, int x1, int y1, int series) {
    const int steps = std::max(std::abs(x1 - x0), std::abs(y1 - y0));
    for (int i = 0; i <= steps; ++i) {
      const double t = steps ? static_cast<double>(i) / steps : 0;
      dot(static_cast<int>(std::lround(x0 + t * (x1 - x0))), static_cast<int>(std::lround(y0 + t * (y1 - y0))), series);
    }
  }
  std::string row(int r, bool color) const {
    std::string out;
    for (int c = 0; c < width_; ++c) {
      const Cell& cell = cells_[static_cast<std::size_t>(r * width_ + c)];
      if (!cell.bits) {
        out += ' ';
        continue;
      }
      if (color)
        out += "\033[" + std::to_string(kColors[static_cast<std::size_t>(cell.series) % std::size(kColors)]) + "m";
      if (fine_) {  // U+2800 + bits
        out += '\xe2';
        out += static_cast<char>(0xa0 + (cell.bits >> 6));
        out += static_cast<char>(0x80 + (cell.bits & 0x3f));
      } else {
        out += kMarks[static_cast<std::size_t>(cell.series) % std::size(kMarks)];
      }
      if (color) out += "\033[0m";
    }
    out.erase(out.find_last_not_of(' ') + 1);
    return out;
  }

 private:
  struct Cell {
    std::uint8_t bits = 0;
    int series = 0;
  };
  int width_, height_;
  bool fine_;
  std::vector<Cell> cells_;
};

}  // namespace

std::string line_plot(const std::vector<Series>& series, const PlotSettings& settings) {
  const auto x_of = [](const Series& s, std::size_t i) { return s.x.empty() ? static_cast<double>(i) : s.x[i]; };
  const auto y_of = [&](const Series& s, std::size_t i) { return settings.log_y ? std::log10(s.y[i]) : s.y[i]; };
  Scale xs, ys;
  for (const Series& s : series) {
    ZERO_CHECK(s.x.empty() || s.x.size() == s.y.size(), "plot of ", s.x.size(), " x and ", s.y.size(), " y values");
    for (std::size_t i = 0; i < s.y.size(); ++i) {
      if (!std::isfinite(y_of(s, i)) || !std::isfinite(x_of(s, i))) continue;
      xs.add(x_of(s, i));
      ys.add(y_of(s, i));
    }
  }
  std::string out = settings.title.empty() ? "" : settings.title + "\n";
  if (!(xs.low <= xs.high)) return out + "(nothing to plot)\n";
  xs.widen();
  ys.widen();

  const int height = std::max(settings.height, 2);
  const auto label_at = [&](double v) { return number(settings.log_y ? std::pow(10, v) : v); };
  const std::string top = label_at(ys.high), middle = label_at((ys.low + ys.high) / 2), bottom = label_at(ys.low);
  const std::size_t label_width = std::max({top.size(), middle.size(), bottom.size()});
  const int width = std::max(settings.columns - static_cast<int>(label_width) - 2, 8);
  const bool fine = settings.utf8 && (series.size() == 1 || settings.color);
  Field field(width, height, fine);
  for (std::size_t n = 0; n < series.size(); ++n) {
    const Series& s = series[n];
    bool joined = false;
    int px = 0, py = 0;
    for (std::size_t i = 0; i < s.y.size(); ++i) {
      if (!std::isfinite(y_of(s, i)) || !std::isfinite(x_of(s, i))) {
        joined = false;
        continue;
      }
      const int x = xs.at(x_of(s, i), field.dots_across()), y = ys.at(y_of(s, i), field.dots_up());
      if (joined) {
        field.line(px, py, x, y, static_cast<int>(n));
      } else {
        field.dot(x, y, static_cast<int>(n));
      }
      px = x, py = y, joined = true;
    }
  }
  const std::string bar = settings.utf8 ? "\u2502" : "|";
  for (int r = 0; r < height; ++r) {
    const std::string label = r == 0 ? top : r == height - 1 ? bottom : r == height / 2 ? middle : "";
    std::string line = fit(label, label_width, Align::Right) + " " + bar + field.row(r, settings.color);
    out += line + "\n";
  }
  out += std::string(label_width + 1, ' ') + (settings.utf8 ? "\u2514" : "+");
  for (int c = 0; c < width; ++c) out += settings.utf8 ? "\u2500" : "-";
  const std::string left = number(xs.low), right = number(xs.high);
  std::string scale = std::string(label_width + 2, ' ') + left;
  const std::size_t end = label_width + 2 + static_cast<std::size_t>(width);
  const std::size_t room = end - std::min(end, scale.size() + right.size());
  if (!settings.x_name.empty() && room >= settings.x_name.size() + 2) {
    const std::size_t before = (room - settings.x_name.size()) / 2;
    scale += std::string(before, ' ') + settings.x_name + std::string(room - before - settings.x_name.size(), ' ');
  } else {
    scale += std::string(std::max<std::size_t>(room, 1), ' ');
  }
  out += "\n" + scale + right + "\n";
  if (series.size() > 1) {
    out += std::string(label_width + 2, ' ');
    for (std::size_t n = 0; n < series.size(); ++n) {
      if (n) out += "   ";
      if (settings.color) out += "\033[" + std::to_string(kColors[n % std::size(kColors)]) + "m";
      out += fine ? "\u2500" : std::string(1, kMarks[n % std::size(kMarks)]);
      if (settings.color) out += "\033[0m";
      out += " " + series[n].name;
    }
    out += "\n";
  }
  return out;
}

}  // namespace zero::report
