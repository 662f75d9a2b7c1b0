// The plug-in library libzero_cuda.so: maps elements to GPU threads, and defines the table of launches. The arithmetic
// is in elements.h, shared with the host. All kernels are memory-bound: a thread loads four adjacent elements at once
// if the ranges are aligned, else one. Sums of squares and updates take many vectors in one launch, because a model has
// many small ones; their table is a kernel argument, so it needs no copy to the device.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include "kernels/cuda/launches.h"
#include "kernels/cuda/norm.h"

namespace zero::cuda {
namespace {

// A call that fails leaves its error in the runtime too, where the next function would take it for its own.
cudaError_t take_error(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// RAII guard: restores the caller's current device. If that fails, the next function returns the error.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = take_error(cudaGetDevice(&before_));
    if (status_ == cudaSuccess && before_ != device) {
      status_ = take_error(cudaSetDevice(device));
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

// One warp per piece, one lane per sum; lanes are then added by halves, as in kernels::sum_of_squares. With 12 blocks
// on a multiprocessor a thread has 40 registers, so that all loads of a row are issued before one is used; with the
// compiler's choice of 32 registers it is half of them.
constexpr int kSquareBlocks = 12;
__global__ void __launch_bounds__(kSquareWarps* kSquareLanes, kSquareBlocks)
    square_pieces_kernel(const __grid_constant__ Squares squares) {
  const auto piece = blockIdx.x * kSquareWarps + threadIdx.x / kSquareLanes;
  if (piece >= squares.num_pieces) return;
  const int lane = static_cast<int>(threadIdx.x) % kSquareLanes;
  const auto& task = squares.tasks[task_of(squares.tasks, squares.count, piece)];
  const auto& vector = task.vector;
  double sum = lane_sum_of_squares(vector.in, vector.dtype, vector.numel, piece - task.first_block, lane);
  for (int width = kSquareLanes / 2; width > 0; width /= 2) sum = add(sum, __shfl_down_sync(0xffffffffu, sum, width));
  if (lane == 0) squares.pieces[piece] = sum;
}

// One warp per vector: its first thread adds the pieces in order, the others prefetch.
__global__ void __launch_bounds__(kSquareLanes) add_pieces_kernel(const __grid_constant__ Squares squares) {
  const auto& task = squares.tasks[blockIdx.x];
  const auto end = static_cast<int>(blockIdx.x) + 1 < squares.count ? squares.tasks[blockIdx.x + 1].first_block
                                                                   : squares.num_pieces;
  const auto* const pieces = squares.pieces + task.first_block;
  const std::int64_t count = end - task.first_block;
  const int lane = static_cast<int>(threadIdx.x);
  double total = 0, next = lane < count ? pieces[lane] : 0;
  for (std::int64_t begin = 0; begin < count; begin += kSquareLanes) {
    const double mine = next;
    const auto ahead = begin + kSquareLanes + lane;
    next = ahead < count ? pieces[ahead] : 0;
    // Adding the zeros behind the last piece changes nothing: a sum of squares is not -0.
#pragma unroll
    for (int k = 0; k < kSquareLanes; ++k) total = add(total, __shfl_sync(0xffffffffu, mine, k));
  }
  if (lane == 0) *task.vector.result = total;
}

template <class Algorithm>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Updates<Algorithm> updates) {
  if (updates.norm != nullptr && updates.norm->skip != 0) return;
  const auto& task = updates.tasks[task_of(updates.tasks, updates.count, blockIdx.x)];
  const Update<Algorithm> body{updates.algorithm, task.range,
                               updates.norm != nullptr ? updates.norm->factor : updates.factor};
  const auto numel = task.numel;
  const auto first = static_cast<std::int64_t>(blockIdx.x - task.first_block) * kUpdatedPerBlock;
  const auto end = first + kUpdatedPerBlock < numel ? first + kUpdatedPerBlock : numel;
  if (!task.aligned) {
    for (auto i = first + threadIdx.x; i < end; i += kThreads) body.element(i);
    return;
  }
  for (auto i = first + threadIdx.x * kQuad; i < end; i += kThreads * kQuad) {
    if (i + kQuad <= end) {
      body.quad(i);
    } else {
      // At most three: unrolled, they would need registers that the quads then lack.
#pragma unroll 1
      for (auto k = i; k < end; ++k) body.element(k);
    }
  }
}

// One warp: its lanes read the sums of the next 32 places, which all then add in order.
__global__ void __launch_bounds__(kSquareLanes)
    add_sums_kernel(const double* sums, const __grid_constant__ Order order, std::uint64_t tag, double* out) {
  OrderedSum sum;
  const int lane = static_cast<int>(threadIdx.x);
  for (int begin = 0; begin < order.count; begin += kSquareLanes) {
    const int place = begin + lane < order.count ? order.of[begin + lane] : -1;  // ends of empty groups add nothing
    const double mine = place >= 0 ? sums[place] : 0;
#pragma unroll
    for (int k = 0; k < kSquareLanes; ++k)
      sum.next(__shfl_sync(0xffffffffu, place, k), __shfl_sync(0xffffffffu, mine, k));
  }
  if (lane != 0) return;
  out[0] = sum.total;
  out[1] = double_of(tag);
}

__global__ void step_norm_kernel(const double* parts, int num_parts, NormSettings settings, StepNorm* norm) {
  *norm = step_norm_of(parts, num_parts, settings);
}

// -1 in two's complement is the largest unsigned index, so any index found is smaller.
__global__ void __launch_bounds__(kThreads)
    non_finite_kernel(const void* in, Dtype dtype, std::int64_t numel, std::int64_t* result) {
  const auto i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < numel && non_finite(in, dtype, i))
    atomicMin(reinterpret_cast<unsigned long long*>(result), static_cast<unsigned long long>(i));
}

const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int device_count(int* count) { return take_error(cudaGetDeviceCount(count)); }

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
  return take_error(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream_of(place)));
}

