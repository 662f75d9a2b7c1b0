// Random numbers in regions that tensor parallelism splits. Outside, all ranks of a group draw the same numbers from
// the default CPU generator; inside, each rank draws its own (Megatron-LM, 1909.08053, appendix B).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero::parallel {

class RandomRegion {
 public:
  // tensor_rank: coordinate in the tensor-parallel group; negative: the generator is never changed (ranks that are
  // threads of one process share it).
  explicit RandomRegion(int tensor_rank) : tensor_rank_(tensor_rank) {}
  ~RandomRegion() { close(); }
  RandomRegion(const RandomRegion&) = delete;
  RandomRegion& operator=(const RandomRegion&) = delete;

  // Seeds the generator by its state and the rank. No effect if the region is open.
  void open();
  // Restores the state from before open(), advanced by one draw if numbers were drawn since, so that the next region
  // draws others. A region without draws leaves no trace. No effect if the region is closed.
  void close() noexcept;
  bool is_open() const { return open_; }

 private:
  const int tensor_rank_;
  bool open_ = false;
  at::Tensor outside_, inside_;  // the generator's state when the region was opened, before and after seeding
};

}  // namespace zero::parallel
