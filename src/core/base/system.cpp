#include "base/system.h"

#include <dlfcn.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>

namespace zero::base {

std::string host_name(const char* fallback) {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 && name[0] != '\0' ? name : fallback;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::int64_t number_in_env(const char* name, std::int64_t most) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return -1;
  const char* const end = text + std::strlen(text);
  std::int64_t value = 0;
  const auto read = std::from_chars(text, end, value);
  return read.ec != std::errc() || read.ptr != end || value < 0 || value > most ? -1 : value;
}

std::filesystem::path folder_of(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code ignored;
  return std::filesystem::canonical(info.dli_fname, ignored).parent_path();
}

std::filesystem::path plugin_path(const char* name) {
  const auto own = folder_of(reinterpret_cast<const void*>(&plugin_path));
  // Next to libzero; from a program next to that: where an installation, a build folder or a wheel has libraries.
  std::filesystem::path path;
  std::error_code ignored;
  for (const auto& folder : {own, own.parent_path() / ZERO_LIBRARY_FOLDER, own.parent_path() / "lib"})
    if (path = folder / name; std::filesystem::exists(path, ignored)) break;
  return path;
}

std::filesystem::path temporary_folder() {
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"})
    if (const char* const folder = std::getenv(name); folder != nullptr && *folder != '\0') return folder;
  return "/tmp";
}

std::string utc_now() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace zero::base
