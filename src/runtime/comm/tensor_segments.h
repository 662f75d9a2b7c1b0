// A flat vector that lies in stretches of memory, as gradients do when backward leaves them: reduced where they are,
// without a copy into one buffer. What a transport between processes of one host can give
// (comm::Group::reduce_scattered).
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
  // Ascending and apart, the same ranges on every rank. What lies between them belongs to nobody.
  std::vector<TensorSegment> vector;
  std::int64_t shard_numel = 0;
  // Where this rank's part of the sum goes, shard_numel elements, apart from the vector; undefined: into the vector
  // itself.
  at::Tensor out;
  // The other ranks' parts go into the vector, too; `out` is undefined.
  bool to_all = false;
  // Called whenever more of this rank's part is done, in order: elements [begin, end) of the shard. begin is a multiple
  // of kSummedNumel, and so is every end but the last.
  std::function<void(std::int64_t begin, std::int64_t end)> summed;
};
constexpr std::int64_t kSummedNumel = 65536;

}  // namespace zero::comm
