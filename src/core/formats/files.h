// File system access of checkpoints. FsOps is the replaceable layer: tests replace it to fail, shorten or abort any
// call. File and Folder check every byte count and error, never follow links, and include path, offset and the system's
// text in messages. No torch.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <zero/errors.h>
#include <zero/log.h>

namespace zero::formats {

struct FileInfo {
  bool regular = false, directory = false;
  std::uint64_t bytes = 0, inode = 0, device = 0;
  std::int64_t modified_ns = 0;
};

// The system calls. Negative results are -errno. Names are single components relative to a directory descriptor. The
// base class is the real file system.
class FsOps {
 public:
  virtual ~FsOps() = default;
  virtual int open_folder(const char* path);                 // absolute or relative path
  virtual int open_folder_at(int folder, const char* name);  // O_NOFOLLOW
  virtual int open_read_at(int folder, const char* name);    // O_NOFOLLOW | O_NONBLOCK
  virtual int open_write_at(int folder, const char* name);   // O_NOFOLLOW, an existing file, for writing
  virtual int create_at(int folder, const char* name);       // O_EXCL, for reading and writing
  virtual int open_lock_at(int folder, const char* name);    // created if missing
  virtual int make_folder(const char* path);
  virtual int make_folder_at(int folder, const char* name);
  virtual ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset);
  virtual int set_direct(int fd, bool direct);                               // whether transfers bypass the page cache
  virtual void read_ahead(int fd, std::size_t bytes, std::uint64_t offset);  // begins to fill the page cache
  virtual int write_back(int fd);  // waits for what the call before began, and begins to write what is dirty
  virtual int fallocate(int fd, std::uint64_t bytes);
  virtual int truncate(int fd, std::uint64_t bytes);
  virtual int fdatasync(int fd);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int rename_at(int folder, const char* from, const char* to);
  virtual int exchange_at(int folder, const char* a, const char* b);  // RENAME_EXCHANGE
  virtual int link_at(int from_folder, const char* from, int folder, const char* name);
  virtual int remove_at(int folder, const char* name);
  virtual int remove_folder_at(int folder, const char* name);
  virtual int try_lock(int fd);  // flock, exclusive, non-blocking
  virtual int info(int fd, FileInfo* out);
  virtual int info_at(int folder, const char* name, FileInfo* out);  // of a link: the link itself
  virtual int list(int folder, std::vector<std::string>* names);     // without . and ..
  virtual int free_bytes(int fd, std::uint64_t* out);
};
FsOps& system_files();

// Bytes that files have read and written for the calling thread; another thread may watch the number.
std::atomic<std::uint64_t>& bytes_moved();
// During its life, this thread reads and writes for the thread or work that has this counter.
class MovesFor {
 public:
  explicit MovesFor(std::atomic<std::uint64_t>& counter);
  ~MovesFor();
  MovesFor(const MovesFor&) = delete;
  MovesFor& operator=(const MovesFor&) = delete;

 private:
  std::atomic<std::uint64_t>* before_;
};

// "[checkpoint] PATH: WHAT: No space left on device (errno 28)". `error` is positive.
[[noreturn]] void fail_io(const std::string& path, const std::string& what, int error);
// The same with code kCheckpoint: the contents are not what was written.
[[noreturn]] void fail_damaged(const std::string& path, const std::string& what);

// Logs what the file system of `fd` lacks, once for each file system and text of a process. Never fails.
void tell_lack(FsOps& fs, int fd, const std::string& path, LogLevel level, const std::string& what, int error);

class Folder;

inline constexpr std::size_t kDirectAlignment = 4096;
constexpr std::uint64_t aligned_up(std::uint64_t bytes) {
  return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}
struct FreeMemory {
  void operator()(char* memory) const;
};
using AlignedMemory = std::unique_ptr<char[], FreeMemory>;
// Uninitialised, at a multiple of kDirectAlignment; `bytes` is rounded up to one.
AlignedMemory aligned_memory(std::size_t bytes);

