#include "activations/host_allocator.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::activations {

using step::Purpose;
using step::Tier;

at::Tensor host_memory(at::Device device, std::int64_t bytes) {
  torch_hooks::AllocationObserver::Pause pause;
  if (device.is_cpu()) return at::empty({bytes}, at::kByte);
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes),
                       at::getHostAllocator(device.type())->allocate(static_cast<std::size_t>(bytes)),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::kByte).set_(storage, 0, {bytes});
}

// --- blocks -----------------------------------------------------------------------------------

HostBlocks::HostBlocks(at::Device device, std::shared_ptr<step::MemoryLedger> ledger)
    : device_(device), ledger_(std::move(ledger)) {}

HostBlocks::~HostBlocks() {
  for (const auto& [bytes, size] : sizes_)
    ledger_->book(Tier::Host, Purpose::Activations,
                  -bytes * (size.in_use + static_cast<std::int64_t>(size.idle.size())));
}

at::Tensor HostBlocks::take(std::int64_t bytes) {
  auto& size = sizes_[bytes];
  at::Tensor block;
  if (size.idle.empty()) {
    block = host_memory(device_, bytes);
    ledger_->book(Tier::Host, Purpose::Activations, bytes);
  } else {
    block = std::move(size.idle.back());
    size.idle.pop_back();
  }
  size.most_in_use = std::max(size.most_in_use, ++size.in_use);
  return block;
}

void HostBlocks::give(const at::Tensor& taken) {
  auto& size = sizes_.at(taken.numel());
  --size.in_use;
  size.idle.push_back(taken);
}

void HostBlocks::trim() {
  for (auto it = sizes_.begin(); it != sizes_.end();) {
    auto& size = it->second;
    while (!size.idle.empty() && size.in_use + static_cast<std::int64_t>(size.idle.size()) > size.most_in_use) {
      size.idle.pop_back();
      ledger_->book(Tier::Host, Purpose::Activations, -it->first);
    }
    size.most_in_use = size.in_use;
    it = size.in_use == 0 && size.idle.empty() ? sizes_.erase(it) : std::next(it);
  }
}

// --- slab -------------------------------------------------------------------------------------

Slab::Slab(std::int64_t num_slots, Make make, std::function<void(std::int64_t)> book)
    : num_slots_(num_slots), make_(std::move(make)), book_(std::move(book)) {
  ZERO_CHECK(num_slots >= 1, "[Slab] got ", num_slots, " slots");
}

Slab::~Slab() {
  for (const auto& [slab, owned] : owned_)
    if (book_) book_(-owned.bytes);
}

void Slab::drop_if_idle(const void* slab) {
  const auto it = owned_.find(slab);
  if (it == owned_.end() || it->second.in_use > 0) return;
  if (slab_.defined() && slab == slab_.storage().unsafeGetStorageImpl()) return;
  if (book_) book_(-it->second.bytes);
  owned_.erase(it);
}

at::Tensor Slab::take(std::int64_t bytes) {
  if (in_use_ == 0) next_ = 0;
  if (next_ == num_slots_)
    throw ConfigError(base::join("[activation_checkpoint] got checkpoint ", num_slots_ + 1,
                                 " before backward, expected at most activation_checkpointing.number_checkpoints = ",
                                 num_slots_, ". Hint: raise it, or leave contiguous_memory_optimization out."));
  if (bytes > slot_bytes_) {
    const void* const before = slab_.defined() ? slab_.storage().unsafeGetStorageImpl() : nullptr;
    slab_ = at::Tensor();
    drop_if_idle(before);
    slot_bytes_ = 0;  // in case the allocation fails
    const auto slot = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    slab_ = make_(num_slots_ * slot);
    slot_bytes_ = slot;
    owned_[slab_.storage().unsafeGetStorageImpl()] = {slab_.numel(), 0};
    if (book_) book_(slab_.numel());
  }
  ++in_use_;
  ++owned_.at(slab_.storage().unsafeGetStorageImpl()).in_use;
  return slab_.narrow(0, next_++ * slot_bytes_, bytes);
}

void Slab::give(const at::Tensor& taken) {
  --in_use_;
  const void* const slab = taken.storage().unsafeGetStorageImpl();
  --owned_.at(slab).in_use;
  drop_if_idle(slab);
}

}  // namespace zero::activations
