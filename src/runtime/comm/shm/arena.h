// The memory of one rank that its peers can read: a sparse memfd, mapped as a whole, and its allocator. Pages are
// allocated on first use and returned to the system when enough ranges are free. Nothing is stored on disk or in
// /dev/shm. Deals in addresses and bytes only; independent of ranks, collectives and torch.
//
// [Note: warm bytes] A freed range stays resident for the next allocation until kWarmBytes of such ranges exist. Then
// all of them are returned to the system at once.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "net/socket.h"

namespace zero::comm::shm {

// The system's: 4 KiB on x86-64; on aarch64 also 16 or 64 KiB. The kernel takes no part of a page.
inline const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
inline constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }
inline constexpr std::size_t round_down(std::size_t bytes, std::size_t unit) { return bytes / unit * unit; }

// Disjoint ranges [at, at + bytes); adjacent ranges are merged.
class RangeSet {
 public:
  void add(std::size_t at, std::size_t bytes);     // the part that is in the set
  void remove(std::size_t at, std::size_t bytes);  // what of it is in the set
  void clear();
  std::size_t total() const { return total_; }
  const std::map<std::size_t, std::size_t>& ranges() const { return ranges_; }  // at -> bytes

 private:
  std::map<std::size_t, std::size_t> ranges_;
  std::size_t total_ = 0;
};

// A peer's arena mapped into this process. IoError if the address space is full.
class Mapping {
 public:
  explicit Mapping(int fd);  // maps the whole file; the descriptor may be closed afterwards
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

// One mapping per file for all callers. For ranks that are threads of one process: ThreadSanitizer identifies memory by
// address, so all ranks must see a peer's memory at the same address.
class Mappings {
 public:
  std::shared_ptr<Mapping> of(int fd);

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::weak_ptr<Mapping>> by_inode_;  // all are memfds
};

// This rank's arena. Thread-safe: tensors may be freed in any thread, also after the transport.
class Arena {
 public:
  static constexpr std::size_t kAlign = 64;             // of every piece
  static constexpr std::size_t kLargeBytes = 64 << 10;  // from this size on: page-aligned and resident at once
  static constexpr std::size_t kWarmBytes = 4 << 20;

  // Reserves `capacity` bytes of address space; the first `reserved` are the caller's and zero. IoError. `mappings`, if
  // given, provides the mapping.
  Arena(std::size_t capacity, std::size_t reserved, Mappings* mappings = nullptr);

  // IoError with the bytes needed if the arena or the machine's memory is full. bytes > 0.
  std::byte* take(std::size_t bytes);
  // May return memory to the system, see [Note: warm bytes].
  void give(std::byte* piece) noexcept;
  // The piece will never be freed, because a peer may still read it after this process is done with it.
  void pin(std::byte* piece) noexcept;

  bool holds(const void* data, std::size_t bytes) const;
  std::size_t offset(const void* data) const { return static_cast<const std::byte*>(data) - mapping_->base(); }
  std::byte* base() const { return mapping_->base(); }
  std::size_t capacity() const { return mapping_->bytes(); }
  int fd() const { return fd_.get(); }
  void close_fd() { fd_.close(); }

  std::size_t used_bytes() const;
  std::size_t warm_bytes() const;

 private:
  void trim();

  base::Descriptor fd_;
  const pid_t pid_;
  std::shared_ptr<Mapping> mapping_;
  mutable std::mutex mutex_;
  RangeSet free_;
  RangeSet warm_;  // free and possibly resident
  std::map<std::size_t, std::size_t> used_;
  std::size_t used_bytes_ = 0;
};

// A capacity that suffices for any use on this machine with `size` ranks.
std::size_t default_capacity(int size);

}  // namespace zero::comm::shm
