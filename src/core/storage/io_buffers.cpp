#include "storage/io_buffers.h"

#include <sys/mman.h>

#include <cstdint>
#include <utility>

#include "base/newer_libc.h"
#include "storage/swap_file.h"

namespace zero::storage {
namespace {

constexpr std::int64_t kHugePage = 2 << 20;

std::int64_t whole(std::int64_t bytes) {
  const auto unit = bytes >= kHugePage ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}

// Large memory is aligned to huge pages: the disk then gets one segment instead of hundreds.
void* map(std::int64_t size) {
  const bool large = size >= kHugePage;
  const auto length = static_cast<std::size_t>(large ? size + kHugePage : size);
  void* const got = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED || !large) return got == MAP_FAILED ? nullptr : got;
  auto* const begin = static_cast<char*>(got);
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin) % kHugePage);
  const auto head = past == 0 ? 0 : kHugePage - past, tail = kHugePage - head;
  if (head > 0) munmap(begin, static_cast<std::size_t>(head));
  if (tail > 0) munmap(begin + head + size, static_cast<std::size_t>(tail));
  return begin + head;
}

}  // namespace

IoBuffers::~IoBuffers() {
  for (const auto& piece : pieces_) munmap(piece.data, static_cast<std::size_t>(piece.bytes));
}

void* IoBuffers::take(std::int64_t bytes) {
  const auto size = whole(bytes);
  const std::lock_guard lock(mutex_);
  // The smallest free piece that is large enough, unless it is much too large.
  Piece* best = nullptr;
  for (auto& piece : pieces_)
    if (!piece.taken && piece.bytes >= size && piece.bytes <= 2 * size && (!best || piece.bytes < best->bytes))
      best = &piece;
  if (best) {
    best->taken = true;
    return best->data;
  }
  const auto length = static_cast<std::size_t>(size);
  void* data = map(size);
  if (!data) return nullptr;
  madvise(data, length, MADV_HUGEPAGE);
  madvise(data, length, MADV_DONTFORK);
  if (madvise(data, length, MADV_POPULATE_WRITE) != 0)
    for (std::size_t at = 0; at < length; at += kPage) static_cast<volatile char*>(data)[at] = 0;
  pieces_.push_back({data, size, true});
  if (path_) path_->add_memory(data, size);
  return data;
}

void IoBuffers::give_back(void* data) {
  const std::lock_guard lock(mutex_);
  for (auto& piece : pieces_)
    if (piece.data == data) piece.taken = false;
}

void IoBuffers::serve(IoPath* path) {
  const std::lock_guard lock(mutex_);
  path_ = path;
  if (!path_) return;
  for (const auto& piece : pieces_) path_->add_memory(piece.data, piece.bytes);
}

IoBuffer::IoBuffer(std::shared_ptr<IoBuffers> pool, void* data, std::int64_t bytes)
    : pool_(std::move(pool)), data_(data), bytes_(bytes) {}

IoBuffer::IoBuffer(IoBuffer&& other) noexcept
    : pool_(std::move(other.pool_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

IoBuffer& IoBuffer::operator=(IoBuffer&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

IoBuffer::~IoBuffer() {
  if (pool_) pool_->give_back(data_);
}

}  // namespace zero::storage
