// Where each byte of a swap file lies: in its file, or, for ranges to which a write failed, in a
// second file that is made at the first such failure. A failed range is never used again.
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
  std::int64_t bytes = 0;   // that lie together there, at most what was asked for
};

class SwapSpace {
 public:
  SwapSpace(const std::string& folder, std::int64_t bytes, std::string who, FaultSource* faults);

  Place locate(std::int64_t offset, std::int64_t bytes);
  // A new place for a range that locate() gave in one piece in the first file; not yet what locate()
  // gives. file is null when the range lies in the second file already. Throws IoError.
  Place second_place(std::int64_t offset, std::int64_t bytes);
  // From here on locate() gives `place` for the range: it has been written there.
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
  std::map<std::int64_t, Place> moved_;  // by offset of the range; they do not overlap
};

}  // namespace zero::storage
