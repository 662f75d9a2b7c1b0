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

class StateAccess {
 public:
  explicit StateAccess(TorchBuffers& buffers) : buffers_(buffers) {}

  // Elements [begin, begin + numel) of a state, in the range that this rank owns, in the dtype in which they are
  // stored: a view if they are contiguous in memory, else a copy in host memory.
  at::Tensor read(const step::Group& group, int state, std::int64_t begin, std::int64_t numel) const;
  void write(const step::Group& group, int state, std::int64_t begin, const at::Tensor& values);
  // This rank's shard of a state.
  at::Tensor shard(const step::Group& group, int state) const;

  // The same for the stored parameters, within the part that this rank stores.
  at::Tensor read_params(const step::Group& group, std::int64_t begin, std::int64_t numel) const;
  void write_params(const step::Group& group, std::int64_t begin, const at::Tensor& values);

  // The same for the memory of a view.
  at::Tensor read(const step::View& view) const;
  void write(const step::View& view, const at::Tensor& values);

 private:
  TorchBuffers& buffers_;
};

// The whole state of a group, flat, fp32, with the padding. kMaster of a frozen group: its parameters. Collective.
at::Tensor gathered_state(const Parts& parts, const step::Group& group, int state);

}  // namespace zero::engine
