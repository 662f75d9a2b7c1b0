// How the whole of a group's parameters comes together on this rank, in the ways ZeRO++ (arXiv:2306.10209) knows: from
// all ranks; from all ranks as blockwise integers (qwZ); and, once it has, from a second shard that the neighbours on
// this host keep until the parameters change (hpZ). Whose memory the whole is, and when it is needed, is the group's.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "engine/tensor_pool.h"

namespace zero::engine {

class ShardGather {
 public:
  struct Ways {
    std::string of;  // whose parameters
    comm::Group* comm;
    comm::Group* neighbours;   // null: no second shard
    int bits;                  // 8: as integers; 0: as they are
    engine::TensorPool* pool;  // of integers on their way
  };
  // `numel` elements of the whole. The second shard is allocated here: second_bytes().
  ShardGather(const Ways& ways, std::int64_t numel, at::ScalarType dtype);

  // Fills `whole` from this rank's `shard` and the others'; both stay as they are until the Work is done, and so does
  // this object. exact: never by way of integers.
  std::shared_ptr<Work> begin(const at::Tensor& whole, const at::Tensor& shard, bool exact = false);
  bool lossy() const { return ways_.bits != 0; }
  void set_bits(int bits) {  // of gathers to come
    ways_.bits = bits;
    forget();
  }
  // The shards have new values: the second ones are void. All ranks call it equally often.
  void forget() { kept_ = false; }

  std::int64_t second_bytes() const;

 private:
  class Finish;
  at::Tensor second_part(const at::Tensor& whole) const;

  Ways ways_;
  at::Tensor second_;  // this rank's part of the whole among its neighbours
  bool kept_ = false;
};

}  // namespace zero::engine
