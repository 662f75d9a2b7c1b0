// Element-wise operations and transfers of the step program, by the host's or the GPU's kernels.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "engine/device_norm.h"
#include "engine/torch_buffers.h"

namespace zero::engine {

// The device streams for the step program's lanes.
struct Lanes {
  explicit Lanes(at::Device device)
      : unshard(device, /*high_priority=*/true),
        reduce(device, /*high_priority=*/true),
        offload(device, /*high_priority=*/false) {}
  gpu::SideStream unshard, reduce, offload;
};

class TorchTensorOps final : public step::TensorOps {
 public:
  // All references must outlive it.
  TorchTensorOps(TorchBuffers& buffers, const Lanes& lanes, const std::vector<step::GroupFacts>& groups);

  void copy(step::View to, step::View from, step::Lane lane) override;
  void accumulate(step::View to, step::View from) override;
  void scale(step::View data, float factor) override;
  void fill(step::View data, float value) override;
  void quantize(step::View to, step::View from, int bits) override;
  void dequantize(step::View to, step::View from, int bits) override;
  void begin_squares(int group) override;
  void read_squared() override;
  void square(int group, int slot, step::View values, std::int64_t offset) override;
  double sum_of_squares(int group) override;
  bool begin_norm(const step::NormRequest& request) override;
  double end_norm() override;
  step::WorkPtr read(step::View to, step::View file) override;
  step::WorkPtr write(step::View file, step::View from) override;

  bool squares_on_device() const { return device_sums_ != nullptr; }
  // How ranks combine their norms on the device; without it the host waits for the sums of each step.
  struct DeviceNorms {
    int ranks = 1;
    DeviceNorm::Gather gather;
    std::function<std::uint64_t()> tag;                               // of what must be equal on all ranks
    std::function<void(const std::vector<DeviceNorm::Part>&)> check;  // throws if they do not
  };
  void combine_norms(DeviceNorms how);
  const cuda::StepNorm* norm() const { return norm_->get(); }
  // Stores a sum that was computed on the host.
  void set_square(int group, int slot, double sum);

 private:
  void copy_by_file(step::View to, step::View from);
  void send_to_host(step::View to, step::View from);
  void forget_oldest();
  void release_copied();
  void order_after_sent_copies();

  struct Square {
    double sum = 0;
    int on_device = -1;  // index in device_sums_
  };
  TorchBuffers& buffers_;
  const Lanes& lanes_;
  std::map<int, std::map<int, Square>> squares_;  // by group and slot
  std::unique_ptr<DeviceSums> device_sums_;
  std::vector<int> first_sum_;  // in device_sums_, by group
  int most_in_order_ = 0;       // sums and ends of groups
  bool fetched_ = false;
  DeviceNorms how_;
  std::unique_ptr<DeviceNorm> norm_;
  // Device memory that the offload stream is reading, oldest first.
  struct Sent {
    gpu::Mark mark;
    at::Tensor source;
    std::int64_t bytes;  // that would be free otherwise
  };
  std::deque<Sent> sent_;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace zero::engine
