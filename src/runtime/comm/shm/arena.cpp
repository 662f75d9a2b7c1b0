// The allocator: first fit over free ranges in order of address, which reuses resident low addresses first. All system
// calls on the transport's memory are here.
#include "comm/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/memory_file.h"
#include "base/newer_libc.h"
#include "base/size_signal.h"

namespace zero::comm::shm {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

}  // namespace

void RangeSet::add(std::size_t at, std::size_t bytes) {
  total_ += bytes;
  auto next = ranges_.lower_bound(at);
  if (next != ranges_.end() && next->first == at + bytes) {
    bytes += next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == at) {
      before->second += bytes;
      return;
    }
  }
  ranges_.emplace_hint(next, at, bytes);
}

void RangeSet::remove(std::size_t at, std::size_t bytes) {
  const std::size_t end = at + bytes;
  auto range = ranges_.upper_bound(at);
  if (range != ranges_.begin()) --range;
  while (range != ranges_.end() && range->first < end) {
    const std::size_t first = range->first, last = first + range->second;
    if (last <= at) {
      ++range;
      continue;
    }
    total_ -= std::min(last, end) - std::max(first, at);
    range = ranges_.erase(range);
    if (first < at) ranges_.emplace(first, at - first);
    if (last > end) ranges_.emplace(end, last - end);
  }
}

void RangeSet::clear() {
  ranges_.clear();
  total_ = 0;
}

Mapping::Mapping(int fd) {
  struct stat file;
  if (::fstat(fd, &file) != 0) {
    throw IoError(base::join("[Shm::map] got \"", std::strerror(errno), "\" for a peer's memory"));
  }
  bytes_ = static_cast<std::size_t>(file.st_size);
  void* data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    throw IoError(base::join("[Shm::map] got \"", std::strerror(errno), "\" for ", bytes_,
                             " bytes of address space. Hint: raise the limit of virtual memory (ulimit -v), "
                             "or set ZERO_TRANSPORT=gloo."));
  }
  // Exclude it from core dumps: they would contain every rank's memory, and allocate all missing pages.
  ::madvise(data, bytes_, MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

std::shared_ptr<Mapping> Mappings::of(int fd) {
  struct stat file;
  if (::fstat(fd, &file) != 0) return std::make_shared<Mapping>(fd);  // throws the error
  std::lock_guard lock(mutex_);
  std::weak_ptr<Mapping>& known = by_inode_[file.st_ino];
  auto mapping = known.lock();
  if (mapping == nullptr) known = mapping = std::make_shared<Mapping>(fd);
  return mapping;
}

Arena::Arena(std::size_t capacity, std::size_t reserved, Mappings* mappings)
    : fd_(base::open_memory_file("zero-arena", MFD_CLOEXEC)), pid_(::getpid()) {
  capacity = round_up(capacity, kPage);
  reserved = round_up(reserved, kPage);
  const auto fail = [capacity](const char* hint) {
    throw IoError(base::join("[Shm::Arena] got \"", std::strerror(errno), "\" for a shared memory file of ", capacity,
                             " bytes. Hint: ", hint, ", or set ZERO_TRANSPORT=gloo."));
  };
  if (!fd_) fail("see `zero doctor` for what this system allows");
  {
    const base::SizeSignalOff guard;
    if (::ftruncate(fd_.get(), static_cast<off_t>(capacity)) != 0) fail("raise the limit of file size (ulimit -f)");
  }
  mapping_ = mappings != nullptr ? mappings->of(fd_.get()) : std::make_shared<Mapping>(fd_.get());
  free_.add(reserved, capacity - reserved);
}

std::byte* Arena::take(std::size_t bytes) {
  const bool large = bytes >= kLargeBytes;
  const std::size_t align = large ? kPage : kAlign;
  const std::size_t need = bytes <= capacity() ? round_up(bytes, align) : bytes;
  std::lock_guard lock(mutex_);
  for (const auto& [first, length] : free_.ranges()) {
    const std::size_t at = round_up(first, align), end = first + length;
    if (at > end || need > end - at) continue;
    const std::size_t warm_before = warm_.total();
    free_.remove(at, need);
    warm_.remove(at, need);
    // Allocates all pages now, which avoids a fault per page and reports an error instead of SIGBUS later. EINVAL: a
    // kernel before 5.14, on which pages are allocated by faults.
    if (large && warm_before - warm_.total() < need && ::madvise(base() + at, need, MADV_POPULATE_WRITE) != 0 &&
        errno != EINVAL) {
      const int error = errno;
      ::madvise(base() + at, need, MADV_REMOVE);
      free_.add(at, need);
      throw IoError(base::join("[Shm::allocate] got \"", std::strerror(error), "\" for ", need,
                               " bytes of shared memory, with ", used_bytes_,
                               " bytes in use by this rank. Hint: the machine or its container has no more memory."));
    }
    used_.emplace(at, need);
    used_bytes_ += need;
    return base() + at;
  }
  throw IoError(base::join("[Shm::allocate] got no room for ", need, " bytes of shared memory, expected them within ",
                           capacity(), " bytes of which ", used_bytes_,
                           " are in use. Hint: more than the machine's memory was asked for."));
}

void Arena::give(std::byte* piece) noexcept {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(offset(piece));
  if (used == used_.end()) return;  // pinned
  const auto [at, bytes] = *used;
  used_.erase(used);
  used_bytes_ -= bytes;
  free_.add(at, bytes);
  warm_.add(at, bytes);
  if (warm_.total() > kWarmBytes) trim();
}

void Arena::pin(std::byte* piece) noexcept {
  std::lock_guard lock(mutex_);
  // The piece that contains this address.
  auto used = used_.upper_bound(offset(piece));
  if (used != used_.begin() && offset(piece) < std::prev(used)->first + std::prev(used)->second) {
    used_.erase(std::prev(used));
  }
}

void Arena::trim() {
  if (::getpid() != pid_) return;  // a forked child has copies of the ranges, but the memory belongs to the parent
  for (const auto& [at, bytes] : warm_.ranges()) {
    // Returns whole pages of the surrounding free range: the other part of a page may have been freed before.
    const auto around = std::prev(free_.ranges().upper_bound(at));
    const std::size_t first = std::max(round_up(around->first, kPage), round_down(at, kPage));
    const std::size_t last = std::min(round_down(around->first + around->second, kPage), round_up(at + bytes, kPage));
    if (first < last) ::madvise(base() + first, last - first, MADV_REMOVE);
  }
  warm_.clear();
}

bool Arena::holds(const void* data, std::size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(data);
  return first >= base() && first + bytes <= base() + capacity();
}

std::size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::size_t Arena::warm_bytes() const {
  std::lock_guard lock(mutex_);
  return warm_.total();
}

std::size_t default_capacity(int size) {
  const long pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  const std::size_t memory = pages > 0 && page > 0 ? static_cast<std::size_t>(pages) * page : 64 * kGiB;
  // A rank may use all memory. x86-64 has 128 TiB of addresses, and each rank maps every arena.
  const std::size_t most = 32 * 1024 * kGiB / static_cast<std::size_t>(size);
  return std::min(round_up(memory, kGiB) + kGiB, most);
}

}  // namespace zero::comm::shm
