// judge() implements the table "What a result means" of docs/nvme.md.
#include "storage/request_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/system.h"

namespace zero::storage {
namespace {

using base::join;

constexpr int kTries = 100;
constexpr int kStalls = 2;

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

}  // namespace

Transfer::Transfer(bool write, std::int64_t offset, char* data, std::int64_t bytes)
    : write_(write), offset_(offset), bytes_(bytes), data_(data), done_(bytes == 0) {}

void Transfer::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return done_; });
  if (!error_.empty()) throw IoError(error_);
}

bool Transfer::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Transfer::finish() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  finished_.notify_all();
}

RequestQueue::RequestQueue(SwapSpace& space, const IoSettings& settings, int together)
    : space_(space), request_bytes_(settings.block_size), together_(together) {}

void RequestQueue::add(std::shared_ptr<Transfer> transfer) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw IoError(join("[SwapFile] got a transfer for ", space_.file().path(), ", which is closed"));
    waiting_[transfer->write_].push_back(std::move(transfer));
  }
  more_.notify_all();
}

bool RequestQueue::may_take() const {
  if (waiting_[0].empty() && waiting_[1].empty()) return false;
  return together_ == 0 || taken_of_batch_ < together_;
}

bool RequestQueue::take(Request& request) {
  const std::lock_guard lock(mutex_);
  return take_locked(request);
}

bool RequestQueue::await(Request& request) {
  std::unique_lock lock(mutex_);
  more_.wait(lock, [&] { return may_take() || (closed_ && waiting_[0].empty() && waiting_[1].empty()); });
  return take_locked(request);
}

bool RequestQueue::take_locked(Request& request) {
  if (!may_take()) return false;
  const bool write = waiting_[write_next_].empty() ? !write_next_ : write_next_;
  write_next_ = !write;
  auto& queue = waiting_[write];
  auto& transfer = *queue.front();
  request = Request{};
  request.transfer = queue.front();
  request.write = write;
  request.offset = transfer.offset_ + transfer.taken_;
  request.data = transfer.data_ + transfer.taken_;
  request.place = space_.locate(request.offset, std::min(request_bytes_, transfer.bytes_ - transfer.taken_));
  request.bytes = request.place.bytes;
  transfer.taken_ += request.bytes;
  ++transfer.under_way_;
  if (transfer.taken_ == transfer.bytes_) queue.pop_front();
  if (under_way_++ == 0) busy_since_ = base::steady_seconds();
  ++taken_of_batch_;
  return true;
}

// Ends a request, and its transfer if it was the last one. `error` empty: success.
void RequestQueue::end(Request& request, const std::string& error, std::shared_ptr<Transfer>* over) {
  bool last = false, next_batch = false;
  auto transfer = std::move(request.transfer);
  {
    const std::lock_guard lock(mutex_);
    if (error.empty()) {
      (request.write ? stats_.bytes_written : stats_.bytes_read) += request.bytes;
      ++(request.write ? stats_.writes : stats_.reads);
    } else {
      if (transfer->error_.empty()) transfer->error_ = error;
      // Parts that were not sent are canceled.
      if (transfer->taken_ < transfer->bytes_) {
        auto& queue = waiting_[transfer->write_];
        queue.erase(std::find(queue.begin(), queue.end(), transfer));
        transfer->taken_ = transfer->bytes_;
      }
    }
    last = --transfer->under_way_ == 0 && transfer->taken_ == transfer->bytes_;
    if (--under_way_ == 0) {
      stats_.seconds_busy += base::steady_seconds() - busy_since_;
      next_batch = together_ != 0;
      taken_of_batch_ = 0;
    }
  }
  if (last && over) {
    *over = std::move(transfer);
  } else if (last) {
    transfer->finish();
  }
  if (next_batch) more_.notify_all();
}

