// Marks, side streams and host slots on a simulated device that logs which stream waits for which event, and in what
// order; and on the CPU, where they have no effect. On a GPU: device_streams_test.cpp.
#include "gpu/streams.h"

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <zero/errors.h>

namespace zero::torch_hooks::streams_test {
namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;

struct Log {
  std::vector<std::string> lines;
  c10::StreamId current = 0, made = 0;
  int events = 0, alive = 0;
  std::set<int> unreached;
  void reset() { *this = {}; }
} told;

struct FakeDevice final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kFake, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(told.current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high) const override {
    return stream(++told.made + (high ? 100 : 0));
  }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(told.current, next.id())); }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id() + 1000); }
  static int& number(void* event) { return *static_cast<int*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new int(++told.events);
      ++told.alive;
    }
    told.lines.push_back("stream " + std::to_string(s.id()) + " sets " + std::to_string(number(*event)));
  }
  void block(void* event, const c10::Stream& s) const override {
    told.lines.push_back("stream " + std::to_string(s.id()) + " waits for " + std::to_string(number(event)));
  }
  bool queryEvent(void* event) const override { return event == nullptr || told.unreached.count(number(event)) == 0; }
  void synchronizeEvent(void* event) const override {
    told.lines.push_back("host waits for " + std::to_string(number(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    delete static_cast<int*>(event);
    --told.alive;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeDevice)

struct FakeHostAllocator final : at::HostAllocator {
  int blocks = 0;
  at::DataPtr allocate(size_t bytes) override {
    ++blocks;
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {data, data, &std::free, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} host_allocator;

const at::Device kDevice(kFake, 0);
using Lines = std::vector<std::string>;

TEST(Streams, AMarkHoldsTheStreamThatIsCurrentThen) {
  told.reset();
  {
    gpu::Mark mark;
    EXPECT_TRUE(mark.reached());
    mark.hold();  // of a mark that was never set: nothing
    mark.wait();
    EXPECT_EQ(told.lines, Lines{});
    mark.set(kDevice);
    told.current = 7;
    mark.hold();
    mark.wait();
    EXPECT_EQ(told.lines, (Lines{"stream 0 sets 1", "stream 7 waits for 1", "host waits for 1"}));
    told.unreached = {1};
    EXPECT_FALSE(mark.reached());
    mark.set(kDevice);  // again: the same event
    EXPECT_EQ(told.lines.back(), "stream 7 sets 1");
  }
  EXPECT_EQ(told.alive, 0) << "events left behind";
}

TEST(Streams, ASideStreamBeginsAfterWhatWasCurrentAndGivesItBack) {
  told.reset();
  gpu::SideStream gather(kDevice, /*high_priority=*/true), reduce(kDevice, /*high_priority=*/false);
  {
    gpu::SideStream::Scope scope(gather);
    EXPECT_EQ(told.current, 101);
    EXPECT_EQ(gpu::native_stream(kDevice), reinterpret_cast<void*>(1101));
    {
      gpu::SideStream::Scope inner(reduce, /*after_current=*/false);
      EXPECT_EQ(told.current, 2);
    }
    EXPECT_EQ(told.current, 101);
  }
  EXPECT_EQ(told.current, 0);
  EXPECT_EQ(told.lines, (Lines{"stream 0 sets 1", "stream 101 waits for 1"}));
  EXPECT_EQ(told.alive, 0);
}

TEST(Streams, AGatherDuringComputation) {
  told.reset();
  gpu::SideStream gather(kDevice, true);
  gpu::Mark arrived, released;
  {
    gpu::SideStream::Scope scope(gather);
    arrived.set(kDevice);
  }
  arrived.hold();         // the compute stream waits, the host does not
  released.set(kDevice);  // its last use
  {
    gpu::SideStream::Scope scope(gather, false);
    released.hold();
  }
  EXPECT_EQ(told.lines, (Lines{"stream 0 sets 1", "stream 101 waits for 1", "stream 101 sets 2", "stream 0 waits for 2",
                               "stream 0 sets 3", "stream 101 waits for 3"}));
}

TEST(Streams, HostSlotsAreOneSlabUsedInTurn) {
  told.reset();
  at::setHostAllocator(kFake, &host_allocator);
  const int before = host_allocator.blocks;
  gpu::HostSlots slots(kDevice, 1000, 2);
  EXPECT_TRUE(slots.pinned());
  EXPECT_EQ(slots.slot_bytes(), 1024);
  const auto a = slots.take(1000);
  slots.used();
  const auto b = slots.take(24);
  slots.used();
  EXPECT_EQ(static_cast<char*>(b.data_ptr()) - static_cast<char*>(a.data_ptr()), 1024);
  EXPECT_EQ(b.numel(), 24);
  EXPECT_EQ(told.lines, (Lines{"stream 0 sets 1", "stream 0 sets 2"}));
  const auto c = slots.take(8);
  EXPECT_EQ(c.data_ptr(), a.data_ptr());
  EXPECT_EQ(told.lines.back(), "host waits for 1") << "the first slot's last use";
  EXPECT_EQ(host_allocator.blocks - before, 1);
  EXPECT_THROW(slots.take(1025), InternalError);
}

TEST(Streams, OnTheCpuNothingHappens) {
  told.reset();
  gpu::Mark mark;
  mark.set(at::kCPU);
  mark.hold();
  mark.wait();
  EXPECT_TRUE(mark.reached());
  EXPECT_EQ(gpu::native_stream(at::kCPU), nullptr);
  gpu::SideStream side(at::kCPU, true);
  { gpu::SideStream::Scope scope(side); }
  gpu::HostSlots slots(at::kCPU, 10, 3);
  EXPECT_FALSE(slots.pinned());
  for (int i = 0; i < 6; ++i) {
    slots.take(10).fill_(i);
    slots.used();
  }
  EXPECT_EQ(slots.take(1).item<int>(), 3);
  EXPECT_EQ(told.lines, Lines{});
}

}  // namespace
}  // namespace zero::torch_hooks::streams_test
