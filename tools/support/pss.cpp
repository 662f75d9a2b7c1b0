// Reads smaps_rollup, once or repeatedly (pss.h).
#include "tools/support/pss.h"

#include <zero/errors.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>

namespace zero::cli {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(2);

// 0 if unknown.
std::uint64_t read_pss() noexcept {
  try {
    std::ifstream in("/proc/self/smaps_rollup");
    for (std::string line; std::getline(in, line);)
      if (line.rfind("Pss:", 0) == 0) return std::stoull(line.substr(4)) * 1024;
  } catch (const std::exception&) {
  }
  return 0;
}

}  // namespace

std::uint64_t pss_bytes() {
  const auto bytes = read_pss();
  if (bytes == 0) throw IoError("[pss_bytes] got nothing from /proc/self/smaps_rollup, expected its line \"Pss:\"");
  return bytes;
}

PssSampler::PssSampler()
    : thread_([this] {
        while (!ends_) {
          highest_ = std::max(highest_.load(), read_pss());
          std::this_thread::sleep_for(kPeriod);
        }
      }) {}

PssSampler::~PssSampler() { stop(); }

std::uint64_t PssSampler::stop() {
  ends_ = true;
  if (thread_.joinable()) {
    thread_.join();
    highest_ = std::max(highest_.load(), read_pss());
  }
  return highest_;
}

}  // namespace zero::cli
