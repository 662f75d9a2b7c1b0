// The gloo library's collectives as torch.distributed provides them for CPU tensors: c10d's ProcessGroupGloo,
// constructed as in Python, on the loopback interface. A comparison for `zero bench collectives`, independent of
// libzero's transports.
#pragma once
#include <ATen/core/Tensor.h>
#include <zero/communicator.h>

#include <memory>

namespace zero::cli {

class GlooLibrary {
 public:
  // Ranks of one host rendezvous through `meeting`, which must be the same on all. Throws CommError.
  explicit GlooLibrary(Communicator& meeting);
  ~GlooLibrary();
  GlooLibrary(const GlooLibrary&) = delete;
  GlooLibrary& operator=(const GlooLibrary&) = delete;

  // dist.all_gather_into_tensor, dist.reduce_scatter_tensor and dist.all_reduce, blocking. Flat tensors as for
  // Communicator; sums in the tensors' dtype, in gloo's order.
  void all_gather(at::Tensor out, at::Tensor in);
  void reduce_scatter(at::Tensor out, at::Tensor in);
  void all_reduce(at::Tensor inout);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero::cli
