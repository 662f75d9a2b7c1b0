// Flat buffers that come and go every step: kept and handed out again, so that a step in steady
// state allocates nothing. What the pool owns, in use or idle, is booked under one purpose. Safe for several threads.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <vector>

#include "step/memory_ledger.h"

namespace zero::engine {

class TensorPool {
 public:
  using Allocate = std::function<at::Tensor(std::int64_t numel, at::ScalarType dtype)>;
  TensorPool(Allocate allocate, step::MemoryLedger& ledger, step::Purpose purpose);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  // An uninitialised flat tensor of numel elements. Give it back with put().
  at::Tensor take(std::int64_t numel, at::ScalarType dtype);
  void put(at::Tensor buffer);
  // Frees what is idle.
  void trim();

 private:
  struct Owned {
    at::Tensor bytes;  // uint8
    bool in_use;
  };
  Allocate allocate_;
  step::MemoryLedger& ledger_;
  step::Purpose purpose_;
  std::mutex mutex_;
  std::vector<Owned> owned_;
};

}  // namespace zero::engine
