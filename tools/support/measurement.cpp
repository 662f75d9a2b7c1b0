// Samples, lists and machine description (measurement.h).
#include "tools/support/measurement.h"

#include <sys/utsname.h>
#include <zero/errors.h>
#include <zero/version.h>

#include <algorithm>
#include <cstdio>

#include "tools/launch/machine/host.h"
#include "tools/launch/machine/machine.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

std::string system_name() {
  utsname name{};
  return uname(&name) == 0 ? std::string(name.sysname) + " " + name.release : "unknown system";
}

}  // namespace

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::vector<std::string> list_of(const std::string& option, const std::string& text,
                                 const std::vector<std::string>& allowed) {
  std::string all;
  for (const auto& word : allowed) all += (all.empty() ? "" : ", ") + word;
  const auto parts = parts_of(text);
  for (const auto& part : parts)
    if (std::find(allowed.begin(), allowed.end(), part) == allowed.end() ||
        std::count(parts.begin(), parts.end(), part) > 1)
      throw ConfigError("[" + option + "] got \"" + text.substr(0, 80) + "\", expected some of " + all +
                        ", each once, with commas between");
  return parts;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const auto above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

Json spread_of(const std::vector<double>& values) {
  return {{"median", quantile(values, 0.5)}, {"min", quantile(values, 0)}, {"p99", quantile(values, 0.99)}};
}

std::int64_t largest_whole(std::int64_t most, const std::function<bool(std::int64_t)>& fits) {
  std::int64_t good = 0, bad = 1;
  while (bad <= most && fits(bad)) good = bad, bad = bad < most ? std::min(2 * bad, most) : most + 1;
  while (bad - good > 1) {
    const auto middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string processor() {
  const auto model = launch::cpu_facts().model;
  return model.empty() ? "unknown processor" : model;
}

Json machine() {
  return {{"processor", processor()},
          {"cores", launch::usable_cores()},
          {"memory_bytes", launch::memory_facts().total_bytes},
          {"system", system_name()},
          {"libzero", ZERO_VERSION}};
}

std::string machine_line() {
  return processor() + ", " + std::to_string(launch::usable_cores()) + " cores, " +
         report::human_bytes(launch::memory_facts().total_bytes) + ", " + system_name();
}

}  // namespace zero::cli
