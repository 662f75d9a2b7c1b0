// A kept snapshot: one rank's part of a checkpoint in memory that outlives the rank (base/kept_memory.h). The slot is a
// directory for its writers and readers, with the files of a checkpoint of format 2: a rank file, the hashes of its
// blocks and a manifest. Its first page says whether it is complete, and what it is of.
#pragma once
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "formats/files.h"

namespace zero::formats {

// What a complete snapshot is of. Ranks may use it if attempt and step are equal on all of them, and the key is theirs.
struct KeptHeader {
  std::int64_t attempt = 0;  // of the launcher, that wrote it
  std::int64_t step = 0;
  std::string key;            // 32 hex digits, of run, configuration, rank and layout
  std::string manifest_hash;  // 32 hex digits
  bool operator==(const KeptHeader&) const = default;
};

// Files are written one after the other, each from its first byte on.
class KeptSlot final : public FsOps {
 public:
  // memory: a descriptor, which must outlive this. under: the calls that access it.
  KeptSlot(FsOps& under, int memory, int slot);

  // nullopt: empty, incomplete or damaged. Else its files can be read.
  std::optional<KeptHeader> read();
  // Removes all files. Until publish() the slot is incomplete, whatever ends the process.
  void begin();
  void publish(const KeptHeader& header);
  // Must not outlive this.
  Folder folder();

  int open_folder(const char* path) override;
  int open_read_at(int folder, const char* name) override;
  int create_at(int folder, const char* name) override;
  ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) override;
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override;
  int set_direct(int fd, bool direct) override;
  int fallocate(int fd, std::uint64_t bytes) override;
  int fdatasync(int fd) override;
  int fsync(int fd) override;
  int close(int fd) override;
  int info(int fd, FileInfo* out) override;
  int info_at(int folder, const char* name, FileInfo* out) override;
  int free_bytes(int fd, std::uint64_t* out) override;

 private:
  struct Entry {
    std::string name;
    std::uint64_t begin, bytes;  // in the slot
  };
  Entry* entry_of(int fd);
  int number_of(const char* name) const;  // -1: none
  void write_header(const std::string& text);

  FsOps& under_;
  const int memory_;
  const std::uint64_t base_;
  const std::string path_;
  std::mutex mutex_;
  std::deque<Entry> entries_;  // the first is the page of the header
};

}  // namespace zero::formats