int accumulate(Place place, void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) {
  return run(place, Accumulate{to, to_dtype, in, in_dtype}, numel,
             quad_aligned(to, to_dtype) && quad_aligned(in, in_dtype));
}

int scale(Place place, void* data, Dtype dtype, float factor, std::int64_t numel) {
  if (factor == 1.0f) return cudaSuccess;
  return run(place, Scale{data, dtype, factor}, numel, quad_aligned(data, dtype));
}

int sums_of_squares(Place place, const SquaredVector* vectors, int count, double* pieces) {
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  for (int done = 0; done < count;) {
    Squares squares{0, 0, pieces, {}};
    std::int64_t num_pieces = 0;
    for (; done < count && squares.count < kMaxSquared; ++done) {
      if (vectors[done].numel < 0) return cudaErrorInvalidValue;
      squares.tasks[squares.count++] = {vectors[done], static_cast<unsigned>(num_pieces)};
      num_pieces += square_pieces(vectors[done].numel);
      if (num_pieces > kMostBlocks) return cudaErrorInvalidValue;
    }
    squares.num_pieces = static_cast<unsigned>(num_pieces);
    const auto blocks = (squares.num_pieces + kSquareWarps - 1) / kSquareWarps;
    if (blocks > 0)
      square_pieces_kernel<<<blocks, kSquareWarps * kSquareLanes, 0, stream_of(place)>>>(squares);
    add_pieces_kernel<<<static_cast<unsigned>(squares.count), kSquareLanes, 0, stream_of(place)>>>(squares);
    pieces += num_pieces;
  }
  return cudaGetLastError();
}

int first_non_finite(Place place, const void* in, Dtype dtype, std::int64_t numel, std::int64_t* result) {
  if (numel < 0 || numel > kMostNumel) return cudaErrorInvalidValue;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  const auto cleared = take_error(cudaMemsetAsync(result, 0xff, sizeof *result, stream_of(place)));
  if (cleared != cudaSuccess || numel == 0) return cleared;
  const auto groups = static_cast<unsigned>((numel + kThreads - 1) / kThreads);
  non_finite_kernel<<<groups, kThreads, 0, stream_of(place)>>>(in, dtype, numel, result);
  return cudaGetLastError();
}

bool quad_aligned(const kernels::UpdateRange& range, int num_slots) {
  bool aligned = quad_aligned(range.master, range.master_dtype) && quad_aligned(range.gradient, range.gradient_dtype) &&
                 (range.parameter == nullptr || quad_aligned(range.parameter, range.parameter_dtype));
  for (int slot = 0; slot < num_slots; ++slot) aligned = aligned && quad_aligned(range.slots[slot], range.slot_dtype);
  return aligned;
}

