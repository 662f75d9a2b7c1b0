// See whole_file.h.
#include "tools/support/whole_file.h"

#include <zero/errors.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace zero::cli {

void write_whole(const std::string& option, const std::string& path, std::string_view text) {
  const std::string partial = path + ".partial";
  std::ofstream out(partial, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (out && std::rename(partial.c_str(), path.c_str()) == 0) return;
  const int error = errno;
  std::remove(partial.c_str());
  throw IoError("[" + option + "] got \"" + std::string(std::strerror(error)) + "\" for " + path +
                ", expected to write " + std::to_string(text.size()) + " bytes");
}

}  // namespace zero::cli
