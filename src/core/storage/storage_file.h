// One file that holds swapped bytes: opened without a name (or in a private folder, whose name
// leftovers.h can judge), reserved in full, past the page cache where that works. Knows nothing of
// requests.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "storage/fault_source.h"

namespace zero::storage {

// "No space left on device (ENOSPC, errno 28)".
std::string system_text(int error);

// Bytes that an ordinary user may still write into the file system of `path`; -1: not known.
std::int64_t free_bytes_of(const std::string& path);

// "ext4", "nfs", "tmpfs"; "type 0x..." for others; empty when the folder is not there.
std::string file_system_of(const std::string& folder);

// What offloading into this folder means if it is no local disk (a network file system, memory);
// empty for a disk.
std::string folder_notice(const std::string& folder);

class StorageFile {
 public:
  // Throws IoError. `who` and `faults` must outlive the file.
  StorageFile(const std::string& folder, const std::string& who, FaultSource* faults);
  ~StorageFile();
  StorageFile(const StorageFile&) = delete;
  StorageFile& operator=(const StorageFile&) = delete;

  // The file has `bytes` from here on, and room for them on the disk. Throws IoError.
  void reserve(std::int64_t bytes);
  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  // From here on through the page cache, also for requests that are under way.
  void stop_direct();
  std::int64_t alignment() const { return alignment_; }
  const std::string& path() const { return path_; }
  const std::string& folder() const { return folder_; }
  bool unnamed() const { return private_folder_.empty(); }

 private:
  int open_unnamed();
  int open_in_private_folder();
  [[noreturn]] void fail(const char* action, int error, std::int64_t needed) const;
  std::string folder_, path_, private_folder_;  // the private folder's path while it exists
  const std::string& who_;
  FaultSource* faults_;
  int fd_ = -1, lock_ = -1;
  bool named_ = false;
  std::atomic<bool> direct_{false};
  std::int64_t alignment_ = 4096, reserved_ = 0;
};

}  // namespace zero::storage
