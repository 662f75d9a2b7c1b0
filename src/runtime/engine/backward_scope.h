// Whether some Engine's backward is running. Gradients that reach the parameters of another Engine meanwhile (a
// generator's loss through its discriminator) are not that Engine's.
#pragma once
#include <atomic>

namespace zero::engine {

class BackwardScope {
 public:
  // on_device: autograd runs the graph's nodes in threads of its own, one a device.
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
