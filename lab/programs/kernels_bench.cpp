// Speed of the element-wise kernels compared with libtorch's, in one process. Every round runs each variant once, so
// that slow phases of the machine affect all variants; medians are shown. The work is memory bound, so GB/s counts the
// minimum bytes of one pass. The update is here in several kinds of pages; `zero bench optimizer` compares it with
// libtorch's.
//
//   kernels_bench [elements=33554432] [threads=all] [rounds=15]
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <omp.h>
#include <sys/mman.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "kernels/blocks8.h"
#include "kernels/elementwise.h"
#include "kernels/update_simd.h"

namespace {

using zero::kernels::Dtype;
using zero::kernels::UpdateRange;

struct Variant {
  const char* name;
  double bytes;  // per element
  std::function<void()> run;
  const char* baseline = nullptr;
  std::vector<double> seconds = {};
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

// AdamW with OpenMP threads.
void update_parallel(const UpdateRange& range, std::int64_t numel) {
  const zero::kernels::UpdateConstants constants{.rule = zero::kernels::Rule::AdamDecoupled,
                                                 .keep = 0.999f,
                                                 .beta1 = 0.9f,
                                                 .beta2 = 0.999f,
                                                 .new1 = 0.1f,
                                                 .new2 = 0.001f,
                                                 .root2 = 1,
                                                 .eps = 1e-8f,
                                                 .negative_step = -1e-5f};
  const std::int64_t part = std::int64_t{1} << 16;
  const auto update = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += part)
      zero::kernels::update_range(constants, range, 1, at, std::min(end, at + part));
  };
  zero::kernels::parallel_ranges(numel, update, 0);
}

// Masters and moments of fewer bits, in small pages.
class Narrow {
 public:
  Narrow(std::int64_t numel, Dtype master, int slot_bits, bool stochastic) : numel_(numel) {
    range_.master_dtype = master;
    range_.slots_in_blocks = slot_bits == 8;
    range_.slot_dtype = slot_bits == 16 ? Dtype::BF16 : Dtype::F32;
    range_.key = stochastic ? 12345 : 0;
    const auto bytes = [&](Dtype dtype) { return static_cast<std::size_t>(numel) * zero::kernels::size_of(dtype); };
    const auto slot_bytes =
        slot_bits == 8 ? static_cast<std::size_t>(zero::kernels::state_block_bytes(numel)) : bytes(range_.slot_dtype);
    range_.master = pages(bytes(master));
    for (int k = 0; k < 2; ++k) range_.slots[k] = pages(slot_bytes);
  }
  void update(const float* gradient) {
    range_.gradient = gradient;
    update_parallel(range_, numel_);
  }

 private:
  // Until the program ends.
  static void* pages(std::size_t bytes) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    return memory;
  }
  std::int64_t numel_;
  UpdateRange range_{};
};

