// Moved ranges are rare: until the first one, a lookup costs one atomic load.
#include "storage/swap_space.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace zero::storage {

SwapSpace::SwapSpace(const std::string& folder, std::int64_t bytes, std::string who, FaultSource* faults)
    : who_(std::move(who)), faults_(faults), first_(folder, who_, faults), bytes_(bytes) {
  first_.reserve(bytes);
}

Place SwapSpace::locate(std::int64_t offset, std::int64_t bytes) {
  const Place whole{&first_, offset, bytes};
  if (!any_moved_.load(std::memory_order_acquire)) return whole;
  const std::lock_guard lock(mutex_);
  auto after = moved_.upper_bound(offset);
  if (after != moved_.begin()) {
    const auto& [begin, place] = *std::prev(after);
    if (offset < begin + place.bytes)
      return {place.file, place.offset + offset - begin, std::min(bytes, begin + place.bytes - offset)};
  }
  if (after != moved_.end()) return {&first_, offset, std::min(bytes, after->first - offset)};
  return whole;
}

Place SwapSpace::second_place(std::int64_t offset, std::int64_t bytes) {
  const auto now = locate(offset, bytes);
  if (now.file != &first_) return {};
  const std::lock_guard lock(mutex_);
  if (!second_) {
    second_ = std::make_unique<StorageFile>(first_.folder(), who_, faults_);
    if (!first_.direct() && second_->direct()) second_->stop_direct();
  }
  second_->reserve(second_bytes_ + bytes);
  const Place place{second_.get(), second_bytes_, bytes};
  second_bytes_ += bytes;
  return place;
}

void SwapSpace::settle(std::int64_t offset, const Place& place) {
  const std::lock_guard lock(mutex_);
  moved_[offset] = place;
  any_moved_.store(true, std::memory_order_release);
}

}  // namespace zero::storage
