// The checks' kernels on a GPU. Memory is how an argument gets there:
//   Memory(const void* host, std::size_t bytes)   copies it, at the same offset from an address that divides by 16;
//                                                 null stays null
//   data(), bring_back()                          in device memory; back to the host
//   static table(), static done(int status)       the plug-in; the status of a launch, thrown if it is an error
#pragma once
#include <cstdint>
#include <vector>

#include "gpu/kernel_checks.h"
#include "kernels/cuda/interface.h"

namespace zero::test {

template <class Memory>
class DeviceKernels final : public Kernels {
 public:
  void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
                 std::int64_t numel) override {
    const Memory to(out, bytes(out_dtype, numel));
    std::vector<Memory> from;
    std::vector<const void*> pointers;
    for (int p = 0; p < num_parts; ++p) {
      from.emplace_back(parts[p], bytes(in_dtype, numel));
      pointers.push_back(from.back().data());
    }
    Memory::done(Memory::table().sum_parts(kPlace, to.data(), out_dtype, pointers.data(), num_parts, in_dtype, numel));
    to.bring_back();
  }
  void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    const Memory to(out, bytes(out_dtype, numel)), from(in, bytes(in_dtype, numel));
    Memory::done(Memory::table().convert(kPlace, to.data(), out_dtype, from.data(), in_dtype, numel));
    to.bring_back();
  }
  void accumulate(void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    const Memory sum(to, bytes(to_dtype, numel)), from(in, bytes(in_dtype, numel));
    Memory::done(Memory::table().accumulate(kPlace, sum.data(), to_dtype, from.data(), in_dtype, numel));
    sum.bring_back();
  }
  void scale(void* data, Dtype dtype, float factor, std::int64_t numel) override {
    const Memory values(data, bytes(dtype, numel));
    Memory::done(Memory::table().scale(kPlace, values.data(), dtype, factor, numel));
    values.bring_back();
  }
  std::vector<double> sums_of_squares(const std::vector<Vector>& vectors) override {
    std::vector<double> results(vectors.size(), -1);
    const Memory there(results.data(), results.size() * sizeof(double));
    std::vector<Memory> copies;
    std::vector<cuda::SquaredVector> all;
    std::int64_t num_pieces = 0;
    for (const auto& [in, dtype, numel] : vectors) {
      copies.emplace_back(in, bytes(dtype, numel));
      all.push_back({copies.back().data(), dtype, numel, static_cast<double*>(there.data()) + all.size()});
      num_pieces += cuda::square_pieces(numel);
    }
    const std::vector<double> scratch(static_cast<std::size_t>(num_pieces) + 1);
    const Memory pieces(scratch.data(), scratch.size() * sizeof(double));
    Memory::done(Memory::table().sums_of_squares(kPlace, all.data(), static_cast<int>(all.size()),
                                                 static_cast<double*>(pieces.data())));
    there.bring_back();
    return results;
  }
  std::int64_t first_non_finite(const void* in, Dtype dtype, std::int64_t numel) override {
    std::int64_t result = 7;
    const Memory from(in, bytes(dtype, numel)), to(&result, sizeof result);
    Memory::done(
        Memory::table().first_non_finite(kPlace, from.data(), dtype, numel, static_cast<std::int64_t*>(to.data())));
    to.bring_back();
    return result;
  }
  void update(const kernels::UpdateConstants& constants, float factor,
              const std::vector<kernels::SizedRange>& ranges) override {
    on_copies(ranges, [&](const kernels::SizedRange* there, int count) {
      return Memory::table().update(kPlace, &constants, factor, there, count);
    });
  }
  void update_by_norm(const kernels::UpdateConstants& constants, const cuda::StepNorm& norm,
                      const std::vector<kernels::SizedRange>& ranges) override {
    const Memory from(&norm, sizeof norm);
    on_copies(ranges, [&](const kernels::SizedRange* there, int count) {
      return Memory::table().update_by_norm(kPlace, &constants, static_cast<const cuda::StepNorm*>(from.data()), there,
                                            count);
    });
  }
  std::vector<double> add_sums(const std::vector<double>& sums, const std::vector<int>& order,
                               std::uint64_t tag) override {
    std::vector<double> out(2, -1);
    const Memory from(sums.data(), sums.size() * sizeof(double)), to(out.data(), out.size() * sizeof(double));
    Memory::done(Memory::table().add_sums(kPlace, static_cast<const double*>(from.data()), order.data(),
                                          static_cast<int>(order.size()), tag, static_cast<double*>(to.data())));
    to.bring_back();
    return out;
  }
  cuda::StepNorm step_norm(const std::vector<double>& parts, const cuda::NormSettings& settings) override {
    cuda::StepNorm norm{-1, -1, -1};
    const Memory from(parts.data(), parts.size() * sizeof(double)), to(&norm, sizeof norm);
    Memory::done(Memory::table().step_norm(kPlace, static_cast<const double*>(from.data()),
                                           static_cast<int>(parts.size() / 2), settings,
                                           static_cast<cuda::StepNorm*>(to.data())));
    to.bring_back();
    return norm;
  }

 private:
  static constexpr cuda::Place kPlace{0, nullptr};
  static std::size_t bytes(Dtype dtype, std::int64_t numel) {
    return static_cast<std::size_t>(numel) * kernels::size_of(dtype);
  }
  template <class Launch>
  static void on_copies(const std::vector<kernels::SizedRange>& ranges, const Launch& launch) {
    std::vector<Memory> copies;
    std::vector<kernels::SizedRange> there;
    const auto copy = [&](const void* host, std::size_t size) { return copies.emplace_back(host, size).data(); };
    for (const auto& [range, numel] : ranges) {
      auto& reached = there.emplace_back(kernels::SizedRange{range, numel}).range;
      reached.master = copy(range.master, bytes(range.master_dtype, numel));
      for (auto& slot : reached.slots) slot = copy(slot, bytes(range.slot_dtype, numel));
      reached.gradient = copy(range.gradient, bytes(range.gradient_dtype, numel));
      reached.parameter = copy(range.parameter, bytes(range.parameter_dtype, numel));
    }
    Memory::done(launch(there.data(), static_cast<int>(there.size())));
    for (const auto& each : copies) each.bring_back();
  }
};

}  // namespace zero::test
