// Random numbers in regions that tensor parallelism splits. Outside, all ranks of a group draw the same numbers from
// the default generators, the CPU's and the GPU's; inside, each rank draws its own (Megatron-LM, 1909.08053, appendix
// B).
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zero::parallel {

// The default generators that a model on the device draws from.
std::vector<at::Generator> default_generators(at::Device device);

class RandomRegion {
 public:
  // tensor_rank: coordinate in the tensor-parallel group; negative: the generators are never changed (ranks that are
  // threads of one process share them).
  RandomRegion(int tensor_rank, at::Device device) : tensor_rank_(tensor_rank), device_(device) {}
  ~RandomRegion() { close(); }
  RandomRegion(const RandomRegion&) = delete;
  RandomRegion& operator=(const RandomRegion&) = delete;

  // Seeds the generators by their states and the rank. No effect if the region is open.
  void open();
  // Restores the states from before open(), advanced by one draw if numbers were drawn since, so that the next region
  // draws others. A region without draws leaves no trace. No effect if the region is closed.
  void close() noexcept;
  bool is_open() const { return open_; }

 private:
  // A generator's states when the region was opened, before and after seeding.
  struct Seeded {
    at::Generator generator;
    at::Tensor outside, inside;
  };
  const int tensor_rank_;
  const at::Device device_;
  bool open_ = false;
  std::vector<Seeded> seeded_;
};

}  // namespace zero::parallel
