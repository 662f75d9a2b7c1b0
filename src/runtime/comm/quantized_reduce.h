// A reduce-scatter whose parts travel as blockwise integers (ZeRO++'s qgZ, arXiv:2306.10209): each rank quantises what
// it has for the others, and adds what it receives to its own part, which is never rounded to integers. One hop; who
// shares memory sums first and quantises once.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/gloo/messenger.h"
#include "kernels/quantize.h"

namespace zero::comm {

class QuantizedSum {
 public:
  // Among `ranks`, of which this one is number `own`; `numel` elements for each.
  QuantizedSum(std::vector<int> ranks, std::size_t own, std::int64_t numel, int bits);

  // parts[i]: what this rank has for ranks[i]. Posts the messages.
  void post(MessageWork& work, const std::vector<const void*>& parts, kernels::Dtype dtype);
  // Once they are through: out = own part + the others', in fp32 in the order of the ranks, rounded once. `own` may be
  // `out`.
  void finish(void* out, kernels::Dtype out_dtype, const void* own, kernels::Dtype own_dtype) const;

 private:
  std::vector<int> ranks_;
  std::size_t own_;
  std::int64_t numel_;
  int bits_;
  at::Tensor sent_, received_;  // a row of bytes for each rank
};

}  // namespace zero::comm
