// See svg_chart.h.
#include "tools/report/page/svg_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

// Those of runs in page.css, by Okabe and Ito.
constexpr const char* kColors[] = {"#0072b2", "#d55e00", "#009e73", "#b2568f",
                                   "#56b4e9", "#a07800", "#444a57", "#7a5ac8"};
constexpr double kWidth = 760, kLeft = 70, kRight = 744, kFieldHeight = 230, kRowHeight = 18;

std::string one_decimal(double value) { return printed("%.1f", value); }

std::string text_at(double x, double y, const std::string& text, const std::string& more = "") {
  return "<text x=\"" + one_decimal(x) + "\" y=\"" + one_decimal(y) + "\"" + more + ">" + html_text(text) + "</text>\n";
}

// At most four significant digits, without an exponent for usual sizes.
std::string short_number(double value) {
  if (value == 0) return "0";
  const double size = std::abs(value);
  if (size >= 1e15 || size < 1e-4) return printed("%.1e", value);
  if (size >= 1e6) return human_count(value);
  if (size >= 100) return printed("%.0f", value);
  std::string text = printed(size >= 10 ? "%.1f" : size >= 1 ? "%.2f" : "%.3g", value);
  if (text.find('.') != std::string::npos) {
    while (text.back() == '0') text.pop_back();
    if (text.back() == '.') text.pop_back();
  }
  return text;
}

// An axis from data to pixels.
class Scale {
 public:
  Scale(double lo, double hi, double from, double to, bool log) : log_(log), from_(from), to_(to) {
    lo_ = log ? std::log(lo) : lo, hi_ = log ? std::log(hi) : hi;
    if (!(hi_ > lo_)) hi_ = lo_ + 1;
  }
  double at(double value) const {
    const double v = log_ ? std::log(value) : value;
    return from_ + (v - lo_) / (hi_ - lo_) * (to_ - from_);
  }
  // Round values, about `count` of them; of a logarithmic axis the powers of `base`.
  std::vector<double> ticks(int count, double base) const {
    std::vector<double> values;
    if (log_) {
      const auto first = std::ceil(lo_ / std::log(base) - 1e-9), last = std::floor(hi_ / std::log(base) + 1e-9);
      const double stride = std::max(1.0, std::ceil((last - first + 1) / (2.0 * count)));
      for (double k = first; k <= last; k += stride) values.push_back(std::pow(base, k));
      return values;
    }
    const double raw = (hi_ - lo_) / count, power = std::pow(10, std::floor(std::log10(raw))), part = raw / power;
    const double step = (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10) * power;
    for (double k = std::ceil(lo_ / step - 1e-9); k * step <= hi_ + step * 1e-9; ++k) values.push_back(k * step);
    return values;
  }

 private:
  bool log_;
  double from_, to_, lo_, hi_;
};

struct Range {
  double lo = std::numeric_limits<double>::infinity(), hi = -lo;
  void add(double value) {
    if (std::isfinite(value)) lo = std::min(lo, value), hi = std::max(hi, value);
  }
  bool empty() const { return !(lo <= hi); }
};

Range values_of(const Chart& chart) {
  Range range;
  if (chart.kind == Chart::Kind::Stacked) {
    for (std::size_t i = 0; i < chart.categories.size(); ++i) {
      double sum = 0;
      for (const auto& series : chart.series) sum += std::isfinite(series.y[i]) ? series.y[i] : 0;
      range.add(sum);
    }
  } else {
    for (const auto& series : chart.series)
      for (const double value : series.y) range.add(value);
  }
  return range;
}

// Names of the series with their colours, above the field; returns the rows that they take.
std::string legend_of(const Chart& chart, double top, int& rows) {
  std::string out;
  double x = kLeft;
  rows = 1;
  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const auto& name = chart.series[s].name;
    const double wide = 34 + 6.6 * static_cast<double>(display_width(name));
    if (x > kLeft && x + wide > kRight) x = kLeft, ++rows;
    const double y = top + (rows - 1) * kRowHeight;
    out += chart.kind == Chart::Kind::Lines
               ? "<line x1=\"" + one_decimal(x) + "\" x2=\"" + one_decimal(x + 16) + "\" y1=\"" + one_decimal(y - 4) +
                     "\" y2=\"" + one_decimal(y - 4) + "\" stroke=\"" + kColors[s % 8] + "\" stroke-width=\"2.5\"" +
                     (chart.series[s].dashed ? " stroke-dasharray=\"4 3\"" : "") + "/>\n"
               : "<rect x=\"" + one_decimal(x) + "\" y=\"" + one_decimal(y - 10) +
                     "\" width=\"12\" height=\"12\" fill=\"" + kColors[s % 8] + "\"" +
                     (chart.series[s].dashed ? " fill-opacity=\"0.45\"" : "") + "/>\n";
    out += text_at(x + 21, y, name, " fill=\"#444\"");
    x += wide;
  }
  return out;
}

