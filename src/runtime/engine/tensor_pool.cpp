#include "engine/tensor_pool.h"

#include <algorithm>

#include "base/check.h"

namespace zero::engine {

TensorPool::TensorPool(Allocate allocate, step::MemoryLedger& ledger, step::Purpose purpose)
    : allocate_(std::move(allocate)), ledger_(ledger), purpose_(purpose) {}

TensorPool::~TensorPool() {
  for (const auto& owned : owned_) ledger_.book(step::Tier::Device, purpose_, -owned.bytes.numel());
}

at::Tensor TensorPool::take(std::int64_t numel, at::ScalarType dtype) {
  const std::lock_guard lock(mutex_);
  const auto bytes = numel * static_cast<std::int64_t>(at::elementSize(dtype));
  Owned* best = nullptr;
  for (auto& owned : owned_)
    if (!owned.in_use && owned.bytes.numel() >= bytes && (best == nullptr || owned.bytes.numel() < best->bytes.numel()))
      best = &owned;
  if (best == nullptr) {
    // An idle buffer that is too small makes room first: the pool then settles on the largest
    // sizes in use at once, not on one buffer of each size seen.
    for (auto it = owned_.begin(); it != owned_.end(); ++it) {
      if (it->in_use) continue;
      ledger_.book(step::Tier::Device, purpose_, -it->bytes.numel());
      owned_.erase(it);
      break;
    }
    auto fresh = allocate_(bytes, at::kByte);
    ledger_.book(step::Tier::Device, purpose_, bytes);
    owned_.push_back({std::move(fresh), false});
    best = &owned_.back();
  }
  best->in_use = true;
  return best->bytes.narrow(0, 0, bytes).view(dtype);
}

void TensorPool::put(at::Tensor buffer) {
  const std::lock_guard lock(mutex_);
  for (auto& owned : owned_) {
    if (owned.bytes.storage().unsafeGetStorageImpl() == buffer.storage().unsafeGetStorageImpl() &&
        owned.bytes.const_data_ptr() == buffer.const_data_ptr()) {
      ZERO_CHECK(owned.in_use, "a buffer was given back twice");
      owned.in_use = false;
      return;
    }
  }
  ZERO_CHECK(false, "a buffer was given back to a pool that does not own it");
}

void TensorPool::trim() {
  const std::lock_guard lock(mutex_);
  std::erase_if(owned_, [&](const Owned& owned) {
    if (!owned.in_use) ledger_.book(step::Tier::Device, purpose_, -owned.bytes.numel());
    return !owned.in_use;
  });
}

}  // namespace zero::engine
