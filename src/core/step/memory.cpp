// See memory.h.
#include "step/memory.h"

#include <algorithm>

#include "base/check.h"
#include "step/tiers.h"

namespace zero::step {
namespace {

constexpr Memory::Pool kPools[] = {Memory::kUnshard, Memory::kReduce};

Purpose purpose_of(Memory::Pool pool) {
  return pool == Memory::kUnshard ? Purpose::GatherBuffers : Purpose::ReduceBuffers;
}

}  // namespace

Memory::Memory(BufferOps& buffers, step::MemoryLedger& ledger, bool checksums)
    : buffers_(buffers), ledger_(ledger), checksums_(checksums) {}

Memory::~Memory() {
  close();
  for (const auto& [id, bytes] : block_bytes_) drop_block(id, bytes);
}

void Memory::close() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, resting] : resting_) {
    book(resting, -1);
    buffers_.free(id);
  }
  resting_.clear();
  for (const auto pool : kPools) {
    for (const auto& each : pools_[pool]) drop(each, pool);
    pools_[pool].clear();
  }
  open_ = false;
  trim_locked();
}

// Books first, so that a refusal has no effect; cancels the booking if the allocation fails.
template <class Book>
int Memory::make(const Allocation& allocation, const Book& book) {
  book(1);
  const int id = ++last_;
  try {
    buffers_.allocate(id, allocation);
  } catch (...) {
    book(-1);
    throw;
  }
  return id;
}

// --- at rest ----------------------------------------------------------------------------------

void Memory::book(const Resting& resting, int sign) {
  ledger_.book(resting.tier, resting.purpose, sign * resting.bytes);
  if (resting.tier == Tier::File && checksums_)
    ledger_.book(Tier::Host, Purpose::Other, sign * step::checksum_bytes(resting.bytes));
}

View Memory::rest(const Request& request, std::int64_t numel, Dtype dtype) {
  const bool blocks = request.place == Place::File || request.place == Place::IoBuffer;
  const auto bytes = blocks ? step::whole_blocks(numel * width(dtype)) : numel * width(dtype);
  const std::lock_guard lock(mutex_);
  const Resting resting{request.tier, request.purpose, request.role, request.group, numel, dtype, bytes};
  const int id = make({.place = request.place, .bytes = bytes, .role = request.role, .axis = request.axis},
                      [&](int sign) { book(resting, sign); });
  resting_.emplace(id, resting);
  return {id, 0, numel, dtype};
}

std::vector<Memory::Resting> Memory::resting() const {
  const std::lock_guard lock(mutex_);
  std::vector<Resting> all;
  for (const auto& [id, resting] : resting_)
    if (resting.bytes > 0) all.push_back(resting);
  return all;
}

View Memory::take_io(std::int64_t numel, Dtype dtype) {
  return rest(
      {.place = Place::IoBuffer, .tier = Tier::Host, .purpose = Purpose::GatherBuffers, .role = Role::ParamsTile},
      numel, dtype);
}

void Memory::give(View& view) {
  if (!view) return;
  const std::lock_guard lock(mutex_);
  const auto it = resting_.find(view.buffer);
  ZERO_CHECK(it != resting_.end(), "buffer ", view.buffer, " is given back twice");
  book(it->second, -1);
  resting_.erase(it);
  buffers_.free(view.buffer);
  view = {};
}

// --- pools ------------------------------------------------------------------------------------

View Memory::take(Pool pool, std::int64_t numel, Dtype dtype) {
  const auto bytes = numel * width(dtype);
  const std::lock_guard lock(mutex_);
  auto& owned = pools_[pool];
  Pooled* best = nullptr;
  for (auto& each : owned)
    if (!each.in_use && each.bytes >= bytes && (best == nullptr || each.bytes < best->bytes)) best = &each;
  if (best == nullptr) {
    const auto idle = std::find_if(owned.begin(), owned.end(), [](const Pooled& each) { return !each.in_use; });
    if (idle != owned.end()) {
      drop(*idle, pool);
      owned.erase(idle);
    }
    const int id = make({.place = Place::Device, .bytes = bytes},
                        [&](int sign) { ledger_.book(Tier::Device, purpose_of(pool), sign * bytes); });
    best = &owned.emplace_back(Pooled{id, bytes, false});
  }
  best->in_use = true;
  return {best->id, 0, numel, dtype};
}

void Memory::put(Pool pool, View& view) {
  const std::lock_guard lock(mutex_);
  auto& owned = pools_[pool];
  const auto it = std::find_if(owned.begin(), owned.end(), [&](const Pooled& each) { return each.id == view.buffer; });
  ZERO_CHECK(it != owned.end() && it->in_use, "a buffer was given back twice, or to a pool that does not own it");
  it->in_use = false;
  view = {};
}

void Memory::drop(const Pooled& pooled, Pool pool) {
  ledger_.book(Tier::Device, purpose_of(pool), -pooled.bytes);
  buffers_.free(pooled.id);
}

// --- blocks -----------------------------------------------------------------------------------

void Memory::serve_blocks(Purpose purpose) {
  const std::lock_guard lock(mutex_);
  block_purpose_ = purpose;
}

void Memory::serve(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  served_.insert(bytes);
}

void Memory::open_blocks(bool open) {
  const std::lock_guard lock(mutex_);
  open_ = open;
}

bool Memory::serves(std::int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return open_ && served_.count(bytes) != 0;
}

int Memory::take_block(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& idle = idle_blocks_[bytes];
  if (!idle.empty()) {
    const int id = idle.back();
    idle.pop_back();
    return id;
  }
  const int id = make({.place = Place::PeerReadable, .bytes = bytes},
                      [&](int sign) { ledger_.book(Tier::Device, block_purpose_, sign * bytes); });
  block_bytes_[id] = bytes;
  return id;
}

void Memory::give_block(int buffer) {
  const std::lock_guard lock(mutex_);
  const auto it = block_bytes_.find(buffer);
  ZERO_CHECK(it != block_bytes_.end(), "buffer ", buffer, " is no block");
  idle_blocks_[it->second].push_back(buffer);
}

void Memory::drop_block(int buffer, std::int64_t bytes) {
  ledger_.book(Tier::Device, block_purpose_, -bytes);
  buffers_.free(buffer);
}

void Memory::trim() {
  const std::lock_guard lock(mutex_);
  trim_locked();
}

void Memory::trim_locked() {
  for (const auto pool : kPools)
    std::erase_if(pools_[pool], [&](const Pooled& each) {
      if (!each.in_use) drop(each, pool);
      return !each.in_use;
    });
  for (auto& [bytes, idle] : idle_blocks_) {
    for (const int id : idle) {
      drop_block(id, bytes);
      block_bytes_.erase(id);
    }
    idle.clear();
  }
}

}  // namespace zero::step