template <class Algorithm>
int launch_updates(const Algorithm& algorithm, Place place, float factor, const StepNorm* norm,
                   const kernels::SizedRange* ranges, int count) {
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  for (int done = 0; done < count;) {
    Updates<Algorithm> updates{algorithm, factor, 0, norm, {}};
    std::int64_t blocks = 0;
    for (; done < count && updates.count < kMaxUpdated; ++done) {
      const auto& [range, numel] = ranges[done];
      if (numel < 0) return cudaErrorInvalidValue;
      if (numel == 0) continue;
      updates.tasks[updates.count++] = {range, numel, static_cast<unsigned>(blocks),
                                        quad_aligned(range, Algorithm::kSlots)};
      blocks += (numel + kUpdatedPerBlock - 1) / kUpdatedPerBlock;
      if (blocks > kMostBlocks) return cudaErrorInvalidValue;
    }
    if (blocks > 0)
      update_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(place)>>>(updates);
  }
  return cudaGetLastError();
}

template <class Algorithm>
int update_by(const Algorithm& algorithm, Place place, float factor, const StepNorm* norm,
              const kernels::SizedRange* ranges, int count) {
  bool fp32 = true;
  for (int i = 0; i < count; ++i) fp32 = fp32 && ranges[i].range.is_fp32();
  return fp32 ? launch_updates(algorithm, place, factor, norm, ranges, count)
              : launch_updates(Narrow<Algorithm>(algorithm), place, factor, norm, ranges, count);
}

int update(Place place, const kernels::UpdateConstants* constants, float factor, const kernels::SizedRange* ranges,
           int count) {
  return with_rule(*constants,
                   [&](const auto& algorithm) { return update_by(algorithm, place, factor, nullptr, ranges, count); });
}

int update_by_norm(Place place, const kernels::UpdateConstants* constants, const StepNorm* norm,
                   const kernels::SizedRange* ranges, int count) {
  return with_rule(*constants,
                   [&](const auto& algorithm) { return update_by(algorithm, place, 0, norm, ranges, count); });
}

int add_sums(Place place, const double* sums, const int* order, int count, std::uint64_t tag, double* out) {
  if (count < 0 || count > kMaxOrder) return cudaErrorInvalidValue;
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  Order places{count, {}};
  for (int k = 0; k < count; ++k) places.of[k] = order[k];
  add_sums_kernel<<<1, kSquareLanes, 0, stream_of(place)>>>(sums, places, tag, out);
  return cudaGetLastError();
}

int step_norm(Place place, const double* parts, int num_parts, NormSettings settings, StepNorm* norm) {
  const OnDevice device(place.device);
  if (device.status() != cudaSuccess) return device.status();
  step_norm_kernel<<<1, 1, 0, stream_of(place)>>>(parts, num_parts, settings, norm);
  return cudaGetLastError();
}

// libtorch's allocator of pinned memory rounds up to a power of two: gigabytes for the states of a large model.
int allocate_host(int device, std::size_t bytes, void** data) {
  const OnDevice current(device);  // else the runtime would open the caller's current device, too
  if (current.status() != cudaSuccess) return current.status();
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
  madvise(pages, bytes, MADV_HUGEPAGE);  // a hint: fewer pages to lock and to translate
  madvise(pages, bytes, MADV_DONTFORK);  // a child must neither copy locked pages nor take them from the parent
  // Mapped: with parameters in host memory the update's kernel writes them.
  const auto status = take_error(cudaHostRegister(pages, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
  if (status != cudaSuccess) {
    munmap(pages, bytes);
    return status;
  }
  *data = pages;
  return cudaSuccess;
}

int free_host(int device, void* data, std::size_t bytes) {
  const OnDevice current(device);
  const auto status = take_error(cudaHostUnregister(data));
  munmap(data, bytes);
  return status;
}

constexpr Interface kInterface{kInterfaceVersion, &error_text, &device_count,    &sum_parts,        &convert,
                               &accumulate,       &scale,      &sums_of_squares, &first_non_finite, &update,
                               &update_by_norm,   &add_sums,   &step_norm,        &allocate_host,    &free_host};

}  // namespace
}  // namespace zero::cuda

extern "C" __attribute__((visibility("default"))) const zero::cuda::Interface* zero_cuda_interface() {
  return &zero::cuda::kInterface;
}
