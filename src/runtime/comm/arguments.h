// Argument checks of collectives. A wrong argument throws ConfigError on the rank that passed it before anything is
// sent, so the communicator stays usable.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/types.h>

#include <zero/errors.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/transport.h"

namespace zero::comm {

// The checks of one call. Messages name the operation and the rank.
class Arguments {
 public:
  Arguments(const char* op, const Transport& transport) : op_(op), rank_(transport.rank()), size_(transport.size()) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (condition) return;
    throw ConfigError(
        base::join("[Communicator::", op_, "] got ", base::join(parts...), " (rank ", rank_, "/", size_, ")"));
  }

  void flat(const char* name, const at::Tensor& tensor) const {
    require(tensor.defined(), "an undefined tensor as `", name, "`, expected a flat tensor");
    require(tensor.layout() == at::kStrided && tensor.dim() == 1 && tensor.is_contiguous(), "`", name, "` of shape ",
            tensor.sizes(), tensor.layout() == at::kStrided && !tensor.is_contiguous() ? " that is not contiguous" : "",
            ", expected a flat contiguous tensor. Hint: pass tensor.contiguous().view({-1})");
    require(tensor.is_cpu() || tensor.is_cuda(), "`", name, "` on ", tensor.device().str(),
            ", expected CPU or CUDA memory");
    const auto end = static_cast<std::size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
    require(tensor.numel() == 0 || tensor.storage().nbytes() >= end, "`", name, "` of ", tensor.numel(),
            " elements whose storage holds ", tensor.storage().nbytes(), " bytes, expected ", end,
            " or more. Hint: the memory was released; gather it first");
  }

  void matching(const at::Tensor& out, const at::Tensor& in) const {
    flat("out", out);
    flat("in", in);
    require(out.scalar_type() == in.scalar_type(), "`in` of dtype ", dtype_text(in.scalar_type()), ", expected ",
            dtype_text(out.scalar_type()), " as `out`");
    require(out.device() == in.device(), "`in` on ", in.device().str(), ", expected ", out.device().str(), " as `out`");
  }

  void sums(const at::Tensor& tensor) const {
    require(summable(tensor.scalar_type()), "dtype ", dtype_text(tensor.scalar_type()),
            ", expected fp32, bf16 or fp16");
  }

  // `numels` are the sizes of the parts of `tensor`, by rank.
  void parts(const std::string& name, const at::Tensor& tensor, const std::vector<std::int64_t>& numels) const {
    require(numels.size() == static_cast<std::size_t>(size_), numels.size(), " numbers in `", name,
            "_numels`, expected ", size_, ", one per rank");
    std::int64_t sum = 0;
    for (const auto numel : numels) {
      require(numel >= 0, numel, " elements in `", name, "_numels`, expected 0 or more");
      sum += numel;
    }
    require(tensor.numel() == sum, "`", name, "` of ", tensor.numel(), " elements, expected ", sum, ", the sum of `",
            name, "_numels`");
  }

  // `part` does not overlap `whole`, or is exactly this rank's part of it.
  void apart_or_own(const at::Tensor& whole, const at::Tensor& part, bool own_allowed) const {
    if (whole.numel() == 0 || part.numel() == 0) return;
    const auto* w = static_cast<const char*>(whole.const_data_ptr());
    const auto* p = static_cast<const char*>(part.const_data_ptr());
    if (std::less_equal<>()(w + whole.nbytes(), p) || std::less_equal<>()(p + part.nbytes(), w)) return;
    require(own_allowed && p == w + part.nbytes() * static_cast<std::size_t>(rank_),
            "`in` and `out` that overlap, expected ",
            own_allowed ? "separate memory or this rank's own part of the larger one" : "separate memory");
  }

 private:
  const char* op_;
  int rank_, size_;
};

}  // namespace zero::comm
