// Blocks of given sizes that tensors are made in, so that what is computed lies where ranks can read it: kept and
// handed out again, one list a size. What the pool owns, in use or idle, is booked under one purpose. Safe for several
// threads at once.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "step/memory_ledger.h"

namespace zero::engine {

// Owned by shared pointers: blocks may come back late.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  // Throws where there is no more memory.
  using Allocate = std::function<at::Tensor(std::int64_t bytes)>;
  BlockPool(Allocate allocate, std::shared_ptr<step::MemoryLedger> ledger, step::Purpose purpose);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Sizes served by take(); others and a closed pool give nothing.
  void serve(std::int64_t bytes);
  void open(bool opened);
  // nullptr: not from here.
  void* take(std::int64_t bytes);
  void give(void* block);
  // A flat tensor in a block of its own, of any size, open or not. Throws as `allocate` does.
  at::Tensor make(std::int64_t numel, at::ScalarType dtype);
  // Frees what is idle.
  void trim();

 private:
  struct Owned {
    at::Tensor bytes;  // uint8
    bool in_use;
  };
  void* take_any(std::int64_t bytes);

  const Allocate allocate_;
  const std::shared_ptr<step::MemoryLedger> ledger_;
  const step::Purpose purpose_;
  mutable std::mutex mutex_;
  bool open_ = false;
  std::unordered_set<std::int64_t> served_;
  std::unordered_map<std::int64_t, std::vector<void*>> idle_;  // by size
  std::unordered_map<const void*, Owned> owned_;
};

}  // namespace zero::engine
