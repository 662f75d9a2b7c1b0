// See stream_writer.h.
#include "formats/stream_writer.h"

#include <algorithm>

#include "base/check.h"

namespace zero::formats {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
// Each in a thread, while one more buffer is being filled.
constexpr std::size_t kWritesAtOnce = 4;
// Bytes in the page cache that one sync has to write: it counts no progress meanwhile, and must be short on a slow
// disk.
constexpr std::uint64_t kMostUnsynced = std::uint64_t{64} << 20;

}  // namespace

StreamWriter::StreamWriter(File& file, std::uint64_t begin)
    : file_(file), moved_(bytes_moved()), end_(begin), buffers_(kWritesAtOnce + 1) {}

StreamWriter::~StreamWriter() {
  {
    const std::lock_guard lock(mutex_);
    end_of_file_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

// Holds the mutex.
StreamWriter::Buffer& StreamWriter::next_free() {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return !buffer.ready; });
  ZERO_CHECK(found != buffers_.end(), "no buffer is free");  // the caller has waited for one
  if (!found->memory) found->memory = aligned_memory(kBufferBytes);
  found->offset = end_;
  found->filled = 0;
  return *found;
}

char* StreamWriter::room(std::size_t& bytes) {
  if (current_ == nullptr) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return error_ || std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return !b.ready; });
    });
    if (error_) std::rethrow_exception(error_);
    current_ = &next_free();
  }
  bytes = std::min(bytes, kBufferBytes - current_->filled);
  return current_->memory.get() + current_->filled;
}

void StreamWriter::advance(std::size_t bytes) {
  current_->filled += bytes;
  end_ += bytes;
  if (current_->filled < kBufferBytes) return;
  if (threads_.empty()) {
    (void)file_.set_direct(true);
    for (std::size_t i = 0; i < kWritesAtOnce; ++i) threads_.emplace_back([this] { loop(); });
  }
  {
    const std::lock_guard lock(mutex_);
    current_->ready = true;
    waiting_.push_back(current_);
  }
  current_ = nullptr;
  changed_.notify_all();
}

void StreamWriter::loop() {
  const MovesFor filler(moved_);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !waiting_.empty() || end_of_file_; });
    if (waiting_.empty()) return;
    auto& buffer = *waiting_.front();
    waiting_.erase(waiting_.begin());
    ++under_way_;
    const bool failed = error_ != nullptr;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (!failed) file_.write(buffer.memory.get(), buffer.filled, buffer.offset);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    buffer.ready = false;
    --under_way_;
    changed_.notify_all();
  }
}

void StreamWriter::finish() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty() && under_way_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }
  // The rest has no size that direct transfers could have.
  if (file_.is_direct()) (void)file_.set_direct(false);
  if (current_ != nullptr && current_->filled > 0)
    file_.write(current_->memory.get(), current_->filled, current_->offset);  // the caller syncs the file
  current_ = nullptr;
}

}  // namespace zero::formats
