// Bytes of tensors that a thread allocates, and of those blocks when anyone frees them: how
// activations are accounted for exactly.
//
// [Note: one CPU allocator per process] libtorch has one slot for the CPU allocator. The first
// observer puts a counting one there, for good; it asks the same system calls as libtorch's own
// and costs as much. Blocks of threads without an observer are not counted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace zero::torch_hooks {

// Where blocks may come from instead of libtorch's allocator. Safe for several threads at once.
struct BlockAllocator {
  static constexpr std::size_t kOverhead = 64;   // bytes asked for beyond those of the tensor
  std::function<void*(std::size_t bytes)> take;  // aligned to 64 bytes; nullptr: libtorch's allocator serves this one
  std::function<void(void*)> give;
};

class AllocationObserver {
 public:
  // report(bytes): bytes > 0 allocated by the thread that made this object while it lives, < 0 one
  // of those blocks freed, by any thread. Must be thread-safe; kept until the last block is gone.
  // Of several observers in one thread the youngest is told. They may end in any order and in any thread.
  // Blocks of `source` are not reported.
  explicit AllocationObserver(std::function<void(std::int64_t)> report, BlockAllocator source = {});
  ~AllocationObserver();
  AllocationObserver(const AllocationObserver&) = delete;
  AllocationObserver& operator=(const AllocationObserver&) = delete;

  // While it lives, what this thread allocates is not reported, now or when it is freed.
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