RequestQueue::Next RequestQueue::judge(Request& request, std::int64_t result, std::shared_ptr<Transfer>* over) {
  const auto again = [&](Next how) {
    const std::lock_guard lock(mutex_);
    ++stats_.retries;
    return how;
  };
  const auto failed = [&](const std::string& got) {
    end(request, message(request, got), over);
    return Next::Ended;
  };
  if (result > 0) {
    request.tries = 0;
    if (request.place.file->direct()) direct_proven_ = true;
    if (result > request.left()) return failed(join(result, " bytes moved"));
    if (result == request.left()) {
      if (request.relocated) space_.settle(request.offset, request.place);
      end(request, "", over);
      return Next::Ended;
    }
    // O_DIRECT requires the rest to begin at a multiple of the alignment.
    const auto alignment = space_.file().alignment();
    const auto progress = result / alignment * alignment;
    request.moved += progress;
    request.stalls = progress == 0 ? request.stalls + 1 : 0;
    if (request.stalls >= kStalls) return failed(join(result, " bytes moved twice in a row"));
    return again(Next::Again);
  }
  if (result == 0 && !request.write) return failed("the file's end");
  const int error = result == 0 ? ENOSPC : static_cast<int>(-result);
  if (error == EINTR || error == EAGAIN) {
    if (++request.tries < kTries) return again(error == EINTR && request.tries < 10 ? Next::Again : Next::Pause);
    if (!over) return failed(join(system_text(error), ", ", kTries, " times"));
    request.tries = 0;
    return again(Next::Plainly);
  }
  if (error == EINVAL && !direct_proven_ && !request.undirected) {
    request.undirected = true;
    if (request.place.file->direct()) {
      request.place.file->stop_direct();
      base::log(LogLevel::Warning, join("O_DIRECT does not work in ", request.place.file->folder(),
                                        ": transfers use the page cache's memory"));
    }
    return again(Next::Again);
  }
  std::string why_not;
  if (request.write && !is_full(error) && error != EINVAL && relocate(request, why_not)) return again(Next::Again);
  return failed(system_text(error) + why_not);
}

// The data is still in memory: the request is sent once to another file.
bool RequestQueue::relocate(Request& request, std::string& why_not) {
  if (request.relocated) {
    why_not = ", in a second file, too";
    return false;
  }
  try {
    const auto place = space_.second_place(request.offset, request.bytes);
    if (!place.file) {
      why_not = ", in a second file";
      return false;
    }
    base::log(LogLevel::Warning, message(request, "a failed write") + " Its data go to a second file.");
    request.place = place;
  } catch (const Error& error) {
    why_not = join(", and no second file: ", error.what());
    return false;
  }
  request.relocated = true;
  request.moved = 0;
  request.tries = request.stalls = 0;
  return true;
}

std::string RequestQueue::message(const Request& request, const std::string& got) const {
  const auto& file = *request.place.file;
  return join("[SwapFile::", request.write ? "write" : "read", "] got ", got, " at offset ",
              request.place.offset + request.moved, " of ", file.path(), ", expected ", request.left(), " of ",
              request.bytes, " bytes; ", free_bytes_of(file.folder()), " bytes are free there (", space_.who(),
              request.write ? "). Hint: see the disk's state and room."
                            : "). Hint: the state there is lost; resume from the checkpoint.");
}

void RequestQueue::pause(const Request& request) {
  const auto microseconds = std::min(5000, 20 << std::min(request.tries, 8));
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void RequestQueue::close() {
  std::deque<std::shared_ptr<Transfer>> given_up;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    for (auto& queue : waiting_) {
      for (auto& transfer : queue) {
        transfer->taken_ = transfer->bytes_;
        if (transfer->error_.empty())
          transfer->error_ = join("[SwapFile] got closed, expected to stay open until the transfer at offset ",
                                  transfer->offset_, " of ", space_.file().path(), " is done (", space_.who(), ")");
        if (transfer->under_way_ == 0) given_up.push_back(transfer);
      }
      queue.clear();
    }
  }
  more_.notify_all();
  for (const auto& transfer : given_up) transfer->finish();
}

SwapFile::Stats RequestQueue::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  if (under_way_ > 0) stats.seconds_busy += base::steady_seconds() - busy_since_;
  return stats;
}

std::int64_t send_plainly(const Request& request, std::int64_t alignment, FaultSource* faults) {
  const auto offset = request.place.offset + request.moved;
  auto bytes = request.left();
  std::int64_t shown = -1;
  if (faults) {
    const auto fault = faults->request(request.write, offset, bytes);
    if (fault.error != 0) return -fault.error;
    if (fault.at_most >= 0 && fault.at_most < bytes) {
      shown = fault.at_most;
      bytes = shown / alignment * alignment;
      if (bytes == 0) return shown;
    }
  }
  const auto size = static_cast<std::size_t>(bytes);
  const auto result = request.write ? pwrite(request.place.file->fd(), request.data + request.moved, size, offset)
                                    : pread(request.place.file->fd(), request.data + request.moved, size, offset);
  if (result < 0) return -errno;
  return shown >= 0 && result == bytes ? shown : result;
}

}  // namespace zero::storage