// An open file. close() checks for errors, the destructor does not.
class File {
 public:
  File(FsOps& fs, int fd, std::string path) : fs_(&fs), fd_(fd), path_(std::move(path)) {}
  File(File&& other) noexcept
      : fs_(other.fs_),
        fd_(std::exchange(other.fd_, -1)),
        path_(std::move(other.path_)),
        direct_(other.direct_.load()),
        unwritten_(other.unwritten_.load()) {}
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  FileInfo info() const;
  // Little stays in the page cache, so that sync(), which shows no progress, is short on a slow disk.
  void write(const void* data, std::size_t bytes, std::uint64_t offset);
  // Bypasses the page cache from now on, for transfers whose address, size and offset are multiples of
  // kDirectAlignment, or no longer. false: the file system cannot, which is logged once for each one. After a partial
  // transfer the rest goes through the page cache again.
  bool set_direct(bool direct) const;
  bool is_direct() const { return direct_.load(); }
  // A file that ends within the range is damaged (kCheckpoint).
  void read(void* out, std::size_t bytes, std::uint64_t offset) const;
  // The same, past the page cache where the file system can. offset: a multiple of kDirectAlignment; `out` has room for
  // `bytes` rounded up to one, since the end of a file has any size.
  void read_direct(AlignedMemory& out, std::size_t bytes, std::uint64_t offset) const;
  // Reserves the space, so that a full disk is detected before any work. The error has the needed and free bytes.
  void reserve(std::uint64_t bytes);
  void sync();  // contents and size; never retried after a failure
  void close();

 private:
  void limit_unwritten(std::uint64_t bytes);
  bool give_up_direct(std::uint64_t offset) const;  // after a transfer was refused
  void read_all(char* to, std::size_t bytes, std::uint64_t offset) const;

  FsOps* fs_;
  int fd_;
  std::string path_;
  mutable std::atomic<bool> direct_{false};
  std::atomic<std::uint64_t> unwritten_{0};  // bytes in the page cache since write_back
};

// An open directory.
class Folder {
 public:
  // Throws IoError: kCheckpoint if it does not exist, else kIo.
  static Folder open(FsOps& fs, const std::string& path);
  // Creates it and its parents first.
  static Folder make(FsOps& fs, const std::string& path);
  Folder(Folder&& other) noexcept : fs_(other.fs_), fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
  Folder& operator=(Folder&&) = delete;
  ~Folder();

  const std::string& path() const { return path_; }
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }
  FsOps& fs() const { return *fs_; }
  int fd() const { return fd_; }

  Folder folder(const std::string& name) const;
  void make_folder(const std::string& name) const;
  File create(const std::string& name) const;
  // A regular file, not a link, and of the given size if any. Otherwise it is damaged.
  File open_file(const std::string& name, std::optional<std::uint64_t> bytes = std::nullopt) const;
  // An existing regular file, for writing ranges of it.
  File open_to_write(const std::string& name) const;
  // Reads a small file of at most `limit` bytes and checks that it was not replaced meanwhile.
  std::string read_file(const std::string& name, std::uint64_t limit) const;
  // Writes a new file; it is on disk on return.
  void write_file(const std::string& name, std::string_view text) const;
  bool exists(const std::string& name) const;
  std::optional<FileInfo> info_of(const std::string& name) const;
  std::vector<std::string> names() const;  // sorted
  void rename(const std::string& from, const std::string& to) const;
  // Another name, in this directory, of a file in `from`. false: the file system cannot.
  bool link(const Folder& from, const std::string& name) const;
  void remove(const std::string& name) const;  // a file
  void sync() const;
  // Removes name and everything in it; errors are returned as text, "" when all is gone. The space of large files is
  // free after wait_until_freed().
  std::string remove_all(const std::string& name) const noexcept;

 private:
  Folder(FsOps& fs, int fd, std::string path) : fs_(&fs), fd_(fd), path_(std::move(path)) {}
  FsOps* fs_;
  int fd_;
  std::string path_;
};

// Blocks until the file system has freed the space of all files that this process removed by Folder::remove_all().
void wait_until_freed();

// Rule 13: the file behind `name` is still the one that was opened, with the size and time it had.
void check_not_replaced(const Folder& folder, const std::string& name, const File& file, const FileInfo& before);

}  // namespace zero::formats
