// Opens, reserves and describes the file. Each step falls back to an alternative, which unnamed(), direct() and path()
// report.
#include "storage/storage_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/check.h"
#include "base/newer_libc.h"
#include "base/size_signal.h"
#include "base/standard_streams.h"
#include "storage/leftovers.h"

namespace zero::storage {
namespace {

using base::join;

constexpr std::int64_t kUsualAlignment = 4096;

struct FileSystem {
  std::uint32_t type;
  const char* name;
  enum class Kind { Disk, Network, Memory, Layered } kind;
};
constexpr FileSystem kFileSystems[] = {
    {EXT4_SUPER_MAGIC, "ext4", FileSystem::Kind::Disk},   {0x58465342, "xfs", FileSystem::Kind::Disk},
    {BTRFS_SUPER_MAGIC, "btrfs", FileSystem::Kind::Disk}, {F2FS_SUPER_MAGIC, "f2fs", FileSystem::Kind::Disk},
    {0x2fc12fc1, "zfs", FileSystem::Kind::Disk},          {TMPFS_MAGIC, "tmpfs", FileSystem::Kind::Memory},
    {RAMFS_MAGIC, "ramfs", FileSystem::Kind::Memory},     {NFS_SUPER_MAGIC, "nfs", FileSystem::Kind::Network},
    {0xff534d42, "cifs", FileSystem::Kind::Network},      {0xfe534d42, "smb2", FileSystem::Kind::Network},
    {0x0bd00bd0, "lustre", FileSystem::Kind::Network},    {0x00c36400, "ceph", FileSystem::Kind::Network},
    {0x47504653, "gpfs", FileSystem::Kind::Network},      {V9FS_MAGIC, "9p", FileSystem::Kind::Network},
    {0x65735546, "fuse", FileSystem::Kind::Network},      {OVERLAYFS_SUPER_MAGIC, "overlay", FileSystem::Kind::Layered},
};

std::uint32_t type_of(const std::string& folder) {
  struct statfs facts {};
  return statfs(folder.c_str(), &facts) == 0 ? static_cast<std::uint32_t>(facts.f_type) : 0;
}

const FileSystem* known(std::uint32_t type) {
  for (const auto& one : kFileSystems)
    if (one.type == type) return &one;
  return nullptr;
}

}  // namespace

std::string system_text(int error) {
  const char* name = strerrorname_np ? strerrorname_np(error) : nullptr;
  return join(std::strerror(error), " (", name ? name : "", name ? ", errno " : "errno ", error, ")");
}

std::int64_t free_bytes_of(const std::string& path) {
  struct statvfs facts {};
  if (statvfs(path.c_str(), &facts) != 0) return -1;
  return static_cast<std::int64_t>(facts.f_bavail) * static_cast<std::int64_t>(facts.f_frsize);
}

std::string file_system_of(const std::string& folder) {
  const auto type = type_of(folder);
  if (type == 0) return "";
  if (const auto* one = known(type)) return one->name;
  char text[32];
  std::snprintf(text, sizeof text, "type 0x%x", type);
  return text;
}

std::string folder_notice(const std::string& folder) {
  const auto* one = known(type_of(folder));
  if (!one) return "";
  switch (one->kind) {
    case FileSystem::Kind::Memory:
      return join(folder, " is ", one->name, ", which is memory: offloading to it saves none");
    case FileSystem::Kind::Network:
      return join(folder, " is ", one->name, ", not a local disk: steps wait for the network or for another process");
    case FileSystem::Kind::Layered:
      return join(folder, " is an overlay, as in a container: mount a local disk for offloaded files");
    case FileSystem::Kind::Disk:
      break;
  }
  return "";
}

StorageFile::StorageFile(const std::string& folder, const std::string& who, FaultSource* faults)
    : folder_(folder), path_(folder + "/(unnamed)"), who_(who), faults_(faults) {
  const int unnamed = open_unnamed();
  if (unnamed == EOPNOTSUPP || unnamed == EISDIR || unnamed == EINVAL || unnamed == ENOSYS) {
    if (const int error = open_in_private_folder()) fail("open", error, 0);
  } else if (unnamed != 0) {
    fail("open", unnamed, 0);
  }
  struct statx facts {};
#ifdef STATX_DIOALIGN
  constexpr unsigned kWanted = STATX_DIOALIGN;
  if (statx(fd_, "", AT_EMPTY_PATH, kWanted, &facts) == 0 && (facts.stx_mask & kWanted) != 0 &&
      facts.stx_dio_mem_align != 0 && facts.stx_dio_offset_align != 0)
    alignment_ = std::max(facts.stx_dio_mem_align, facts.stx_dio_offset_align);
#else
  (void)facts;
#endif
}

StorageFile::~StorageFile() {
  if (named_) unlink((private_folder_ + "/" + kPrivateFileName).c_str());
  if (fd_ >= 0) close(fd_);
  if (!private_folder_.empty()) rmdir(private_folder_.c_str());
  if (lock_ >= 0) close(lock_);
}

// Returns errno. Handles EINVAL caused by O_DIRECT.
int StorageFile::open_unnamed() {
  if (const int error = faults_ ? faults_->open_unnamed() : 0) return error;
  for (const int direct : {O_DIRECT, 0}) {
    fd_ = base::off_standard(open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL | direct, 0600));
    if (fd_ >= 0) {
      direct_ = direct != 0;
      return 0;
    }
    if (errno != EINVAL) break;
  }
  return errno;
}

