// A Communicator over a c10d process group that the program has already: of torch's C++ or Python, of Megatron, of a
// launcher of its own. This header needs c10d's; zero.h does not include it.
//
//   auto comm = zero::Communicator::from_process_group(process_group);
//
// Sums are taken here, in fp32 in rank order, so they have the bits of every other transport; the group moves parts.
#pragma once
#include <memory>
#include <type_traits>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <zero/communicator.h>
#include <zero/export.h>

namespace zero {
namespace comm {
ZERO_API std::shared_ptr<Communicator> over_backend(c10::intrusive_ptr<c10d::Backend> backend,
                                                    c10::intrusive_ptr<c10d::Store> store);
ZERO_API std::shared_ptr<Communicator> over_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
}  // namespace comm

// Collective, blocking. `group`: an intrusive_ptr to a c10d::ProcessGroup, whose backend for CPU tensors is used, or to
// a c10d::Backend that has allgather, alltoall and broadcast for them (gloo, mpi). Nothing else may use the group while
// the Communicator has operations in flight. transport() is "c10d".
//
// The longest wait is 30 minutes until set_timeout(). A reason given to abort() travels over the group's store, if it
// has one; without it the peers see a broken connection, or the end of their time. Who failed is not always known: then
// CommError::rank() is -1. Ranks that make different calls are not noticed. split() is refused: make a process group of
// those ranks instead.
//
// ConfigError for no group, and for one that moves no CPU tensors ("nccl" alone); CommError where a peer does not come.
template <class Pointer>
std::shared_ptr<Communicator> Communicator::from_process_group(const Pointer& group) {
  using Group = std::remove_cvref_t<decltype(*group)>;
  if constexpr (std::is_base_of_v<c10d::ProcessGroup, Group>) {
    return comm::over_process_group(group);
  } else {
    return comm::over_backend(group, {});
  }
}

}  // namespace zero
