// Ordering between the streams of one device, and pinned host memory, without CUDA's headers. On the CPU, which has one
// stream and no events, every operation returns at once. No kernels, no communication.
//
// [Note: marks, not record_stream] A buffer is free when the mark of its last use is reached. The caching allocator's
// record_stream would free it late, at times that depend on the host's speed.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace zero::gpu {

// The current stream of a GPU as a cudaStream_t, for the plug-in's kernels.
void* native_stream(at::Device device);

// Blocks the host until the device has finished all work. No effect on the CPU.
void synchronize(at::Device device);

// A point in a stream's work. Movable, not copyable.
class Mark {
 public:
  // Marks the end of the work that the device's current stream has now. May be called again.
  void set(at::Device device);
  // Makes later work on the current stream wait for the mark, without blocking the host.
  void hold() const;
  // Blocks the host until the mark is reached.
  void wait() const;
  // Also true if the mark was never set.
  bool reached() const;

 private:
  std::optional<c10::Event> event_;  // none on the CPU
  at::Device device_ = at::kCPU;
};

// A stream in addition to the current one.
class SideStream {
 public:
  // high_priority: its kernels run before those of other streams.
  SideStream(at::Device device, bool high_priority);

  // RAII guard: makes the side stream current in this thread. It first waits for the previous current stream, unless
  // after_current is false; the caller then sets and holds marks.
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

// Pinned host memory for asynchronous copies to and from a GPU: one slab, cut into slots that are used in turn. The
// allocator of pinned memory rounds blocks up to a power of two, so one slab of many slots wastes least. Not pinned on
// the CPU.
class HostSlots {
 public:
  static constexpr std::int64_t kAlignment = 256;
  // slot_bytes is rounded up to the alignment.
  HostSlots(at::Device device, std::int64_t slot_bytes, int num_slots);

  // The next slot: its first `bytes` as a kByte tensor. Blocks the host until its last use has ended. InternalError if
  // the slot is too small.
  at::Tensor take(std::int64_t bytes);
  // Marks the end of the last taken slot's use, after all work on the current stream.
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
