// What every implementation of the element-wise kernels must give: the bits of kernels/elementwise.h and of
// kernels/update_simd.h on this CPU, for every dtype, length and alignment, special values included. The host test
// runs the GPU's arithmetic compiled for the CPU through it, the device test the plug-in.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/cuda/interface.h"
#include "kernels/elementwise.h"
#include "kernels/update_simd.h"

namespace zero::test {

// The kernels of kernels/cuda/interface.h on host memory, finished at the return.
class Kernels {
 public:
  using Dtype = kernels::Dtype;
  virtual ~Kernels() = default;
  virtual void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
                         std::int64_t numel) = 0;
  virtual void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) = 0;
  virtual void accumulate(void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) = 0;
  virtual void scale(void* data, Dtype dtype, float factor, std::int64_t numel) = 0;
  struct Vector {
    const void* in;
    Dtype dtype;
    std::int64_t numel;
  };
  virtual std::vector<double> sums_of_squares(const std::vector<Vector>& vectors) = 0;
  virtual std::int64_t first_non_finite(const void* in, Dtype dtype, std::int64_t numel) = 0;
  virtual void update(const kernels::UpdateConstants& constants, float factor,
                      const std::vector<kernels::SizedRange>& ranges) = 0;
  virtual void update_by_norm(const kernels::UpdateConstants& constants, const cuda::StepNorm& norm,
                              const std::vector<kernels::SizedRange>& ranges) = 0;
  virtual std::vector<double> add_sums(const std::vector<double>& sums, const std::vector<int>& order,
                                       std::uint64_t tag) = 0;
  virtual cuda::StepNorm step_norm(const std::vector<double>& parts, const cuda::NormSettings& settings) = 0;
};

void check_conversions(Kernels& kernels);
void check_sums(Kernels& kernels);
void check_scaling(Kernels& kernels);
void check_square_sums(Kernels& kernels);
void check_non_finite(Kernels& kernels);
void check_updates(Kernels& kernels);
void check_norms(Kernels& kernels);

}  // namespace zero::test
