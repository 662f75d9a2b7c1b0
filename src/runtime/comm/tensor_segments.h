// A flat vector in several segments of memory, for example gradients as backward leaves them. It is reduced in place,
// without a copy into one buffer, by transports between processes of one host (comm::Group::peer_reduce_scatter).
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace zero::comm {

// Elements [begin, begin + data.numel()) of the vector. data: flat, contiguous, in memory from Communicator::allocate.
struct TensorSegment {
  std::int64_t begin;
  at::Tensor data;
};

// The sum over ranks of a vector of size() * shard_numel elements, in fp32 in rank order, rounded once.
struct PeerReduce {
  // Ascending and disjoint; the same ranges on every rank. Elements between the segments are not reduced.
  std::vector<TensorSegment> vector;
  std::int64_t shard_numel = 0;
  // Receives this rank's part of the sum, shard_numel elements; must not overlap the vector. Undefined: the sum is
  // written into the vector.
  at::Tensor out;
  // Also writes the other ranks' parts into the vector; `out` is undefined.
  bool to_all = false;
  // Called whenever more of this rank's part is complete, in order: elements [begin, end) of the shard. begin is a
  // multiple of kSummedNumel, and so is every end except the last.
  std::function<void(std::int64_t begin, std::int64_t end)> summed;
};
constexpr std::int64_t kSummedNumel = 65536;

}  // namespace zero::comm
