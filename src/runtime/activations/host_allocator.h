// Allocators for offloaded bytes in host memory: blocks that are cached by size, or the slots of one slab. Both book
// the memory they own, used or idle, as Activations of its tier. No streams and no copies.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "step/memory_ledger.h"

namespace zero::activations {

// Returns flat kByte tensors. Not thread-safe; the owner synchronizes.
class HostAllocator {
 public:
  virtual ~HostAllocator() = default;
  // bytes >= 1. Throws if nothing is available.
  virtual at::Tensor take(std::int64_t bytes) = 0;
  virtual void give(const at::Tensor& taken) = 0;
};

// `bytes` of host memory, pinned if `device` is a GPU. Not counted by the AllocationObserver.
at::Tensor host_memory(at::Device device, std::int64_t bytes);

// Blocks of host memory.
class HostBlocks final : public HostAllocator {
 public:
  HostBlocks(at::Device device, std::shared_ptr<step::MemoryLedger> ledger);
  ~HostBlocks() override;
  at::Tensor take(std::int64_t bytes) override;
  void give(const at::Tensor& taken) override;
  // Frees cached blocks beyond the largest number in use at once, by size, since the last call.
  void trim();

 private:
  struct Size {
    std::vector<at::Tensor> idle;
    std::int64_t in_use = 0, most_in_use = 0;
  };
  const at::Device device_;
  const std::shared_ptr<step::MemoryLedger> ledger_;
  std::map<std::int64_t, Size> sizes_;
};

// n slots of equal size in one piece of memory, which keeps long-lived tensors apart from short-lived ones (ZeRO,
// section 6.3, M_D). Slots are used in order, starting over when none is in use. The slab is allocated at first use. If
// a request exceeds the slot size, a slab with larger slots replaces it, and the old slab is freed with its last slot.
class Slab final : public HostAllocator {
 public:
  static constexpr std::int64_t kAlignment = 256;
  using Make = std::function<at::Tensor(std::int64_t bytes)>;
  // book(bytes) is called when the bytes owned change; empty: they are booked elsewhere.
  Slab(std::int64_t num_slots, Make make, std::function<void(std::int64_t)> book = {});
  ~Slab() override;
  // Throws ConfigError for slot n + 1.
  at::Tensor take(std::int64_t bytes) override;
  void give(const at::Tensor& taken) override;

 private:
  struct Owned {
    std::int64_t bytes = 0, in_use = 0;  // in_use: slots
  };
  void drop_if_idle(const void* slab);
  const std::int64_t num_slots_;
  const Make make_;
  const std::function<void(std::int64_t)> book_;
  std::int64_t slot_bytes_ = 0, next_ = 0, in_use_ = 0;
  at::Tensor slab_;
  std::map<const void*, Owned> owned_;  // by storage: this slab, and older ones with slots in use
};

}  // namespace zero::activations