int StorageFile::open_in_private_folder() {
  private_folder_ = folder_ + "/" + private_folder_name();
  if (mkdir(private_folder_.c_str(), 0700) != 0) {
    const int error = errno;
    private_folder_.clear();
    return error;
  }
  path_ = private_folder_ + "/" + kPrivateFileName;
  lock_ = base::off_standard(open(private_folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock_ >= 0) flock(lock_, LOCK_EX | LOCK_NB);  // if the lock fails, the name still identifies the owner
  int error = 0;
  for (const int direct : {O_DIRECT, 0}) {
    // Some file systems reject O_DIRECT only after creating the file, so the second attempt does not use O_EXCL.
    fd_ = base::off_standard(
        open(path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW | (direct ? O_EXCL | O_DIRECT : 0), 0600));
    error = fd_ >= 0 ? 0 : errno;
    if (error != EINVAL) {
      direct_ = direct != 0;
      break;
    }
  }
  if (error != 0) {
    unlink(path_.c_str());
    rmdir(private_folder_.c_str());
    private_folder_.clear();
    return error;
  }
  const int fault = faults_ ? faults_->unlink() : 0;
  named_ = fault != 0 || unlink(path_.c_str()) != 0;
  // On NFS an open file remains in the folder under another name, which is removed when this object is destroyed.
  if (!named_ && rmdir(private_folder_.c_str()) == 0) private_folder_.clear();
  return 0;
}

void StorageFile::stop_direct() {
  const int flags = fcntl(fd_, F_GETFL);
  if (flags >= 0) fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  direct_ = false;
}

void StorageFile::reserve(std::int64_t bytes) {
  // Requesting more than is available would fill the disk for a while before it fails.
  const auto free = free_bytes_of(folder_);
  if (free >= 0 && free < bytes - reserved_) fail("reserve", ENOSPC, bytes - reserved_);
  const base::SizeSignalOff guard;
  int error = faults_ ? faults_->reserve() : 0;
  if (error == 0) {
    do {
      error = fallocate(fd_, 0, 0, bytes) == 0 ? 0 : errno;
    } while (error == EINTR);
  }
  if (error == EOPNOTSUPP || error == ENOSYS) {
    // This file system has no reservation; that space is free now has to suffice.
    error = ftruncate(fd_, bytes) == 0 ? 0 : errno;
  }
  if (error != 0) fail("reserve", error, bytes - reserved_);
  reserved_ = bytes;
}

void StorageFile::fail(const char* action, int error, std::int64_t needed) const {
  const auto free = free_bytes_of(folder_);
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  throw IoError(join("[SwapFile] cannot ", action, " ", path_, ": ", system_text(error),
                     needed ? join("; it needs ", needed, " bytes, ", free, " bytes are free there") : "", " (", who_,
                     "). Hint: ",
                     full ? "free space, raise the quota or the limit of file sizes, or name another nvme_path."
                          : "see that nvme_path is there and writable on every host."));
}

}  // namespace zero::storage
