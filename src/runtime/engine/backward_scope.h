// Whether any Engine's backward is running. Another Engine ignores gradients that reach its parameters meanwhile (a
// GAN's generator loss through its discriminator).
#pragma once
#include <atomic>

namespace zero::engine {

class BackwardScope {
 public:
  // on_device: autograd runs the graph in its own threads, one per device.
  explicit BackwardScope(bool on_device) : on_device_(on_device) {
    ++in_this_thread_;
    if (on_device_) ++on_devices_;
  }
  ~BackwardScope() {
    --in_this_thread_;
    if (on_device_) --on_devices_;
  }
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

  static bool active() { return in_this_thread_ > 0 || on_devices_ > 0; }

 private:
  const bool on_device_;
  static inline thread_local int in_this_thread_ = 0;
  static inline std::atomic<int> on_devices_ = 0;
};

}  // namespace zero::engine
