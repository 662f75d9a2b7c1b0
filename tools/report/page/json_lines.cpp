// See json_lines.h.
#include "tools/report/page/json_lines.h"

#include <zero/errors.h>

#include "base/check.h"

namespace zero::report {

void for_each_line(const std::filesystem::path& path, const std::string& text, const std::string& expected,
                   const std::function<void(const std::string& line)>& take) {
  std::size_t begin = 0;
  for (int line = 1; begin < text.size(); ++line) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return;
    try {
      take(text.substr(begin, end - begin));
    } catch (const std::exception& error) {
      throw ConfigError(base::join("[report] got ", path.string(), ":", line, ": ", plain_fault(error.what()),
                                   ", expected ", expected,
                                   " as a JSON object a line. Hint: remove the line, or the run."));
    }
    begin = end + 1;
  }
}

std::string plain_fault(const std::string& what) {
  const auto end = what.find("] ");
  return what.rfind("[json.exception", 0) == 0 && end != std::string::npos ? what.substr(end + 2) : what;
}

}  // namespace zero::report
