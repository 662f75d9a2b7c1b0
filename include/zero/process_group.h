// A Communicator over an existing c10d process group, of torch's C++ or Python API, Megatron, or another launcher. This
// header includes c10d; zero.h does not include it.
//
//   auto comm = zero::Communicator::from_process_group(process_group);
//
// Sums are taken by libzero, in fp32 in rank order, bit-identical to every other transport; the process group only
// moves data.
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

// Collective, blocking. `group` is an intrusive_ptr to a c10d::ProcessGroup, whose backend for CPU tensors is used, or
// to a c10d::Backend that supports allgather, alltoall and broadcast of CPU tensors (gloo, mpi). Do not use the group
// elsewhere while the Communicator has operations in flight. transport() is "c10d".
//
// The timeout is 30 minutes until set_timeout(). The reason given to abort() reaches peers through the group's store.
// Without a store they see a closed connection or a timeout. CommError::rank() is -1 if the failed rank is unknown.
// Ranks that make different calls are not detected. split() makes a gloo group of those ranks, which meet at the store
// of this group's backend and leave their addresses there. For other backends it throws; create a process group of
// those ranks instead.
//
// Sets SIGPIPE to be ignored if the program left it at its default: c10d's gloo would end the process when it writes to
// a peer that has died.
//
// Throws ConfigError for a null group and for one without a CPU backend ("nccl" alone), CommError if a peer does not
// respond.
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
