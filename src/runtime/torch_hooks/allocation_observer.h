// Counts the bytes of tensors that a thread allocates, and of the same blocks when any thread frees them. This gives
// exact figures for activations.
//
// [Note: one CPU allocator per process] libtorch has one slot for the CPU allocator. The first observer permanently
// replaces it by a counting allocator, which makes the same system calls and has the same cost. Blocks of threads
// without an observer are not counted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace zero::torch_hooks {

// An optional source of blocks instead of libtorch's allocator. Must be thread-safe.
struct BlockAllocator {
  static constexpr std::size_t kOverhead = 64;   // requested in addition to the tensor's bytes
  std::function<void*(std::size_t bytes)> take;  // aligned to 64 bytes; nullptr: libtorch's allocator is used
  std::function<void(void*)> give;
};

class AllocationObserver {
 public:
  // report(bytes): bytes > 0 were allocated by the constructing thread during this object's life, bytes < 0: one of
  // those blocks was freed, by any thread. Must be thread-safe; kept until the last block is freed. If a thread has
  // several observers, only the newest is called. They may be destroyed in any order and thread. Blocks of `source` are
  // not reported.
  explicit AllocationObserver(std::function<void(std::int64_t)> report, BlockAllocator source = {});
  ~AllocationObserver();
  AllocationObserver(const AllocationObserver&) = delete;
  AllocationObserver& operator=(const AllocationObserver&) = delete;

  // RAII guard: allocations of this thread are not reported, nor is their release.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
  };

 private:
  void* account_;
};

}  // namespace zero::torch_hooks
