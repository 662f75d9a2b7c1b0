// See terminal.h.
#include "tools/report/text/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace zero::report {
namespace {
std::string env(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}
}  // namespace

Terminal describe_terminal(int fd, Choice color) {
  Terminal t;
  t.tty = isatty(fd) == 1;
  const std::string term = env("TERM");
  t.dumb = term.empty() || term == "dumb";
  t.color = color == Choice::Always || (color == Choice::Auto && t.tty && !t.dumb && env("NO_COLOR").empty());
  std::string locale = env("LC_ALL");
  if (locale.empty()) locale = env("LC_CTYPE");
  if (locale.empty()) locale = env("LANG");
  std::transform(locale.begin(), locale.end(), locale.begin(), [](unsigned char c) { return std::tolower(c); });
  t.utf8 = locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
  const int asked = std::atoi(env("COLUMNS").c_str());
  winsize size{};
  if (asked > 0) {
    t.columns = asked;
  } else if (t.tty && ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    t.columns = size.ws_col;
  }
  t.columns = std::clamp(t.columns, 20, 1000);
  return t;
}

bool progress_wanted(const Terminal& err, int rank, Choice progress, bool json, bool quiet) {
  if (rank != 0 || !err.tty || json || quiet || progress == Choice::Never) return false;
  return !err.dumb || progress == Choice::Always;
}

}  // namespace zero::report
