// A lock for one caller at a time, also within one thread: a caller that is inside cannot enter again.
#pragma once
#include <atomic>
#include <utility>

namespace zero::comm::shm {

class Turns {
 public:
  class Turn {
   public:
    explicit Turn(std::atomic_flag* taken = nullptr) : taken_(taken) {}
    Turn(Turn&& other) noexcept : taken_(std::exchange(other.taken_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (taken_ == nullptr) return;
      taken_->clear(std::memory_order_release);
      taken_->notify_one();
    }
    explicit operator bool() const { return taken_ != nullptr; }

   private:
    std::atomic_flag* taken_;
  };

  // Waits for it.
  [[nodiscard]] Turn take() {
    while (taken_.test_and_set(std::memory_order_acquire)) taken_.wait(true, std::memory_order_relaxed);
    return Turn(&taken_);
  }
  // Empty if another caller, possibly of this thread, is inside.
  [[nodiscard]] Turn try_take() { return taken_.test_and_set(std::memory_order_acquire) ? Turn() : Turn(&taken_); }

 private:
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
};

}  // namespace zero::comm::shm
