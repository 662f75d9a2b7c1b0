#include "torch_hooks/allocation_observer.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

namespace zero::torch_hooks {
namespace {

// The report target of a thread's allocations. Referenced by every counted block, by the observer, and by the thread's
// chain: observers may be destroyed in any order and in any thread.
struct Account {
  std::function<void(std::int64_t)> report;
  BlockAllocator source;
  std::atomic<std::int64_t> references{2};
  std::atomic<bool> ended{false};
  Account* before = nullptr;  // the next older one in the thread's chain
  void drop() {
    if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

// The observers constructed in this thread, newest first.
thread_local Account* chain = nullptr;
thread_local int pauses = 0;

void unlink(Account*& place) {
  auto* const account = place;
  place = account->before;
  account->drop();
}

// Only the thread itself may change its chain, so observers destroyed elsewhere are removed here.
void unlink_ended() {
  for (auto** place = &chain; *place != nullptr;) {
    if ((*place)->ended.load(std::memory_order_acquire))
      unlink(*place);
    else
      place = &(*place)->before;
  }
}

struct EndOfThread {
  ~EndOfThread() {
    while (chain != nullptr) unlink(chain);
  }
};

Account* current() {
  if (pauses != 0) return nullptr;
  while (chain != nullptr && chain->ended.load(std::memory_order_acquire)) unlink(chain);
  return chain;
}

// Precedes every block: libtorch asserts that a block's pointer is its context.
struct Header {
  std::size_t bytes;
  Account* account;
  bool from_source;
};
constexpr std::size_t kHeader = BlockAllocator::kOverhead;  // 64 bytes preserve libtorch's alignment

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    auto* const account = current();
    void* sourced = account != nullptr && account->source.take ? account->source.take(bytes + kHeader) : nullptr;
    const Header header{bytes, account, sourced != nullptr};
    auto* raw = static_cast<char*>(sourced);
    if (raw == nullptr) {
      // Reported first, because a budget may refuse it.
      if (header.account != nullptr) header.account->report(static_cast<std::int64_t>(bytes));
      try {
        raw = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
      } catch (...) {
        if (header.account != nullptr) header.account->report(-static_cast<std::int64_t>(bytes));
        throw;
      }
    }
    if (header.account != nullptr) header.account->references.fetch_add(1, std::memory_order_relaxed);
    std::memcpy(raw, &header, sizeof header);
    return {raw + kHeader, raw + kHeader, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* dest, const void* source, std::size_t count) const override {
    default_copy_data(dest, source, count);
  }

 private:
  static void free_block(void* data) {
    if (data == nullptr) return;
    auto* raw = static_cast<char*>(data) - kHeader;
    Header header;
    std::memcpy(&header, raw, sizeof header);
    if (header.from_source) {
      header.account->source.give(raw);
    } else {
      c10::free_cpu(raw);
      if (header.account == nullptr) return;
      header.account->report(-static_cast<std::int64_t>(header.bytes));
    }
    header.account->drop();
  }
};

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* allocator = new CountingAllocator;  // never destroyed: blocks may be freed after other statics
    c10::SetCPUAllocator(allocator, /*priority=*/1);
  });
}

}  // namespace

AllocationObserver::AllocationObserver(std::function<void(std::int64_t)> report, BlockAllocator source) {
  install();
  thread_local const EndOfThread end;
  auto* account = new Account;
  account->report = std::move(report);
  account->source = std::move(source);
  unlink_ended();
  account->before = std::exchange(chain, account);
  account_ = account;
}

AllocationObserver::~AllocationObserver() {
  auto* const account = static_cast<Account*>(account_);
  account->ended.store(true, std::memory_order_release);
  unlink_ended();
  account->drop();
}

AllocationObserver::Pause::Pause() { ++pauses; }
AllocationObserver::Pause::~Pause() { --pauses; }

}  // namespace zero::torch_hooks
