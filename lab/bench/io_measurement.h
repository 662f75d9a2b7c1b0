// Continuous transfers through a swap file for a given time, as an engine with enough buffers makes them, with checks
// of all data read. Options and tables are in io.cpp.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/swap_file.h"

namespace zero::cli {

enum class IoPattern { Read, Write, Mixed };  // Mixed: both at once, each on half of the file

// A file for one block size and depth, written once before it is measured.
class IoMeasurement {
 public:
  using Clock = std::chrono::steady_clock;
  IoMeasurement(const std::string& folder, std::int64_t bytes, const storage::IoSettings& settings);

  struct Result {
    double read_bytes_per_s = 0, write_bytes_per_s = 0;
  };
  // One window of about `seconds`. Throws InternalError if a sector that was read is not the last version written
  // there.
  Result run(IoPattern pattern, double seconds);
  // Checks every byte of the file.
  void check_all();
  std::string description() const { return file_->description(); }

 private:
  // Tiles in order over a range of the file, several in flight.
  struct Stream {
    bool write;
    std::int64_t from, to;
    std::vector<storage::IoBuffer> buffers;
    std::int64_t done_bytes = 0;
  };
  struct Tile;
  Stream& stream(bool write, std::int64_t from, std::int64_t to);
  Tile begin(Stream& stream, std::size_t buffer, std::int64_t offset);
  void end(Stream& stream, const Tile& tile);
  void keep_busy(Stream& stream, Clock::time_point start, double seconds);
  void stamp(char* data, std::int64_t offset, std::int64_t bytes);
  void check_stamps(const char* data, std::int64_t offset, std::int64_t bytes) const;
  std::unique_ptr<storage::SwapFile> file_;
  std::int64_t bytes_, tile_;
  std::vector<std::uint32_t> versions_;  // of each sector: number of writes
  Stream read_{false, 0, 0, {}}, write_{true, 0, 0, {}};
};

}  // namespace zero::cli
