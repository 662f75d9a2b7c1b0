// The program `fio` for comparison: the same transfers on its own file, with its io_uring engine and direct I/O.
#pragma once
#include <cstdint>
#include <string>

#include "lab/bench/io_measurement.h"

namespace zero::cli {

class Fio {
 public:
  // Writes a file of `bytes` in the folder. Throws ConfigError if fio is missing, IoError if it fails.
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
