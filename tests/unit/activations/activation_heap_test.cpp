// The purpose of activation_checkpointing.contiguous_memory_optimization (ZeRO, section 6.3): long-lived checkpoints
// between temporaries do not fragment free memory. The heap is simulated, first fit, from libtorch's actual
// allocations.
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>
#include <zero/library.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "activations/activation_store.h"

namespace zero::activation_heap_test {
namespace {

constexpr std::int64_t kAlignment = 64;

// A heap without an upper limit; memory beyond the last block was never used.
class Heap {
 public:
  std::int64_t place(std::int64_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::int64_t begin = 0;
    for (const auto& [offset, size] : blocks_) {
      if (offset - begin >= bytes) break;
      begin = offset + size;
    }
    blocks_[begin] = bytes;
    used_ += bytes;
    top_ = std::max(top_, begin + bytes);
    return begin;
  }
  void free(std::int64_t offset) {
    const auto it = blocks_.find(offset);
    used_ -= it->second;
    blocks_.erase(it);
  }
  std::int64_t top() const { return top_; }  // the highest address ever used
  std::int64_t used() const { return used_; }
  std::int64_t unused(std::int64_t capacity) const { return capacity - used_; }
  std::int64_t largest_unused(std::int64_t capacity) const {
    std::int64_t largest = 0, begin = 0;
    for (const auto& [offset, size] : blocks_) {
      largest = std::max(largest, offset - begin);
      begin = offset + size;
    }
    return std::max(largest, capacity - begin);
  }

 private:
  std::map<std::int64_t, std::int64_t> blocks_;
  std::int64_t used_ = 0, top_ = 0;
};

Heap* heap = nullptr;  // of the one test that runs

// An allocator for libtorch's CPU tensors: real memory, plus a block in the simulated heap.
class Simulated final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    auto* raw = static_cast<char*>(c10::alloc_cpu(bytes + kAlignment));
    const Header header{heap, heap == nullptr ? 0 : heap->place(static_cast<std::int64_t>(bytes))};
    std::memcpy(raw, &header, sizeof header);
    return {raw + kAlignment, raw + kAlignment, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  struct Header {
    Heap* in;
    std::int64_t offset;
  };
  static void release(void* data) {
    if (data == nullptr) return;
    auto* raw = static_cast<char*>(data) - kAlignment;
    Header header;
    std::memcpy(&header, raw, sizeof header);
    if (header.in != nullptr) header.in->free(header.offset);
    c10::free_cpu(raw);
  }
};

class Fragmentation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    static auto* allocator = new Simulated;
    c10::SetCPUAllocator(allocator, /*priority=*/100);
    at::set_num_threads(1);
  }
  void TearDown() override { heap = nullptr; }
};

constexpr std::int64_t kLayers = 12, kWidth = 64;

// Each layer has more temporaries at once than the previous one. They fill every hole, so the result, which the next
// layer keeps as its input, is placed after them.
at::Tensor forward(at::Tensor x, std::int64_t growth) {
  for (std::int64_t i = 0; i < kLayers; ++i)
    x = activation_checkpoint(
        [i, growth](const at::Tensor& y) {
          std::vector<at::Tensor> pieces;
          for (std::int64_t j = 0; j < 1 + growth * i; ++j) pieces.push_back(j % 2 == 0 ? y.tanh() : y.sin());
          auto sum = y + pieces[0];
          for (const auto& piece : pieces) sum.add_(piece, 0.01);
          return sum;
        },
        x);
  return x;
}

struct AtEndOfForward {
  std::int64_t top, unused, largest;
};

// Of a heap of `capacity` bytes after each step's forward; rows of each step's batch.
std::vector<AtEndOfForward> train(Heap& into, bool slab, const std::vector<std::int64_t>& rows, std::int64_t growth,
                                  std::int64_t capacity = 0) {
  config::ActivationSettings settings;
  settings.contiguous = slab;
  settings.num_checkpoints = kLayers;
  auto store = slab ? activations::ActivationStore::create({.settings = settings,
                                                            .io = {},
                                                            .device = at::kCPU,
                                                            .ledger = std::make_shared<step::MemoryLedger>(),
                                                            .who = "rank 0/1",
                                                            .resident = {},
                                                            .profile = {}})
                    : nullptr;
  torch_hooks::set_saved_tensor_policy(store);
  heap = &into;
  std::vector<AtEndOfForward> seen;
  for (const auto count : rows) {
    auto leaf = at::ones({count, kWidth}).requires_grad_();
    auto loss = forward(leaf * 2, growth).sum();
    seen.push_back({into.top(), into.unused(capacity), into.largest_unused(capacity)});
    (void)torch::autograd::grad({loss}, {leaf});
    if (store) store->end_backward();
  }
  torch_hooks::set_saved_tensor_policy(nullptr);
  return seen;
}

TEST_F(Fragmentation, OneBufferKeepsFreeMemoryInOnePiece) {
  constexpr std::int64_t kGrowth = 4;
  Heap probe, scattered_heap, slab_heap;
  const auto capacity = train(probe, false, {256}, kGrowth)[0].top;
  heap = nullptr;
  const auto scattered = train(scattered_heap, false, {256}, kGrowth, capacity);
  heap = nullptr;
  const auto slab = train(slab_heap, true, std::vector<std::int64_t>(5, 256), kGrowth, capacity);
  heap = nullptr;
  // A request for a fifth of the free memory fails.
  EXPECT_LT(static_cast<double>(scattered[0].largest), 0.2 * static_cast<double>(scattered[0].unused))
      << scattered[0].largest << " of " << scattered[0].unused;
  // A request for nine tenths of it succeeds, after every step.
  for (std::size_t k = 0; k < slab.size(); ++k) {
    EXPECT_EQ(slab[k].largest, slab[0].largest) << "step " << k;
    EXPECT_GT(static_cast<double>(slab[k].largest), 0.9 * static_cast<double>(slab[k].unused))
        << slab[k].largest << " of " << slab[k].unused;
  }
}

TEST_F(Fragmentation, AThousandStepsOfMixedSizesNeedNoMoreThanTheFirstOnes) {
  std::vector<std::int64_t> rows;
  for (std::int64_t step = 0; step < 1000; ++step) rows.push_back(8 + (step * 37) % 57);
  const std::vector<std::int64_t> first(rows.begin(), rows.begin() + 57);  // every size once
  Heap shorter, longer;
  train(shorter, true, first, 1);
  heap = nullptr;
  train(longer, true, rows, 1);
  heap = nullptr;
  EXPECT_EQ(longer.top(), shorter.top());
  EXPECT_EQ(longer.used(), 0) << "the slab goes with its store";
}

}  // namespace
}  // namespace zero::activation_heap_test
