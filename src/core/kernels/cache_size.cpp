// The kernel lists each CPU's caches with level, size and the CPUs that share them. sysconf() reports the whole
// processor even if a virtual machine has only a part of it.
#include "kernels/cache_size.h"

#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

namespace zero::kernels {
namespace {

std::string first_word(const std::filesystem::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

// "32768K"
std::size_t size_of_text(const std::string& text) {
  std::size_t value = 0, i = 0;
  for (; i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])) != 0; ++i)
    value = value * 10 + (text[i] - '0');
  const char unit = i < text.size() ? text[i] : ' ';
  return value << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

}  // namespace

std::size_t last_level_cache_bytes(const std::string& folder) {
  namespace fs = std::filesystem;
  std::map<std::pair<int, std::string>, std::size_t> caches;  // by level and sharing CPUs
  std::error_code error;
  for (const auto& cpu : fs::directory_iterator(folder, error)) {
    std::error_code none;
    for (const auto& cache : fs::directory_iterator(cpu.path() / "cache", none)) {
      const auto level = size_of_text(first_word(cache.path() / "level"));
      const auto size = size_of_text(first_word(cache.path() / "size"));
      if (level == 0 || size == 0 || first_word(cache.path() / "type") == "Instruction") continue;
      caches[{static_cast<int>(level), first_word(cache.path() / "shared_cpu_list")}] = size;
    }
  }
  std::size_t total = 0;
  if (caches.empty()) return total;
  const int last = caches.rbegin()->first.first;
  for (const auto& [key, size] : caches) total += key.first == last ? size : 0;
  return total;
}

std::size_t last_level_cache_bytes() {
  static const std::size_t bytes = [] {
    const auto found = last_level_cache_bytes("/sys/devices/system/cpu");
    return found > 0 ? found : std::size_t{32} << 20;
  }();
  return bytes;
}

}  // namespace zero::kernels
