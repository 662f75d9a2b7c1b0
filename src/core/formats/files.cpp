#include "formats/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "base/printable.h"
#include "base/size_signal.h"
#include "base/standard_streams.h"

namespace zero::formats {
namespace {

int result_of(int value) { return value < 0 ? -errno : value; }
// Never one of the standard streams, which others print to.
int opened(int fd) { return result_of(base::off_standard(fd)); }

int fill(const struct stat& from, FileInfo* out) {
  out->regular = S_ISREG(from.st_mode);
  out->directory = S_ISDIR(from.st_mode);
  out->bytes = static_cast<std::uint64_t>(from.st_size);
  out->inode = from.st_ino;
  out->device = from.st_dev;
  out->modified_ns = static_cast<std::int64_t>(from.st_mtim.tv_sec) * 1000000000 + from.st_mtim.tv_nsec;
  return 0;
}

// The kernel transfers at most about 2 GiB per call.
constexpr std::size_t kMostPerCall = std::size_t{1} << 30;
constexpr std::uint64_t kMostUnwritten = std::uint64_t{32} << 20;
constexpr std::size_t kReadAheadFrom = std::size_t{1} << 20;

// Tells, once for each file system of a process, that its files go through the page cache.
void tell_page_cache(FsOps& fs, int fd, const std::string& path, int error) {
  tell_lack(fs, fd, path, LogLevel::Info,
            "files of this file system are read and written through the page cache: it refuses direct transfers",
            error);
}

thread_local std::atomic<std::uint64_t> own_moved{0};
thread_local std::atomic<std::uint64_t>* moved = &own_moved;

}  // namespace

int FsOps::open_folder(const char* path) { return opened(::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)); }
int FsOps::open_folder_at(int folder, const char* name) {
  return opened(::openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}
int FsOps::open_read_at(int folder, const char* name) {
  // O_NONBLOCK: a FIFO opens without waiting for a writer, and is then refused.
  return opened(::openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}
int FsOps::open_write_at(int folder, const char* name) {
  return opened(::openat(folder, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}
int FsOps::create_at(int folder, const char* name) {
  return opened(::openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
}
int FsOps::open_lock_at(int folder, const char* name) {
  return opened(::openat(folder, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
}
int FsOps::make_folder(const char* path) { return result_of(::mkdir(path, 0777)); }
int FsOps::make_folder_at(int folder, const char* name) { return result_of(::mkdirat(folder, name, 0777)); }
ssize_t FsOps::pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) {
  const auto n = ::pread(fd, out, bytes, static_cast<off_t>(offset));
  return n < 0 ? -errno : n;
}
ssize_t FsOps::pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) {
  const base::SizeSignalOff guard;
  const auto n = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
  return n < 0 ? -errno : n;
}
int FsOps::set_direct(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -errno;
  return result_of(::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT));
}
void FsOps::read_ahead(int fd, std::size_t bytes, std::uint64_t offset) {
  (void)::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}
int FsOps::write_back(int fd) {
  return result_of(::sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE));
}
int FsOps::fallocate(int fd, std::uint64_t bytes) {
  const base::SizeSignalOff guard;
  return result_of(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
}
int FsOps::truncate(int fd, std::uint64_t bytes) {
  const base::SizeSignalOff guard;
  return result_of(::ftruncate(fd, static_cast<off_t>(bytes)));
}
int FsOps::fdatasync(int fd) { return result_of(::fdatasync(fd)); }
int FsOps::fsync(int fd) { return result_of(::fsync(fd)); }
int FsOps::close(int fd) { return result_of(::close(fd)); }
int FsOps::rename_at(int folder, const char* from, const char* to) {
  return result_of(::renameat(folder, from, folder, to));
}
int FsOps::exchange_at(int folder, const char* a, const char* b) {
  return result_of(static_cast<int>(::syscall(SYS_renameat2, folder, a, folder, b, RENAME_EXCHANGE)));
}
int FsOps::link_at(int from_folder, const char* from, int folder, const char* name) {
  return result_of(::linkat(from_folder, from, folder, name, 0));
}
int FsOps::remove_at(int folder, const char* name) { return result_of(::unlinkat(folder, name, 0)); }
int FsOps::remove_folder_at(int folder, const char* name) { return result_of(::unlinkat(folder, name, AT_REMOVEDIR)); }
int FsOps::try_lock(int fd) { return result_of(::flock(fd, LOCK_EX | LOCK_NB)); }
int FsOps::info(int fd, FileInfo* out) {
  struct stat found;
  return ::fstat(fd, &found) < 0 ? -errno : fill(found, out);
}
int FsOps::info_at(int folder, const char* name, FileInfo* out) {
  struct stat found;
  return ::fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : fill(found, out);
}
int FsOps::list(int folder, std::vector<std::string>* names) {
  const int fd = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -errno;
  DIR* stream = ::fdopendir(fd);
  if (stream == nullptr) {
    const int error = errno;
    ::close(fd);
    return -error;
  }
  errno = 0;
  while (const auto* entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names->push_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  return -error;
}
int FsOps::free_bytes(int fd, std::uint64_t* out) {
  struct statvfs found;
  if (::fstatvfs(fd, &found) < 0) return -errno;
  *out = static_cast<std::uint64_t>(found.f_bavail) * found.f_frsize;
  return 0;
}

FsOps& system_files() {
  static auto* instance = new FsOps;
  return *instance;
}

void tell_lack(FsOps& fs, int fd, const std::string& path, LogLevel level, const std::string& what, int error) {
  FileInfo info;
  if (fs.info(fd, &info) < 0 || info.device == 0) return;  // 0: memory
  static std::mutex mutex;
  static std::set<std::pair<std::uint64_t, std::string>> told;
  {
    const std::lock_guard lock(mutex);
    if (!told.emplace(info.device, what).second) return;
  }
  base::log(level, base::join("[checkpoint] ", base::printable(path), ": ", what, ": ",
                              std::generic_category().message(error)));
}

void fail_io(const std::string& path, const std::string& what, int error) {
  throw IoError(base::join("[checkpoint] ", base::printable(path), ": ", what, ": ",
                           std::generic_category().message(error), " (errno ", error, ")"));
}

void fail_damaged(const std::string& path, const std::string& what) {
  throw IoError(base::printable("[checkpoint] " + path + ": " + what), ExitCode::kCheckpoint);
}

void FreeMemory::operator()(char* memory) const { std::free(memory); }

AlignedMemory aligned_memory(std::size_t bytes) {
  AlignedMemory memory(static_cast<char*>(std::aligned_alloc(kDirectAlignment, aligned_up(bytes))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// --- File -------------------------------------------------------------------------------------

std::atomic<std::uint64_t>& bytes_moved() { return *moved; }
MovesFor::MovesFor(std::atomic<std::uint64_t>& counter) : before_(std::exchange(moved, &counter)) {}
MovesFor::~MovesFor() { moved = before_; }

File::~File() {
  if (fd_ >= 0) (void)fs_->close(fd_);
}

FileInfo File::info() const {
  FileInfo result;
  if (const int r = fs_->info(fd_, &result); r < 0) fail_io(path_, "fstat", -r);
  return result;
}

void File::write(const void* data, std::size_t bytes, std::uint64_t offset) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto want = std::min(bytes, kMostPerCall);
    const bool direct = direct_.load();
    const auto n = fs_->pwrite(fd_, from, want, offset);
    if (n == -EINTR) continue;
    if (n == -EINVAL && direct && give_up_direct(offset)) continue;
    if (n <= 0 || static_cast<std::size_t>(n) > want) {
      // Some file systems report that they are full by writing nothing.
      const int error = n < 0 ? static_cast<int>(-n) : n == 0 ? ENOSPC : EIO;
      std::uint64_t free = 0;
      const bool known = fs_->free_bytes(fd_, &free) >= 0;
      fail_io(path_,
              base::join("writing ", want, " bytes at offset ", offset,
                         known ? base::join(" (", free, " bytes free)") : ""),
              error);
    }
    from += n;
    *moved += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
    offset += static_cast<std::uint64_t>(n);
    if (!direct) limit_unwritten(static_cast<std::uint64_t>(n));
  }
}

void File::limit_unwritten(std::uint64_t bytes) {
  if ((unwritten_ += bytes) < kMostUnwritten) return;
  unwritten_ = 0;
  const int r = fs_->write_back(fd_);
  // The kernel reports an error of the disk once, and sync() would not see it. Other errors: it cannot do this.
  if (r == -EIO || r == -ENOSPC || r == -EDQUOT) fail_io(path_, "writing what is in the page cache", -r);
}

bool File::set_direct(bool direct) const {
  if (const int r = fs_->set_direct(fd_, direct); r < 0) {
    if (direct) tell_page_cache(*fs_, fd_, path_, -r);
    return false;
  }
  direct_ = direct;
  return true;
}

bool File::give_up_direct(std::uint64_t offset) const {
  // Elsewhere a partial transfer came before, which any file system may make.
  if (offset % kDirectAlignment == 0) tell_page_cache(*fs_, fd_, path_, EINVAL);
  return set_direct(false);
}

void File::read(void* out, std::size_t bytes, std::uint64_t offset) const {
  if (direct_.load()) (void)set_direct(false);
  // All of a large read at once: pread alone asks the disk for one piece after another.
  if (bytes >= kReadAheadFrom) fs_->read_ahead(fd_, bytes, offset);
  read_all(static_cast<char*>(out), bytes, offset);
}

void File::read_direct(AlignedMemory& out, std::size_t bytes, std::uint64_t offset) const {
  if (!direct_.load()) (void)set_direct(true);
  read_all(out.get(), bytes, offset);
}

void File::read_all(char* to, std::size_t bytes, std::uint64_t offset) const {
  while (bytes > 0) {
    const bool direct = direct_.load();
    const auto want = std::min(direct ? aligned_up(bytes) : bytes, kMostPerCall);
    const auto n = fs_->pread(fd_, to, want, offset);
    if (n == -EINTR) continue;
    if (n == -EINVAL && direct && give_up_direct(offset)) continue;
    if (n < 0) fail_io(path_, base::join("reading ", want, " bytes at offset ", offset), static_cast<int>(-n));
    if (n == 0)
      fail_damaged(path_, base::join("ends at offset ", offset, " where ", bytes, " more bytes were expected"));
    if (static_cast<std::size_t>(n) > want) fail_io(path_, "reading more than was asked for", EIO);
    const auto some = std::min(static_cast<std::size_t>(n), bytes);
    to += some;
    *moved += some;
    bytes -= some;
    offset += some;
  }
}

void File::reserve(std::uint64_t bytes) {
  if (bytes == 0) return;
  int r;
  do r = fs_->fallocate(fd_, bytes);
  while (r == -EINTR);
  if (r >= 0 || r == -EOPNOTSUPP || r == -ENOSYS) return;
  std::uint64_t free = 0;
  const bool known = fs_->free_bytes(fd_, &free) >= 0;
  fail_io(path_, base::join("taking room for ", bytes, " bytes", known ? base::join(" (", free, " bytes free)") : ""),
          -r);
}

void File::sync() {
  if (const int r = fs_->fdatasync(fd_); r < 0) fail_io(path_, "fdatasync", -r);
}

void File::close() {
  if (const int r = fs_->close(std::exchange(fd_, -1)); r < 0) fail_io(path_, "close", -r);
}

// --- Folder -----------------------------------------------------------------------------------

Folder Folder::open(FsOps& fs, const std::string& path) {
  const int fd = fs.open_folder(path.c_str());
  if (fd == -ENOENT) fail_damaged(path, "there is no such directory. Hint: check the path given to load or resume.");
  if (fd < 0) fail_io(path, "opening the directory", -fd);
  return Folder(fs, fd, path);
}

Folder Folder::make(FsOps& fs, const std::string& path) {
  int fd = fs.open_folder(path.c_str());
  if (fd == -ENOENT) {
    for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
      const auto part = path.substr(0, end);
      const int r = fs.make_folder(part.c_str());
      // Parents may exist and still not be accessible (EACCES, EROFS): only the last result counts.
      if (r < 0 && r != -EEXIST && end == std::string::npos) fail_io(part, "making the directory", -r);
      if (r >= 0) {
        // A new directory is durable once its parent is synced.
        const auto slash = part.find_last_of('/');
        open(fs, slash == std::string::npos ? "." : slash == 0 ? "/" : part.substr(0, slash)).sync();
      }
      if (end == std::string::npos) break;
    }
    fd = fs.open_folder(path.c_str());
  }
  if (fd < 0) fail_io(path, "opening the directory", -fd);
  return Folder(fs, fd, path);
}

Folder::~Folder() {
  if (fd_ >= 0) (void)fs_->close(fd_);
}

Folder Folder::folder(const std::string& name) const {
  const int fd = fs_->open_folder_at(fd_, name.c_str());
  if (fd == -ENOENT || fd == -ENOTDIR || fd == -ELOOP)
    fail_damaged(path_of(name), fd == -ENOENT ? "there is no such directory" : "is not a directory");
  if (fd < 0) fail_io(path_of(name), "opening the directory", -fd);
  return Folder(*fs_, fd, path_of(name));
}

void Folder::make_folder(const std::string& name) const {
  if (const int r = fs_->make_folder_at(fd_, name.c_str()); r < 0) fail_io(path_of(name), "making the directory", -r);
}

File Folder::create(const std::string& name) const {
  const int fd = fs_->create_at(fd_, name.c_str());
  if (fd < 0) fail_io(path_of(name), "creating the file", -fd);
  return File(*fs_, fd, path_of(name));
}

File Folder::open_to_write(const std::string& name) const {
  const int fd = fs_->open_write_at(fd_, name.c_str());
  if (fd < 0) fail_io(path_of(name), "opening the file to write", -fd);
  File file(*fs_, fd, path_of(name));
  if (!file.info().regular) fail_damaged(path_of(name), "is not a regular file");
  return file;
}

File Folder::open_file(const std::string& name, std::optional<std::uint64_t> bytes) const {
  const int fd = fs_->open_read_at(fd_, name.c_str());
  if (fd == -ENOENT) fail_damaged(path_of(name), "the file is missing");
  if (fd == -ELOOP) fail_damaged(path_of(name), "is a symbolic link, expected a regular file");
  if (fd == -ENXIO) fail_damaged(path_of(name), "is not a regular file");
  if (fd < 0) fail_io(path_of(name), "opening the file", -fd);
  File file(*fs_, fd, path_of(name));
  const auto info = file.info();
  if (!info.regular) fail_damaged(path_of(name), "is not a regular file");
  if (bytes && info.bytes != *bytes)
    fail_damaged(path_of(name), base::join("has ", info.bytes, " bytes, expected ", *bytes));
  return file;
}

std::string Folder::read_file(const std::string& name, std::uint64_t limit) const {
  auto file = open_file(name);
  const auto before = file.info();
  if (before.bytes > limit)
    fail_damaged(path_of(name), base::join("has ", before.bytes, " bytes, expected at most ", limit));
  std::string text(static_cast<std::size_t>(before.bytes), '\0');
  file.read(text.data(), text.size(), 0);
  check_not_replaced(*this, name, file, before);
  return text;
}

void Folder::write_file(const std::string& name, std::string_view text) const {
  auto file = create(name);
  file.write(text.data(), text.size(), 0);
  file.sync();
  file.close();
}

std::optional<FileInfo> Folder::info_of(const std::string& name) const {
  FileInfo info;
  const int r = fs_->info_at(fd_, name.c_str(), &info);
  if (r == -ENOENT) return std::nullopt;
  if (r < 0) fail_io(path_of(name), "stat", -r);
  return info;
}

bool Folder::exists(const std::string& name) const { return info_of(name).has_value(); }

std::vector<std::string> Folder::names() const {
  std::vector<std::string> result;
  if (const int r = fs_->list(fd_, &result); r < 0) fail_io(path_, "listing the directory", -r);
  std::sort(result.begin(), result.end());
  return result;
}

bool Folder::link(const Folder& from, const std::string& name) const {
  return fs_->link_at(from.fd_, name.c_str(), fd_, name.c_str()) >= 0;
}

void Folder::remove(const std::string& name) const {
  if (const int r = fs_->remove_at(fd_, name.c_str()); r < 0) fail_io(path_of(name), "removing the file", -r);
}

void Folder::rename(const std::string& from, const std::string& to) const {
  if (const int r = fs_->rename_at(fd_, from.c_str(), to.c_str()); r < 0)
    fail_io(path_of(from), "renaming to " + to, -r);
}

void Folder::sync() const {
  const int r = fs_->fsync(fd_);
  if (r == -EINVAL || r == -ENOSYS || r == -EOPNOTSUPP)
    return tell_lack(
        *fs_, fd_, path_, LogLevel::Warning,
        "this file system cannot sync a directory, so it decides itself when new names of files are on the "
        "disk; a power failure may lose the last checkpoint",
        -r);
  if (r < 0) fail_io(path_, "fsync of the directory", -r);
}

namespace {

// The file system frees a file's blocks when its last name and descriptor are gone: 80 ms for 0.5 GB on ext4, in which
// a training step would wait. Threads close the last descriptors of large files.
class Freeing {
 public:
  static Freeing& instance() {
    static auto* const freeing = new Freeing;  // never destroyed: threads may use it to the end of the process
    return *freeing;
  }

  // A descriptor of the file, if it is large; -1: none.
  int hold(int folder, const char* name) {
    constexpr off_t kLarge = 16 << 20;
    constexpr int kMost = 8;  // threads and descriptors at once
    struct stat info {};
    if (::fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode) || info.st_size < kLarge)
      return -1;
    {
      const std::lock_guard lock(mutex_);
      if (forked() || open_ >= kMost) return -1;
    }
    return ::openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  }

  void close(int fd) {
    if (fd < 0) return;
    const auto finish = [this, fd] {
      ::close(fd);
      const std::lock_guard lock(mutex_);
      --open_;
      changed_.notify_all();
    };
    {
      const std::lock_guard lock(mutex_);
      ++open_;
    }
    try {
      std::thread(finish).detach();
    } catch (const std::exception&) {  // no thread to be had
      finish();
    }
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return open_ == 0 || forked(); });
  }

 private:
  // A child of fork() has the count, but not the threads.
  bool forked() const { return ::getpid() != process_; }

  std::mutex mutex_;
  std::condition_variable changed_;
  const pid_t process_ = ::getpid();
  int open_ = 0;
};

}  // namespace

void wait_until_freed() { Freeing::instance().wait(); }

std::string Folder::remove_all(const std::string& name) const noexcept {
  try {
    const int held = Freeing::instance().hold(fd_, name.c_str());
    int r = fs_->remove_at(fd_, name.c_str());
    Freeing::instance().close(held);
    if (r >= 0 || r == -ENOENT) return "";
    if (r != -EISDIR && r != -EPERM) return path_of(name) + ": " + std::generic_category().message(-r);
    std::string first;
    {
      // Checkpoint folders contain only files, so the recursion ends there.
      const auto inner = folder(name);
      for (const auto& entry : inner.names())
        if (auto text = inner.remove_all(entry); !text.empty() && first.empty()) first = std::move(text);
    }
    if (!first.empty()) return first;
    r = fs_->remove_folder_at(fd_, name.c_str());
    if (r == -ENOTEMPTY || r == -EBUSY) {  // a network file system keeps a name of a file that is still open
      wait_until_freed();
      r = fs_->remove_folder_at(fd_, name.c_str());
    }
    return r >= 0 ? "" : path_of(name) + ": " + std::generic_category().message(-r);
  } catch (const std::exception& e) {
    return e.what();
  }
}

void check_not_replaced(const Folder& folder, const std::string& name, const File& file, const FileInfo& before) {
  const auto same = [&](const FileInfo& now) {
    return now.bytes == before.bytes && now.inode == before.inode && now.device == before.device &&
           now.modified_ns == before.modified_ns;
  };
  const auto at_name = folder.info_of(name);
  if (!same(file.info()) || !at_name || !same(*at_name))
    fail_damaged(file.path(), "was changed or replaced while it was read");
}

}  // namespace zero::formats
