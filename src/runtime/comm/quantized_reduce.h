// A reduce-scatter whose parts are sent as blockwise integers (ZeRO++'s qgZ, arXiv:2306.10209). Each rank quantizes
// what it sends and adds what it receives to its own part, which is never quantized. One hop: ranks that share memory
// sum first and quantize once.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/gloo/messenger.h"
#include "kernels/quantize.h"

namespace zero::comm {

class QuantizedSum {
 public:
  // Among `ranks`, of which this one has index `own`; `numel` elements for each.
  QuantizedSum(std::vector<int> ranks, std::size_t own, std::int64_t numel, int bits);

  // parts[i]: this rank's contribution for ranks[i]. Posts the messages.
  void post(MessageWork& work, const std::vector<const void*>& parts, kernels::Dtype dtype);
  // After the messages are complete: out = own part + the others' parts, in fp32 in rank order, rounded once. `own` may
  // be `out`.
  void finish(void* out, kernels::Dtype out_dtype, const void* own, kernels::Dtype own_dtype) const;

 private:
  std::vector<int> ranks_;
  std::size_t own_;
  std::int64_t numel_;
  int bits_;
  at::Tensor sent_, received_;  // one row of bytes per rank
};

}  // namespace zero::comm
