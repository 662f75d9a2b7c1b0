// The collectives of the gloo library as torch.distributed's users get them on CPU tensors: c10d's
// ProcessGroupGloo as its Python side builds it, on the loopback interface. A peer for `zero bench collectives`;
// nothing of libzero's own transports is here.
#pragma once
#include <ATen/core/Tensor.h>
#include <zero/communicator.h>

#include <memory>

namespace zero::cli {

class GlooLibrary {
 public:
  // Ranks of one host find each other through `meeting`, which all of them give. Throws CommError.
  explicit GlooLibrary(Communicator& meeting);
  ~GlooLibrary();
  GlooLibrary(const GlooLibrary&) = delete;
  GlooLibrary& operator=(const GlooLibrary&) = delete;

  // dist.all_gather_into_tensor, dist.reduce_scatter_tensor and dist.all_reduce, waited for. Flat tensors as for
  // Communicator; sums in the tensors' dtype, in gloo's order.
  void all_gather(at::Tensor out, at::Tensor in);
  void reduce_scatter(at::Tensor out, at::Tensor in);
  void all_reduce(at::Tensor inout);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero::cli
