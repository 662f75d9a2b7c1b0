// Maps each byte of a swap file to its location: the file, or, for ranges whose write failed, a second file that is
// created at the first such failure. A failed range is never used again.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "storage/storage_file.h"

namespace zero::storage {

struct Place {
  StorageFile* file = nullptr;
  std::int64_t offset = 0;  // in that file
  std::int64_t bytes = 0;   // contiguous there, at most the bytes requested
};

class SwapSpace {
 public:
  SwapSpace(const std::string& folder, std::int64_t bytes, std::string who, FaultSource* faults);

  Place locate(std::int64_t offset, std::int64_t bytes);
  // A new location for a range that locate() returned as one piece in the first file. locate() does not return it yet.
  // file is null if the range is already in the second file. Throws IoError.
  Place second_place(std::int64_t offset, std::int64_t bytes);
  // The range was written to `place`; locate() returns it from now on.
  void settle(std::int64_t offset, const Place& place);

  StorageFile& file() { return first_; }
  const StorageFile& file() const { return first_; }
  std::int64_t bytes() const { return bytes_; }
  const std::string& who() const { return who_; }

 private:
  const std::string who_;
  FaultSource* const faults_;
  StorageFile first_;
  const std::int64_t bytes_;
  std::mutex mutex_;
  std::unique_ptr<StorageFile> second_;
  std::int64_t second_bytes_ = 0;
  std::atomic<bool> any_moved_{false};
  std::map<std::int64_t, Place> moved_;  // by offset of the range; disjoint
};

}  // namespace zero::storage
