// Draws the progress line; the mutex serializes log lines and redraws of several threads.
#include "tools/report/text/progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/system.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {
constexpr double kRedrawSeconds = 0.1;
constexpr double kRateSeconds = 1.0;  // minimum interval for computing a rate

void write_stderr(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(2, bytes.data(), bytes.size());
    if (n <= 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
}
}  // namespace

ProgressLine::ProgressLine(Settings settings) : settings_(std::move(settings)) {
  if (!settings_.write) settings_.write = write_stderr;
  if (!settings_.clock) {
    settings_.clock = base::steady_seconds;
  }
}

ProgressLine::~ProgressLine() { finish(); }

void ProgressLine::update(std::int64_t done, std::int64_t total, std::string_view detail) {
  if (!settings_.enabled) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const double now = settings_.clock();
  if (rate_at_ < 0 || done < rate_done_) {
    rate_at_ = now;
    rate_done_ = done;
    rate_ = 0;
  } else if (now - rate_at_ >= kRateSeconds) {
    const double latest = static_cast<double>(done - rate_done_) / (now - rate_at_);
    rate_ = rate_ > 0 ? 0.7 * rate_ + 0.3 * latest : latest;
    rate_at_ = now;
    rate_done_ = done;
  }
  done_ = done;
  total_ = total;
  detail_ = detail;
  if (now - drawn_at_ < kRedrawSeconds) return;
  drawn_at_ = now;
  const std::string text = line();
  const std::size_t width = display_width(text);
  std::string bytes = "\r" + text;
  if (!settings_.dumb) {
    bytes += "\033[K";
  } else if (width < drawn_width_) {
    bytes.append(drawn_width_ - width, ' ');
  }
  drawn_width_ = width;
  settings_.write(bytes);
}

std::string ProgressLine::line() const {
  std::string text;
  if (total_ > 0) {
    const double part = std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0);
    constexpr int kBar = 20;
    if (settings_.utf8) {
      static constexpr const char* kEighths[] = {"",       "\u258f", "\u258e", "\u258d",
                                                 "\u258c", "\u258b", "\u258a", "\u2589"};
      const int eighths = static_cast<int>(part * kBar * 8);
      std::string bar;
      for (int i = 0; i < eighths / 8; ++i) bar += "\u2588";
      text += fit(bar + kEighths[eighths % 8], kBar) + "  ";
    } else {
      const int filled = static_cast<int>(part * kBar);
      text += "[" + std::string(static_cast<std::size_t>(filled), '#') +
              std::string(static_cast<std::size_t>(kBar - filled), '.') + "] ";
    }
    if (!settings_.unit.empty()) text += settings_.unit + " ";
    text +=
        std::to_string(done_) + "/" + std::to_string(total_) + " " + std::to_string(static_cast<int>(part * 100)) + "%";
  } else {
    text += std::to_string(done_);
  }
  if (!settings_.unit.empty()) {
    if (!detail_.empty()) text += "  " + detail_;
    if (rate_ > 0 && total_ > done_) text += "  eta " + human_duration(static_cast<double>(total_ - done_) / rate_);
  } else if (rate_ > 0) {
    text += " " + (rate_ >= 1 ? human_count(rate_) + "/s" : human_duration(1 / rate_) + " each");
    if (total_ > done_) text += " eta " + human_duration(static_cast<double>(total_ - done_) / rate_);
  }
  if (settings_.unit.empty() && !detail_.empty()) text += " " + detail_;
  const std::size_t most = static_cast<std::size_t>(std::max(settings_.columns - 1, 1));
  return display_width(text) > most ? fit(text, most, Align::Left, settings_.utf8) : text;
}

void ProgressLine::wipe() {
  if (drawn_width_ == 0) return;
  settings_.write(settings_.dumb ? "\r" + std::string(drawn_width_, ' ') + "\r" : std::string("\r\033[K"));
  drawn_width_ = 0;
  drawn_at_ = -1e9;
}

void ProgressLine::print(std::string_view lines) {
  std::lock_guard<std::mutex> lock(mutex_);
  wipe();
  std::string bytes(lines);
  if (bytes.empty() || bytes.back() != '\n') bytes += '\n';
  settings_.write(bytes);
}

void ProgressLine::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  wipe();
}

}  // namespace zero::report
