// Where bytes that left the device lie in memory: blocks that are kept by size and handed out again, or the slots of
// one slab. Both book what they own under Activations of their tier, in use or idle. No streams, no copies here.
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

// Flat kByte tensors. Not thread-safe: its owner takes turns.
class HostAllocator {
 public:
  virtual ~HostAllocator() = default;
  // bytes >= 1. Throws where there is no more.
  virtual at::Tensor take(std::int64_t bytes) = 0;
  virtual void give(const at::Tensor& taken) = 0;
};

// `bytes` of host memory, pinned if `device` is a GPU; not seen by the AllocationObserver.
at::Tensor host_memory(at::Device device, std::int64_t bytes);

// Blocks of host memory.
class HostBlocks final : public HostAllocator {
 public:
  HostBlocks(at::Device device, std::shared_ptr<step::MemoryLedger> ledger);
  ~HostBlocks() override;
  at::Tensor take(std::int64_t bytes) override;
  void give(const at::Tensor& taken) override;
  // Frees blocks of sizes of which fewer have been in use at once since the last call.
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

// n slots of equal size, one behind the other: what lives long does not lie between what comes and goes (ZeRO, 6.3,
// M_D). Slots are used in order, from the first one again when none is in use. Made at the first use; when more bytes
// are asked for than a slot has, a new slab of larger slots takes its place, and the old one goes with its last slot.
class Slab final : public HostAllocator {
 public:
  static constexpr std::int64_t kAlignment = 256;
  using Make = std::function<at::Tensor(std::int64_t bytes)>;
  // book(bytes) is told of what is owned; empty: someone else counts it.
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
  std::map<const void*, Owned> owned_;  // by storage: this slab and older ones with slots in use
};

}  // namespace zero::activations
