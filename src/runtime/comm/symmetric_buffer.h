// A flat vector of size() equal shards that every rank reads where they rest: gathering it moves nothing. What a
// transport between processes of one host can give beside its collectives (comm::Group::share). It knows nothing of
// parameters.
//
// [Note: epochs instead of barriers] A rank writes its shard, then publishes it. A reader waits until every rank has
// published as often as itself. Nothing keeps a rank from writing while another still reads: before writing again, all
// ranks must have met after their last read (any exchange between them will do).
#pragma once
#include <ATen/core/Tensor.h>

namespace zero::comm {

class SymmetricBuffer {
 public:
  virtual ~SymmetricBuffer() = default;
  SymmetricBuffer(const SymmetricBuffer&) = delete;
  SymmetricBuffer& operator=(const SymmetricBuffer&) = delete;

  // This rank's elements, uninitialised at first; the only ones it may write.
  const at::Tensor& shard() const { return shard_; }
  // All elements in place, in rank order. A write through it ends the process by a signal.
  const at::Tensor& whole() const { return whole_; }

  // This rank's shard has its new values. All ranks publish equally often.
  virtual void publish() = 0;
  // Returns when every rank has published as often as this one; CommError when one cannot any more. From then on
  // whole() may be read, also after peers have given the vector up, as long as anybody holds whole().
  virtual void wait() = 0;

 protected:
  SymmetricBuffer() = default;
  at::Tensor shard_, whole_;
};

}  // namespace zero::comm
