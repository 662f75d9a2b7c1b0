// Reads, writes and gathers a group's states as tensors on any tier, between steps. For exports, checkpoints and
// scopes.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "engine/torch_buffers.h"
#include "step/group.h"

namespace zero::engine {

struct Parts;

inline constexpr int kMaster = 0;  // optimizer state k is state 1 + k

// The dtype in which a state is read: fp32 if it is in blocks.
at::ScalarType dtype_of_state(const step::GroupFacts& facts, int state);

class StateAccess {
 public:
  explicit StateAccess(TorchBuffers& buffers) : buffers_(buffers) {}

  // Elements [begin, begin + numel) of a state, in the range that this rank owns, in dtype_of_state(): a view if they
  // are contiguous in memory and not in blocks, else a copy in host memory. A write of parts of blocks rounds the rest
  // of them again.
  at::Tensor read(const step::Group& group, int state, std::int64_t begin, std::int64_t numel) const;
  void write(const step::Group& group, int state, std::int64_t begin, const at::Tensor& values);
  // This rank's shard of a state.
  at::Tensor shard(const step::Group& group, int state) const;

  // The same for the stored parameters, within the part that this rank stores.
  at::Tensor read_params(const step::Group& group, std::int64_t begin, std::int64_t numel) const;
  void write_params(const step::Group& group, std::int64_t begin, const at::Tensor& values);

  // The same for the stored values of a state, or a part of them.
  at::Tensor read_state(const step::View& stored, int state, std::int64_t begin, std::int64_t numel) const;
  void write_state(const step::View& stored, int state, std::int64_t begin, const at::Tensor& values);

  // The same for the memory of a view.
  at::Tensor read(const step::View& view) const;
  void write(const step::View& view, const at::Tensor& values);

 private:
  TorchBuffers& buffers_;
};

// The whole state of a group, flat, fp32, with the padding. kMaster of a frozen group: its parameters. Collective.
at::Tensor gathered_state(const Parts& parts, const step::Group& group, int state);

}  // namespace zero::engine
