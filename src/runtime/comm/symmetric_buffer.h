// A flat vector of size() equal shards that every rank reads in place, so that gathering it moves no data. Provided by
// transports between processes of one host (comm::Group::share).
//
// [Note: epochs instead of barriers] A rank writes its shard, then publishes it. A reader waits until every rank has
// published as often as itself. Writers are not blocked by readers: before a rank writes again, all ranks must have
// passed a barrier after their last read. Any all_gather_bytes() between them counts as one.
#pragma once
#include <ATen/core/Tensor.h>

namespace zero::comm {

class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;
  SymmetricBuffer(const SymmetricBuffer&) = delete;
  SymmetricBuffer& operator=(const SymmetricBuffer&) = delete;

  // This rank's shard, initially uninitialized; the only part that it may write.
  const at::Tensor& shard() const { return shard_; }
  // All shards in rank order. The mapping is read-only: a write ends the process with a signal.
  const at::Tensor& whole() const { return whole_; }

  // Announces new values of this rank's shard. All ranks publish equally often.
  virtual void publish() = 0;
  // Blocks until every rank has published as often as this one; CommError if one no longer can. Then whole() may be
  // read, also after peers have freed the vector, while any reference to whole() exists.
  virtual void wait() = 0;

 protected:
  SymmetricBuffer() = default;
  at::Tensor shard_, whole_;
};

}  // namespace zero::comm
