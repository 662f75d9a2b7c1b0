#include "gpu/streams.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/check.h"

namespace zero::gpu {
namespace {

c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

}  // namespace

void* native_stream(at::Device device) {
  return device.is_cpu() ? nullptr
                         : c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(current_stream(device));
}

void synchronize(at::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void Mark::set(at::Device device) {
  if (device.is_cpu()) return;
  if (!event_ || device != device_) {
    event_.emplace(device.type());
    device_ = device;
  }
  event_->record(current_stream(device));
}

void Mark::hold() const {
  if (event_) event_->block(current_stream(device_));
}

void Mark::wait() const {
  if (event_) event_->synchronize();
}

bool Mark::reached() const { return !event_ || event_->query(); }

SideStream::SideStream(at::Device device, bool high_priority) : device_(device) {
  if (!device.is_cpu())
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, high_priority);
}

SideStream::Scope::Scope(const SideStream& side, bool after_current) {
  if (!side.stream_) return;
  Mark mark;
  if (after_current) mark.set(side.device_);
  before_ = c10::impl::VirtualGuardImpl(side.device_.type()).exchangeStream(*side.stream_);
  mark.hold();
}

SideStream::Scope::~Scope() {
  if (before_) c10::impl::VirtualGuardImpl(before_->device_type()).exchangeStream(*before_);
}

HostSlots::HostSlots(at::Device device, std::int64_t slot_bytes, int num_slots)
    : device_(device),
      slot_bytes_((slot_bytes + kAlignment - 1) / kAlignment * kAlignment),
      marks_(static_cast<std::size_t>(num_slots)) {
  ZERO_CHECK(slot_bytes >= 0 && num_slots >= 1, "[HostSlots] got ", num_slots, " slots of ", slot_bytes, " bytes");
  const auto bytes = slot_bytes_ * num_slots;
  if (device.is_cpu()) {
    slab_ = at::empty({bytes}, at::kByte);
    return;
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes),
                       at::getHostAllocator(device.type())->allocate(static_cast<std::size_t>(bytes)),
                       /*allocator=*/nullptr, /*resizable=*/false);
  slab_ = at::empty({0}, at::kByte).set_(storage, 0, {bytes});
}

at::Tensor HostSlots::take(std::int64_t bytes) {
  ZERO_CHECK(bytes >= 0 && bytes <= slot_bytes_, "[HostSlots::take] got ", bytes, " bytes, expected up to ",
             slot_bytes_);
  taken_ = next_;
  next_ = (next_ + 1) % marks_.size();
  marks_[taken_].wait();
  return slab_.narrow(0, static_cast<std::int64_t>(taken_) * slot_bytes_, bytes);
}

void HostSlots::used() { marks_[taken_].set(device_); }

}  // namespace zero::gpu
