// See token_stream.h.
#include "apps/data/token_stream.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>

namespace data {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr std::size_t kDocumentBytes = std::size_t{64} << 20;  // its pieces take about 15 times as much memory
constexpr std::array<char, 8> kMagic{'Z', 'T', 'O', 'K', 'E', 'N', 'S', '2'};
constexpr std::int64_t kStep = 1 << 16;  // tokens that a pass over all of them reads at once

struct Header {
  std::array<char, 8> magic;
  std::uint64_t key, width, count, hash;
};
static_assert(sizeof(Header) == 40);

// XXH3 of the tokens' bytes.
class TokenHash {
 public:
  TokenHash() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    XXH3_64bits_reset(state_);
  }
  ~TokenHash() { XXH3_freeState(state_); }
  TokenHash(const TokenHash&) = delete;
  TokenHash& operator=(const TokenHash&) = delete;
  void add(const void* data, std::size_t bytes) { XXH3_64bits_update(state_, data, bytes); }
  std::uint64_t value() const { return XXH3_64bits_digest(state_); }

 private:
  XXH3_state_t* state_;
};

// Never a descriptor of the standard streams, which may be closed: what is printed would go into the file.
int off_standard(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  ::close(fd);
  return moved;
}

// A file with a name that no other process or thread has. It disappears with this object unless it was renamed.
class PartFile {
 public:
  explicit PartFile(const std::filesystem::path& target) : path_(target.string() + ".XXXXXX") {
    const int fd = off_standard(::mkostemp(path_.data(), O_CLOEXEC));
    if (fd < 0) fail("a file that can be written. Hint: set TMPDIR, or give another cache");
    file_ = ::fdopen(fd, "w+b");
    if (file_ == nullptr) {
      const int error = errno;
      ::close(fd);
      ::unlink(path_.c_str());
      errno = error;
      fail("an open file");
    }
  }
  ~PartFile() {
    std::fclose(file_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  void write(const void* data, std::size_t bytes) {
    if (std::fwrite(data, 1, bytes, file_) != bytes) fail_write();
  }
  void rewind() {
    if (std::fseek(file_, 0, SEEK_SET) != 0) fail_write();
  }
  void flush() {
    if (std::fflush(file_) != 0) fail_write();
  }
  // Who may read the folder may read the file, and its owner alone writes it; mkostemp's file is its owner's alone.
  void share_as(const std::string& folder) {
    struct stat about {};
    if (::stat(folder.c_str(), &about) == 0) (void)::fchmod(::fileno(file_), 0600 | (about.st_mode & 0044));
  }
  // Whom this process's files in the folder belong to: somebody else where a server replaces root.
  uid_t owner() const {
    struct stat about {};
    return ::fstat(::fileno(file_), &about) == 0 ? about.st_uid : ::geteuid();
  }
  // What is under the new name is on the disk.
  void rename_to(const std::string& path) {
    if (::fsync(::fileno(file_)) != 0) fail_write();
    if (std::rename(path_.c_str(), path.c_str()) != 0) fail("a new name");
    path_.clear();
  }
  // The file without a name: it ends with the last one who has it open, also if the process is killed.
  std::string unlinked() {
    ::unlink(path_.c_str());
    path_.clear();
    return "/proc/self/fd/" + std::to_string(::fileno(file_));
  }

 private:
  [[noreturn]] void fail(const char* expected) const { fail_file("tokens", path_, std::strerror(errno), expected); }
  [[noreturn]] void fail_write() const { fail("a file that can be written. Hint: more room, or another cache"); }

  std::string path_;
  std::FILE* file_ = nullptr;
};

// The file, opened; -1 if there is none, or one that somebody else can have written than this user, root and the
// folder's owner. XXH3 finds damage, but not a file that was made to be found whole.
int open_trusted(const std::string& path, const std::string& folder, uid_t own) {
  struct stat file {};
  struct stat around {};
  const int fd = off_standard(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (fd < 0) return -1;
  const bool known = ::fstat(fd, &file) == 0 && ::stat(folder.c_str(), &around) == 0;
  const bool owned =
      file.st_uid == ::geteuid() || file.st_uid == 0 || file.st_uid == around.st_uid || file.st_uid == own;
  if (known && S_ISREG(file.st_mode) && file.st_size > 0 && owned && (file.st_mode & (S_IWGRP | S_IWOTH)) == 0)
    return fd;
  ::close(fd);
  return -1;
}

// One process or thread at a time makes a file; the others wait and read it. Where a file system has no locks each
// makes its own, and the last one to rename stays.
class MakerLock {
 public:
  explicit MakerLock(const std::string& path)
      : fd_(off_standard(::open(path.c_str(), O_CREAT | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0666))) {
    while (fd_ >= 0 && ::flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~MakerLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  MakerLock(const MakerLock&) = delete;
  MakerLock& operator=(const MakerLock&) = delete;

 private:
  int fd_;
};

void write_tokens(PartFile& out, const Records& records, const Tokenizer& tokenizer, std::int32_t separator,
                  std::uint64_t key, std::uint64_t width) {
  Header header{kMagic, key, width, 0, 0};
  TokenHash hash;
  out.write(&header, sizeof header);
  std::vector<std::uint16_t> narrow;
  const auto append = [&](const auto& ids) {
    const auto bytes = ids.size() * sizeof ids[0];
    hash.add(ids.data(), bytes);
    out.write(ids.data(), bytes);
  };
  for (std::int64_t i = 0; i < records.size(); ++i) {
    const auto record = records.at(i);
    const auto& text = *record.find("text");
    if (text.size() > kDocumentBytes)
      fail_file("records", record.where, "a document of " + std::to_string(text.size()) + " bytes",
                "at most 67108864. Hint: several files, or a line a document");
    auto ids = tokenizer.encode(text, false);
    ids.push_back(separator);
    header.count += ids.size();
    if (width == 2) {
      narrow.assign(ids.begin(), ids.end());
      append(narrow);
    } else {
      append(ids);
    }
  }
  header.hash = hash.value();
  out.rewind();
  out.write(&header, sizeof header);
  out.flush();
}

}  // namespace

TokenStream::TokenStream(const Records& records, const Tokenizer& tokenizer, std::int32_t separator,
                         const std::string& cache) {
  const std::array<std::uint64_t, 3> facts{records.digest(), tokenizer.digest(), static_cast<std::uint64_t>(separator)};
  const std::uint64_t key = XXH3_64bits(facts.data(), sizeof facts);
  const auto vocabulary = tokenizer.vocabulary();
  const std::uint64_t width = vocabulary <= 65536 ? 2 : 4;
  if (cache.empty()) {
    std::error_code ignored;
    auto folder = std::filesystem::temp_directory_path(ignored);
    if (ignored) folder = "/tmp";
    PartFile file(folder / "zero-tokens");
    const auto path = file.unlinked();
    write_tokens(file, records, tokenizer, separator, key, width);
    if (!open(path, key, vocabulary)) fail_file("tokens", path, "other bytes than were written", "them");
    return;
  }
  char name[40];
  std::snprintf(name, sizeof name, "tokens-%016llx.bin", static_cast<unsigned long long>(key));
  const auto path = (std::filesystem::path(cache) / name).string();
  const auto open_cached = [&](uid_t own) {
    const int fd = open_trusted(path, cache, own);
    if (fd < 0) return false;
    const bool whole = open("/proc/self/fd/" + std::to_string(fd), key, vocabulary);
    ::close(fd);
    return whole;
  };
  if (open_cached(::geteuid())) return;
  const MakerLock lock((std::filesystem::path(cache) / "tokens.lock").string());
  uid_t own = 0;
  {
    PartFile part(path);
    own = part.owner();
    if (open_cached(own)) return;
    part.share_as(cache);
    write_tokens(part, records, tokenizer, separator, key, width);
    part.rename_to(path);
  }
  if (!open_cached(own)) fail_file("tokens", path, "other bytes than were written", "them");
}

bool TokenStream::open(const std::string& path, std::uint64_t key, std::int64_t vocabulary) {
  if (!std::filesystem::is_regular_file(path)) return false;
  file_ = std::make_unique<MappedFile>(path, "tokens");
  Header header{};
  if (file_->size() < static_cast<std::int64_t>(sizeof header)) return false;
  std::memcpy(&header, file_->data(), sizeof header);
  const auto bytes = static_cast<std::uint64_t>(file_->size()) - sizeof header;
  if (header.magic != kMagic || header.key != key || (header.width != 2 && header.width != 4) ||
      bytes % header.width != 0 || header.count != bytes / header.width)
    return false;
  width_ = static_cast<std::int64_t>(header.width);
  size_ = static_cast<std::int64_t>(header.count);
  TokenHash hash;
  for (std::int64_t at = 0; at < size_; at += kStep) {
    const auto count = std::min(kStep, size_ - at);
    hash.add(file_->data() + sizeof header + at * width_, static_cast<std::size_t>(count * width_));
    for (const auto id : tokens(at, count))
      if (id < 0 || id >= vocabulary) return false;
  }
  return hash.value() == header.hash;
}

std::vector<std::int32_t> TokenStream::tokens(std::int64_t begin, std::int64_t count) const {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  const auto* from = file_->data() + sizeof(Header) + begin * width_;
  if (width_ == 4) {
    std::memcpy(ids.data(), from, ids.size() * 4);
    return ids;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::uint16_t id = 0;
    std::memcpy(&id, from + 2 * i, 2);
    ids[i] = id;
  }
  return ids;
}

}  // namespace data
