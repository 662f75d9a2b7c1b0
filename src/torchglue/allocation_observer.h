// Bytes of tensors that this thread allocates and frees: how activations are accounted for
// exactly, without replacing the allocator. Works per thread, so ranks as threads do not mix.
#pragma once
#include <functional>
#include <memory>

namespace zero::torchglue {

class AllocationObserver {
 public:
  // report(bytes): bytes > 0 allocated, < 0 freed, by the thread that made this object. Only
  // blocks allocated while it lives are seen when freed.
  explicit AllocationObserver(std::function<void(long)> report);
  ~AllocationObserver();
  AllocationObserver(const AllocationObserver&) = delete;
  AllocationObserver& operator=(const AllocationObserver&) = delete;

  // While it lives, what this thread allocates is not reported (and is not when it is freed).
  class Pause {
   public:
    Pause();
    ~Pause();

   private:
    std::shared_ptr<void> saved_;
  };

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace zero::torchglue
