// One file for offloaded bytes: unnamed (or in a private folder, see leftovers.h), fully reserved, bypassing the page
// cache if possible.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "storage/fault_source.h"

namespace zero::storage {

// "No space left on device (ENOSPC, errno 28)".
std::string system_text(int error);

// Bytes that an ordinary user may write to the file system of `path`; -1: unknown.
std::int64_t free_bytes_of(const std::string& path);

// "ext4", "nfs", "tmpfs"; "type 0x..." for others; empty if the folder does not exist.
std::string file_system_of(const std::string& folder);

// A notice about the effect of offloading to a folder that is not on a local disk (network file system, memory); empty
// for a disk.
std::string folder_notice(const std::string& folder);

class StorageFile {
 public:
  // Throws IoError. `who` and `faults` must outlive the file.
  StorageFile(const std::string& folder, const std::string& who, FaultSource* faults);
  ~StorageFile();
  StorageFile(const StorageFile&) = delete;
  StorageFile& operator=(const StorageFile&) = delete;

  // Sets the file's size to `bytes` and reserves disk space. Throws IoError.
  void reserve(std::int64_t bytes);
  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  // Uses the page cache from now on, also for requests in flight.
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
