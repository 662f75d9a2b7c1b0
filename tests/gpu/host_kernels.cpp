// Compiled without contraction, as the arithmetic requires.
#include "gpu/host_kernels.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/rules.h"

namespace zero::test {
namespace {

using cuda::Place;
using kernels::Dtype;

std::atomic<int> sum_calls{0}, update_calls{0};

// As kernels.cu cuts a range: quads where all pointers are aligned for them, and single elements.
template <class Body>
int run(const Body& body, std::int64_t numel, bool aligned) {
  std::int64_t i = 0;
  if (aligned)
    for (; i + cuda::kQuad <= numel; i += cuda::kQuad) body.quad(i);
  for (; i < numel; ++i) body.element(i);
  return 0;
}

bool aligned(const void* data, Dtype dtype) {
  return reinterpret_cast<std::uintptr_t>(data) % (dtype == Dtype::F32 ? 16 : 8) == 0;
}

const char* error_text(int) { return "an error of the host's kernels"; }
int device_count(int* count) {
  *count = 1;
  return 0;
}

int sum_parts(Place, void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
              std::int64_t numel) {
  if (num_parts < 1 || num_parts > cuda::kMaxParts) return 1;
  cuda::SumParts body{out, out_dtype, in_dtype, {}};
  body.parts.count = num_parts;
  bool all = aligned(out, out_dtype);
  for (int p = 0; p < num_parts; ++p) {
    body.parts.of[p] = parts[p];
    all = all && aligned(parts[p], in_dtype);
  }
  return run(body, numel, all);
}

int convert(Place place, void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  return sum_parts(place, out, out_dtype, &in, 1, in_dtype, numel);
}

int accumulate(Place, void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  return run(cuda::Accumulate{to, to_dtype, in, in_dtype}, numel, aligned(to, to_dtype) && aligned(in, in_dtype));
}

int scale(Place, void* data, Dtype dtype, float factor, std::int64_t numel) {
  return run(cuda::Scale{data, dtype, factor}, numel, aligned(data, dtype));
}

int sums_of_squares(Place, const cuda::SquaredVector* vectors, int count, double* pieces) {
  ++sum_calls;
  for (const auto* vector = vectors; vector != vectors + count; ++vector) {
    const auto num_pieces = cuda::square_pieces(vector->numel);
    for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
      double sums[cuda::kSquareLanes];
      for (int lane = 0; lane < cuda::kSquareLanes; ++lane)
        sums[lane] = cuda::lane_sum_of_squares(vector->in, vector->dtype, vector->numel, piece, lane);
      for (int width = cuda::kSquareLanes / 2; width > 0; width /= 2)  // what the shuffles of a warp do
        for (int lane = 0; lane < width; ++lane) sums[lane] = cuda::add(sums[lane], sums[lane + width]);
      pieces[piece] = sums[0];
    }
    double total = 0;
    for (std::int64_t piece = 0; piece < num_pieces; ++piece) total = cuda::add(total, pieces[piece]);
    *vector->result = total;
    pieces += num_pieces;
  }
  return 0;
}

int first_non_finite(Place, const void* in, Dtype dtype, std::int64_t numel, std::int64_t* result) {
  *result = -1;
  for (std::int64_t i = numel; i-- > 0;)
    if (cuda::non_finite(in, dtype, i)) *result = i;
  return 0;
}

int update(Place, const kernels::UpdateConstants* constants, float factor, const kernels::SizedRange* ranges,
           int count) {
  ++update_calls;
  return cuda::with_rule(*constants, [&](const auto& algorithm) {
    for (const auto* sized = ranges; sized != ranges + count; ++sized) {
      const auto& range = sized->range;
      bool all = aligned(range.master, range.master_dtype) && aligned(range.gradient, range.gradient_dtype) &&
                 (range.parameter == nullptr || aligned(range.parameter, range.parameter_dtype));
      for (const auto* slot : range.slots) all = all && aligned(slot, range.slot_dtype);
      using Algorithm = std::decay_t<decltype(algorithm)>;
      if (range.is_fp32())
        run(cuda::Update<Algorithm>{algorithm, range, factor}, sized->numel, all);
      else
        run(cuda::Update<cuda::Narrow<Algorithm>>{cuda::Narrow<Algorithm>(algorithm), range, factor}, sized->numel, all);
    }
    return 0;
  });
}

int update_by_norm(Place place, const kernels::UpdateConstants* constants, const cuda::StepNorm* norm,
                   const kernels::SizedRange* ranges, int count) {
  if (norm->skip != 0) return 0;
  return update(place, constants, norm->factor, ranges, count);
}

int add_sums(Place, const double* sums, const int* order, int count, std::uint64_t tag, double* out) {
  cuda::OrderedSum sum;
  for (int k = 0; k < count; ++k) sum.next(order[k], order[k] >= 0 ? sums[order[k]] : 0);
  out[0] = sum.total;
  out[1] = cuda::double_of(tag);
  return 0;
}

int step_norm(Place, const double* parts, int num_parts, cuda::NormSettings settings, cuda::StepNorm* norm) {
  *norm = cuda::step_norm_of(parts, num_parts, settings);
  return 0;
}

int allocate_host(int, std::size_t bytes, void** data) {
  *data = std::malloc(bytes);
  return *data == nullptr ? 1 : 0;
}
int free_host(int, void* data, std::size_t) {
  std::free(data);
  return 0;
}

}  // namespace

const cuda::Interface& host_kernels() {
  static constexpr cuda::Interface kTable{cuda::kInterfaceVersion,
                                          &error_text,
                                          &device_count,
                                          &sum_parts,
                                          &convert,
                                          &accumulate,
                                          &scale,
                                          &sums_of_squares,
                                          &first_non_finite,
                                          &update,
                                          &update_by_norm,
                                          &add_sums,
                                          &step_norm,
                                          &allocate_host,
                                          &free_host};
  return kTable;
}

HostKernelCalls host_kernel_calls() { return {sum_calls, update_calls}; }

}  // namespace zero::test
