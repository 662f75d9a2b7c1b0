// The plug-in library libzero_cuda.so: maps elements to GPU threads, and defines the table of launches. The arithmetic
// is in elements.h, shared with the host. All kernels are memory-bound: a thread loads four adjacent elements at once
// if the ranges are aligned, else one.
#include <cuda_runtime.h>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/interface.h"
#include "kernels/cuda/rules.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;
// cudaLaunchKernel accepts up to 2^31 - 1 blocks.
constexpr std::int64_t kMostNumel = (std::int64_t{1} << 31) * kThreads - kThreads;

// RAII guard: restores the caller's current device.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = cudaGetDevice(&before_);
    if (status_ == cudaSuccess && before_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
  cudaError_t status_;
  int before_ = 0;
  bool changed_ = false;
};

cudaStream_t stream_of(Place place) { return static_cast<cudaStream_t>(place.stream); }

bool quad_aligned(const void* data, Dtype dtype) {
  return reinterpret_cast<std::uintptr_t>(data) % (dtype == Dtype::F32 ? 16 : 8) == 0;
}

template <class Body>
__global__ void __launch_bounds__(kThreads) elements_kernel(const __grid_constant__ Body body, std::int64_t numel) {
  const auto i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel) body.element(i);
}

template <class Body>
__global__ void __launch_bounds__(kThreads) quads_kernel(const __grid_constant__ Body body, std::int64_t numel) {
  const auto begin = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kQuad;
  if (begin + kQuad <= numel) {
    body.quad(begin);
  } else {
    for (auto i = begin; i < numel; ++i) body.element(i);
  }
}

template <class Body>
int run(Place place, const Body& body, std::int64_t numel, bool aligned) {
  if (numel <= 0) return numel == 0 ? cudaSuccess : cudaErrorInvalidValue;
  if (numel > kMostNumel) return cudaErrorInvalidValue;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  const std::int64_t per_group = aligned ? kThreads * kQuad : kThreads;
  const auto groups = static_cast<unsigned>((numel + per_group - 1) / per_group);
  if (aligned) {
    quads_kernel<<<groups, kThreads, 0, stream_of(place)>>>(body, numel);
  } else {
    elements_kernel<<<groups, kThreads, 0, stream_of(place)>>>(body, numel);
  }
  return cudaGetLastError();
}

// One warp per piece, one lane per sum; lanes are then added by halves, as in kernels::sum_of_squares.
__global__ void __launch_bounds__(kSquareLanes)
    square_pieces_kernel(const void* in, Dtype dtype, std::int64_t numel, double* pieces) {
  double sum = lane_sum_of_squares(in, dtype, numel, blockIdx.x * kSquarePiece, static_cast<int>(threadIdx.x));
  for (int width = kSquareLanes / 2; width > 0; width /= 2) sum = add(sum, __shfl_down_sync(0xffffffffu, sum, width));
  if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

// One thread adds the pieces in order; its warp prefetches.
__global__ void __launch_bounds__(kSquareLanes)
    add_pieces_kernel(const double* pieces, std::int64_t count, double* result) {
  const int lane = static_cast<int>(threadIdx.x);
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kSquareLanes) {
    const double mine = begin + lane < count ? pieces[begin + lane] : 0;
    const int here = count - begin < kSquareLanes ? static_cast<int>(count - begin) : kSquareLanes;
    for (int k = 0; k < here; ++k) total = add(total, __shfl_sync(0xffffffffu, mine, k));
  }
  if (lane == 0) *result = total;
}

// -1 in two's complement is the largest unsigned index, so any index found is smaller.
__global__ void __launch_bounds__(kThreads)
    non_finite_kernel(const void* in, Dtype dtype, std::int64_t numel, std::int64_t* result) {
  const auto i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel && non_finite(in, dtype, i))
    atomicMin(reinterpret_cast<unsigned long long*>(result), static_cast<unsigned long long>(i));
}

const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int device_count(int* count) { return cudaGetDeviceCount(count); }

int sum_parts(Place place, void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
              std::int64_t numel) {
  if (num_parts < 1 || num_parts > kMaxParts) return cudaErrorInvalidValue;
  SumParts body{out, out_dtype, in_dtype, {}};
  body.parts.count = num_parts;
  bool aligned = quad_aligned(out, out_dtype);
  for (int p = 0; p < num_parts; ++p) {
    body.parts.of[p] = parts[p];
    aligned = aligned && quad_aligned(parts[p], in_dtype);
  }
  return run(place, body, numel, aligned);
}

int convert(Place place, void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  if (out_dtype != in_dtype) return sum_parts(place, out, out_dtype, &in, 1, in_dtype, numel);
  if (out == in || numel <= 0) return numel < 0 ? cudaErrorInvalidValue : cudaSuccess;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  const std::size_t bytes = static_cast<std::size_t>(numel) * (in_dtype == Dtype::F32 ? 4 : 2);
  return cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream_of(place));
}

int accumulate(Place place, void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  return run(place, Accumulate{to, to_dtype, in, in_dtype}, numel,
             quad_aligned(to, to_dtype) && quad_aligned(in, in_dtype));
}

int scale(Place place, void* data, Dtype dtype, float factor, std::int64_t numel) {
  if (factor == 1.0f) return cudaSuccess;
  return run(place, Scale{data, dtype, factor}, numel, quad_aligned(data, dtype));
}

int sum_of_squares(Place place, const void* in, Dtype dtype, std::int64_t numel, double* pieces, double* result) {
  if (numel < 0) return cudaErrorInvalidValue;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  const auto count = square_pieces(numel);
  if (count > 0)
    square_pieces_kernel<<<static_cast<unsigned>(count), kSquareLanes, 0, stream_of(place)>>>(in, dtype, numel, pieces);
  add_pieces_kernel<<<1, kSquareLanes, 0, stream_of(place)>>>(pieces, count, result);
  return cudaGetLastError();
}

int first_non_finite(Place place, const void* in, Dtype dtype, std::int64_t numel, std::int64_t* result) {
  if (numel < 0 || numel > kMostNumel) return cudaErrorInvalidValue;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  const auto cleared = cudaMemsetAsync(result, 0xff, sizeof *result, stream_of(place));
  if (cleared != cudaSuccess || numel == 0) return cleared;
  const auto groups = static_cast<unsigned>((numel + kThreads - 1) / kThreads);
  non_finite_kernel<<<groups, kThreads, 0, stream_of(place)>>>(in, dtype, numel, result);
  return cudaGetLastError();
}

int update(Place place, const kernels::UpdateConstants* constants, const kernels::UpdateRange* range, float factor,
           std::int64_t numel) {
  return with_rule(*constants, *range, factor, [&](const auto& body) {
    using Body = std::decay_t<decltype(body)>;
    bool aligned = quad_aligned(range->master, Dtype::F32) && quad_aligned(range->gradient, range->gradient_dtype) &&
                   (range->parameter == nullptr || quad_aligned(range->parameter, range->parameter_dtype));
    for (int slot = 0; slot < decltype(Body::algorithm)::kSlots; ++slot)
      aligned = aligned && quad_aligned(range->slots[slot], Dtype::F32);
    return run(place, body, numel, aligned);
  });
}

constexpr Interface kInterface{kInterfaceVersion, &error_text, &device_count,   &sum_parts,        &convert,
                               &accumulate,       &scale,      &sum_of_squares, &first_non_finite, &update};

}  // namespace
}  // namespace zero::cuda

extern "C" __attribute__((visibility("default"))) const zero::cuda::Interface* zero_cuda_interface() {
  return &zero::cuda::kInterface;
}
