// The program `fio` as a yardstick: the same transfers over a file of its own, through its io_uring
// engine past the page cache.
#pragma once
#include <cstdint>
#include <string>

#include "cli/bench/io_measurement.h"

namespace zero::cli {

class Fio {
 public:
  // Writes a file of `bytes` in the folder. Throws ConfigError if there is no fio, IoError if it fails.
  Fio(const std::string& folder, std::int64_t bytes);
  ~Fio();  // removes the file
  Fio(const Fio&) = delete;
  Fio& operator=(const Fio&) = delete;

  IoMeasurement::Result run(IoPattern pattern, const storage::IoSettings& settings, double seconds);
  const std::string& version() const { return version_; }

 private:
  std::string path_, version_;
  std::int64_t bytes_;
};

}  // namespace zero::cli