// Masters and moments of AdamW in pages of one kind: of the process alone, or of a memory file, as ranks that are to
// leave their states to a successor would need; small, or large if the kernel gives them.
class States {
 public:
  States(std::int64_t numel, bool in_file, bool large)
      : numel_(numel), bytes_((static_cast<std::size_t>(numel) * sizeof(float) + kLarge - 1) / kLarge * kLarge) {
    const int fd = in_file ? memfd_create("states", MFD_CLOEXEC) : -1;
    if (in_file && (fd < 0 || ftruncate(fd, static_cast<off_t>(3 * bytes_ + kLarge)) != 0)) fail("memfd_create");
    memory_ = mmap(nullptr, 3 * bytes_ + kLarge, PROT_READ | PROT_WRITE,
                   in_file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (memory_ == MAP_FAILED) fail("mmap");
    if (fd >= 0) close(fd);
    madvise(memory_, 3 * bytes_ + kLarge, large ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    auto* begin = static_cast<char*>(memory_);
    begin += (kLarge - reinterpret_cast<std::uintptr_t>(begin) % kLarge) % kLarge;
    for (std::size_t i = 0; i < 3; ++i) {
      states_[i] = reinterpret_cast<float*>(begin + i * bytes_);
      std::fill(states_[i], states_[i] + numel, 0.5f);
    }
  }
  ~States() { munmap(memory_, 3 * bytes_ + kLarge); }
  States(const States&) = delete;
  States& operator=(const States&) = delete;

  void update(const float* gradient) {
    update_parallel({states_[0], {states_[1], states_[2]}, gradient, Dtype::F32, nullptr, {}}, numel_);
  }

 private:
  [[noreturn]] static void fail(const char* call) {
    std::perror(call);
    std::exit(1);
  }
  static constexpr std::size_t kLarge = std::size_t{2} << 20;
  std::int64_t numel_;
  std::size_t bytes_;
  void* memory_;
  float* states_[3] = {};
};

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t numel = argc > 1 ? std::atoll(argv[1]) : std::int64_t{1} << 25;
  const int threads = argc > 2 ? std::atoi(argv[2]) : omp_get_max_threads(),
            rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  omp_set_num_threads(threads);
  at::set_num_threads(threads);
  at::NoGradGuard no_grad;

  std::vector<at::Tensor> tensors;
  std::vector<const void*> parts;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::randn({numel}).to(at::kBFloat16));
    parts.push_back(tensors.back().const_data_ptr());
  }
  auto sum = torch::zeros({numel}, at::kBFloat16);
  auto buffer = torch::zeros({numel});
  const auto values = torch::randn({numel});
  double squares = 0;
  States small(numel, false, false), large(numel, false, true), file(numel, true, false), large_file(numel, true, true);
  Narrow nearest(numel, Dtype::F32, 16, false), bf16(numel, Dtype::F32, 16, true),
      no_masters(numel, Dtype::BF16, 16, true), blocks(numel, Dtype::F32, 8, false);
  const auto* gradient = values.const_data_ptr<float>();

  std::vector<Variant> variants = {
      {"sum of 4 bf16, torch: casts, 3 adds, cast", 10,
       [&] {
         buffer.copy_(tensors[0]);
         for (int i = 1; i < 4; ++i) buffer.add_(tensors[static_cast<std::size_t>(i)].to(at::kFloat));
         sum.copy_(buffer);
       }},
      {"sum of 4 bf16", 10,
       [&] { zero::kernels::sum_parts(sum.data_ptr(), Dtype::BF16, parts.data(), 4, Dtype::BF16, numel); },
       "sum of 4 bf16, torch: casts, 3 adds, cast"},
      {"square sum fp32, torch: norm in fp32", 4, [&] { squares += values.norm().item<double>(); }},
      {"square sum fp32 in fp64", 4,
       [&] { squares += zero::kernels::sum_of_squares(values.const_data_ptr(), Dtype::F32, numel); },
       "square sum fp32, torch: norm in fp32"},
      {"fp32 to bf16, torch copy", 6, [&] { sum.copy_(values); }},
      {"fp32 to bf16", 6,
       [&] { zero::kernels::convert(sum.data_ptr(), Dtype::BF16, values.const_data_ptr(), Dtype::F32, numel); },
       "fp32 to bf16, torch copy"},
      {"AdamW, states in small pages", 28, [&] { small.update(gradient); }},
      {"AdamW, states in large pages", 28, [&] { large.update(gradient); }, "AdamW, states in small pages"},
      {"AdamW, states in a memory file", 28, [&] { file.update(gradient); }, "AdamW, states in small pages"},
      {"AdamW, states in a memory file, large pages", 28, [&] { large_file.update(gradient); },
       "AdamW, states in small pages"},
      {"AdamW, bf16 states, to the nearest", 20, [&] { nearest.update(gradient); }, "AdamW, states in small pages"},
      {"AdamW, bf16 states", 20, [&] { bf16.update(gradient); }, "AdamW, states in small pages"},
      {"AdamW, bf16 states and masters", 16, [&] { no_masters.update(gradient); }, "AdamW, states in small pages"},
      {"AdamW, 8-bit states", 16.0625, [&] { blocks.update(gradient); }, "AdamW, states in small pages"},
  };
  for (int round = -1; round < rounds; ++round)
    for (auto& variant : variants) {
      const auto start = std::chrono::steady_clock::now();
      variant.run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) variant.seconds.push_back(took.count());
    }

  std::printf("%lld elements, %d threads, median of %d rounds, SIMD target %s\n", static_cast<long long>(numel),
              threads, rounds, zero::kernels::simd_target().c_str());
  std::printf("%-46s %10s %10s %8s %8s\n", "", "ms", "Melem/s", "GB/s", "ratio");
  for (auto& variant : variants) {
    const double seconds = variant.median(), count = static_cast<double>(numel);
    std::printf("%-46s %10.2f %10.0f %8.1f", variant.name, 1e3 * seconds, 1e-6 * count / seconds,
                1e-9 * variant.bytes * count / seconds);
    for (auto& other : variants)
      if (variant.baseline && std::string(variant.baseline) == other.name)
        std::printf(" %8.2f", other.median() / seconds);
    std::printf("\n");
  }
  return squares < 0;  // keeps the sums alive
}
