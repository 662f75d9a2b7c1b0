// What checkpoints see of the state of training: runs of named tensors that are read and filled where they rest.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "optim/loss_scaler.h"

namespace zero::engine {

// A run of elements of one named tensor, flat, as it rests on this rank.
struct StatePiece {
  std::string kind;                 // "master", "opt.exp_avg", ..., "param" (frozen), "buffer"
  std::string name;                 // the parameter's or buffer's name
  std::vector<std::int64_t> shape;  // of the whole tensor
  std::int64_t begin, numel;        // of the run, within the whole tensor
  at::ScalarType dtype;
  bool requires_grad;
  // Elements [at, at + numel) of the run, 1-d and contiguous in host memory: a view of the live state or a copy, by
  // the tier it rests on.
  std::function<at::Tensor(std::int64_t at, std::int64_t numel)> read;
  // Fills the live state from `at` on; 1-d, any dtype.
  std::function<void(std::int64_t at, const at::Tensor& values)> write;
};

// What a checkpoint keeps of an Engine beside its pieces.
struct StateCounters {
  std::int64_t global_steps, skipped_steps, applied_steps;
  optim::LossScaler::State scaler;
  std::vector<double> set_rates;                     // ShardedOptimizer::set_rates(); empty: none is set
  std::map<std::string, std::int64_t> missed_steps;  // of parameters that were frozen for some updates, by name
};

}  // namespace zero::engine
