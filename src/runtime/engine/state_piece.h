// The training state as checkpoints see it: ranges of named tensors with functions to read and write them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "optim/loss_scaler.h"

namespace zero::engine {

// What belongs to one rank alone: the random number generator, and buffers that are no part of the state dict.
inline constexpr const char* kPrivateKind = "rank";
inline constexpr std::string_view kUnsavedPrefix = "buffer ";
inline std::string unsaved_name(const std::string& buffer) { return std::string(kUnsavedPrefix) + buffer; }
inline std::string saved_name(const std::string& unsaved) { return unsaved.substr(kUnsavedPrefix.size()); }

// A range of elements of one named tensor, flat, that this rank stores.
struct StatePiece {
  std::string kind;                 // "master", "opt.exp_avg", ..., "param" (frozen), "buffer", "rank"
  std::string name;                 // the parameter's or buffer's name, unsaved_name()
  std::vector<std::int64_t> shape;  // of the whole tensor
  // Of the range, within the whole tensor. Elements of a parameter that is cut are numbered part by part.
  std::int64_t begin, numel;
  at::ScalarType dtype;
  bool requires_grad;
  // Elements [at, at + numel) of the range, 1-d and contiguous in host memory: a view of the state or a copy, depending
  // on the tier.
  std::function<at::Tensor(std::int64_t at, std::int64_t numel)> read;
  // Writes the state from `at` on; 1-d, any dtype. A state in blocks of codes is written when each of its elements was.
  std::function<void(std::int64_t at, const at::Tensor& values)> write;
  // Where updates change it: the group, the state's number in it, and the place of the first element in what this rank
  // owns of the group. -1: a buffer.
  int group = -1, state = 0;
  std::int64_t owned_begin = 0;
};

// What a checkpoint stores of an Engine besides its pieces.
struct StateCounters {
  std::int64_t global_steps, skipped_steps, applied_steps, global_samples;
  optim::LossScaler::State scaler;
  std::vector<double> set_rates;                     // ShardedOptimizer::set_rates(); may be empty
  std::map<std::string, std::int64_t> missed_steps;  // of parameters that were frozen in some updates, by name
};

}  // namespace zero::engine