std::string bars_of(const Chart& chart, const Scale& y, double bottom) {
  std::string out;
  const double slot = (kRight - kLeft) / static_cast<double>(std::max<std::size_t>(1, chart.categories.size()));
  const bool stacked = chart.kind == Chart::Kind::Stacked;
  const double group = slot * 0.78,
               bar = stacked ? std::min(group, 90.0) : group / static_cast<double>(chart.series.size());
  const bool labels = bar >= 26;
  for (std::size_t i = 0; i < chart.categories.size(); ++i) {
    const double middle = kLeft + (static_cast<double>(i) + 0.5) * slot;
    out += text_at(middle, bottom + 18, chart.categories[i], " text-anchor=\"middle\" fill=\"#222\"");
    double below = 0;
    for (std::size_t s = 0; s < chart.series.size(); ++s) {
      const double value = chart.series[s].y[i];
      const double left = stacked ? middle - bar / 2 : middle - group / 2 + static_cast<double>(s) * bar;
      if (!std::isfinite(value)) {
        if (!stacked && !chart.absent.empty())
          out += "<text transform=\"translate(" + one_decimal(left + bar / 2 + 4) + " " + one_decimal(bottom - 6) +
                 ") rotate(-90)\" fill=\"" + kColors[s % 8] + "\">" + html_text(chart.absent) + "</text>\n";
        continue;
      }
      const double base = stacked ? below : chart.log_y ? std::numeric_limits<double>::quiet_NaN() : 0;
      const double from = std::isfinite(base) ? y.at(base) : bottom, to = y.at(stacked ? below + value : value);
      below += value;
      out += "<rect x=\"" + one_decimal(left + 1) + "\" y=\"" + one_decimal(std::min(from, to)) + "\" width=\"" +
             one_decimal(bar - 2) + "\" height=\"" + one_decimal(std::abs(from - to)) + "\" fill=\"" + kColors[s % 8] +
             "\"" + (chart.series[s].dashed ? " fill-opacity=\"0.45\"" : "") + "/>\n";
      if (labels && !stacked)
        out += text_at(left + bar / 2, to - 4, short_number(value),
                       " text-anchor=\"middle\" font-size=\"11\" fill=\"#444\"");
    }
    if (stacked)
      out += text_at(middle, y.at(below) - 4, short_number(below),
                     " text-anchor=\"middle\" font-size=\"11\" fill=\"#444\"");
  }
  return out;
}

std::string lines_of(const Chart& chart, const Scale& x, const Scale& y) {
  std::string out;
  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const auto& series = chart.series[s];
    std::string path;
    bool pen = false;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!std::isfinite(series.y[i])) {
        pen = false;
        continue;
      }
      path += std::string(pen ? "L" : "M") + one_decimal(x.at(series.x[i])) + " " + one_decimal(y.at(series.y[i]));
      pen = true;
      if (series.x.size() <= 24)
        out += "<circle cx=\"" + one_decimal(x.at(series.x[i])) + "\" cy=\"" + one_decimal(y.at(series.y[i])) +
               "\" r=\"3.2\" fill=\"" + kColors[s % 8] + "\"/>\n";
    }
    out += "<path d=\"" + path + "\" fill=\"none\" stroke=\"" + kColors[s % 8] + "\" stroke-width=\"1.8\"" +
           (series.dashed ? " stroke-dasharray=\"5 4\"" : "") + "/>\n";
  }
  return out;
}

}  // namespace

std::string svg_chart(const Chart& chart) {
  const bool lines = chart.kind == Chart::Kind::Lines;
  Range across;
  for (const auto& series : chart.series) {
    ZERO_CHECK(series.y.size() == (lines ? series.x.size() : chart.categories.size()), "the series ", series.name,
               " has ", series.y.size(), " values");
    for (const double value : series.x) across.add(value);
  }
  auto values = values_of(chart);
  if (values.empty()) values.add(chart.log_y ? 1 : 0);
  if (across.empty()) across.add(chart.log_x ? 1 : 0);
  int rows = 1;
  const auto names = legend_of(chart, 52, rows);
  const double top = 52 + rows * kRowHeight + 6, bottom = top + kFieldHeight, height = bottom + 46;
  // Lines that do not come near zero use the whole field.
  const bool from_zero = !chart.log_y && (!lines || values.lo < 0.4 * values.hi);
  const double pad = 0.05 * (values.hi - values.lo);
  const Scale y(from_zero     ? std::min(0.0, values.lo)
                : chart.log_y ? values.lo / 1.3
                              : values.lo - pad,
                chart.log_y ? values.hi * 1.3 : values.hi + (lines ? pad : 0.08 * values.hi), bottom, top, chart.log_y);
  const Scale x(across.lo, across.hi, kLeft + 6, kRight - 6, chart.log_x);
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 760 " + printed("%.0f", height) +
                    "\" width=\"760\" height=\"" + printed("%.0f", height) +
                    "\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"" +
                    html_text(chart.title) + "\">\n<rect width=\"760\" height=\"" + printed("%.0f", height) +
                    "\" fill=\"#ffffff\"/>\n";
  out += text_at(16, 24, chart.title, " font-size=\"14\" fill=\"#222\"") + names;
  out += text_at(16, top - 8, chart.y_name, " fill=\"#666\"");
  for (const double tick : y.ticks(5, 10)) {
    const double at = y.at(tick);
    out += "<line x1=\"" + one_decimal(kLeft) + "\" x2=\"" + one_decimal(kRight) + "\" y1=\"" + one_decimal(at) +
           "\" y2=\"" + one_decimal(at) + "\" stroke=\"#e3e6ea\"/>\n" +
           text_at(kLeft - 7, at + 4, short_number(tick), " text-anchor=\"end\" fill=\"#666\"");
  }
  out += "<line x1=\"" + one_decimal(kLeft) + "\" x2=\"" + one_decimal(kRight) + "\" y1=\"" + one_decimal(bottom) +
         "\" y2=\"" + one_decimal(bottom) + "\" stroke=\"#999\"/>\n";
  if (lines) {
    for (const double tick : x.ticks(8, 2))
      out += text_at(x.at(tick), bottom + 18, short_number(tick), " text-anchor=\"middle\" fill=\"#666\"");
    out += lines_of(chart, x, y);
  } else {
    out += bars_of(chart, y, bottom);
  }
  return out + text_at(kRight, bottom + 36, chart.x_name, " text-anchor=\"end\" fill=\"#666\"") + "</svg>\n";
}

}  // namespace zero::report
