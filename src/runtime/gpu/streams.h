// Order between the streams of one device, and pinned host memory, without CUDA's headers. On the CPU, which has one
// stream and no events, every operation returns at once: code above is written once.
//
// [Note: marks, not record_stream] A buffer is free again when the mark that its last use left is reached; the
// caching allocator's record_stream would return it late, at moments that depend on the host's pace.
// No kernels, no communication here.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace zero::gpu {

// The current stream of a GPU as CUDA knows it (a cudaStream_t), for kernels of our own.
void* native_stream(at::Device device);

// The host waits for all that the device was given. On the CPU there is nothing to wait for.
void synchronize(at::Device device);

// A point in what a stream has been given to do. Not copied; moves with its owner.
class Mark {
 public:
  // After all that the device's current stream holds now. A mark may be set again.
  void set(at::Device device);
  // What the current stream of the mark's device is given from now on waits for the mark; the host does not.
  void hold() const;
  // The host waits.
  void wait() const;
  // Also true while it was never set.
  bool reached() const;

 private:
  std::optional<c10::Event> event_;  // none on the CPU
  at::Device device_ = at::kCPU;
};

// A stream beside the current one.
class SideStream {
 public:
  // `high_priority`: its kernels go before those of other streams.
  SideStream(at::Device device, bool high_priority);

  // While it lives, the side stream is the thread's current one, and holds first what the stream that was current
  // before holds (unless told not to: then the caller sets and holds marks).
  class Scope {
   public:
    explicit Scope(const SideStream& side, bool after_current = true);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<c10::Stream> before_;
  };

  at::Device device() const { return device_; }

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;  // none on the CPU
};

// Host memory in which copies to and from a GPU need not wait: one slab, pinned if the device is a GPU, cut into
// slots that are used in turn. The allocator of pinned memory rounds each block up to a power of two; one slab of many
// slots loses least.
class HostSlots {
 public:
  static constexpr std::int64_t kAlignment = 256;
  // slot_bytes are rounded up to the alignment.
  HostSlots(at::Device device, std::int64_t slot_bytes, int num_slots);

  // The next slot, its first `bytes` as a kByte tensor; waits (the host) for the end of its last use. InternalError
  // if it is too small.
  at::Tensor take(std::int64_t bytes);
  // What the current stream holds so far includes the last use of the slot that was taken last.
  void used();

  std::int64_t slot_bytes() const { return slot_bytes_; }
  bool pinned() const { return !device_.is_cpu(); }

 private:
  at::Device device_;
  std::int64_t slot_bytes_;
  at::Tensor slab_;
  std::vector<Mark> marks_;
  std::size_t next_ = 0, taken_ = 0;
};

}  // namespace zero::gpu
