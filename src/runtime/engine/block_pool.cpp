#include "engine/block_pool.h"

#include <ATen/ops/from_blob.h>

#include "base/check.h"

namespace zero::engine {

BlockPool::BlockPool(Allocate allocate, std::shared_ptr<step::MemoryLedger> ledger, step::Purpose purpose)
    : allocate_(std::move(allocate)), ledger_(std::move(ledger)), purpose_(purpose) {}

BlockPool::~BlockPool() {
  for (const auto& [block, owned] : owned_) ledger_->book(step::Tier::Device, purpose_, -owned.bytes.numel());
}

void BlockPool::serve(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  served_.insert(bytes);
}

void BlockPool::open(bool opened) {
  std::lock_guard lock(mutex_);
  open_ = opened;
}

void* BlockPool::take(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (!open_ || served_.count(bytes) == 0) return nullptr;
  try {
    return take_any(bytes);
  } catch (const std::exception&) {
    return nullptr;  // the ordinary allocator says so if there is no memory at all
  }
}

void* BlockPool::take_any(std::int64_t bytes) {
  auto& idle = idle_[bytes];
  if (!idle.empty()) {
    void* const block = idle.back();
    idle.pop_back();
    owned_.at(block).in_use = true;
    return block;
  }
  auto tensor = allocate_(bytes);
  void* const block = tensor.data_ptr();
  ledger_->book(step::Tier::Device, purpose_, bytes);
  owned_[block] = {std::move(tensor), true};
  return block;
}

void BlockPool::give(void* block) {
  std::lock_guard lock(mutex_);
  auto& owned = owned_.at(block);
  owned.in_use = false;
  idle_[owned.bytes.numel()].push_back(block);
}

at::Tensor BlockPool::make(std::int64_t numel, at::ScalarType dtype) {
  std::lock_guard lock(mutex_);
  void* const block = take_any(numel * static_cast<std::int64_t>(at::elementSize(dtype)));
  return at::from_blob(
      block, {numel}, [pool = shared_from_this()](void* data) { pool->give(data); }, at::TensorOptions().dtype(dtype));
}

void BlockPool::trim() {
  std::lock_guard lock(mutex_);
  for (auto& [bytes, idle] : idle_) idle.clear();
  std::erase_if(owned_, [&](const auto& entry) {
    if (!entry.second.in_use) ledger_->book(step::Tier::Device, purpose_, -entry.second.bytes.numel());
    return !entry.second.in_use;
  });
}

}  // namespace zero::engine
