// Inputs of checkpointed segments, divided over the tensor-parallel ranks, which have equal inputs: ZeRO-R's P_a
// (arXiv:1910.02054, section 6.1). Each rank keeps 1/t of the bytes, and an all-gather brings the whole back.
#pragma once
#include <zero/work.h>

#include <functional>
#include <memory>

#include "activations/offload_backend.h"

namespace zero::activations {

// The ranks that have equal inputs.
struct InputPartition {
  int rank = 0, ranks = 1;
  // [collective] out: ranks * in.numel() bytes.
  std::function<std::shared_ptr<Work>(at::Tensor out, const at::Tensor& in)> all_gather;
  // [collective] ConfigError if the bytes differ between ranks.
  std::function<void(const at::Tensor& bytes)> compare;
  // Whether a segment that begins now has parts as inputs, which are kept as they are.
  std::function<bool()> inside_split_region;
};

class PartitionedBackend final : public OffloadBackend {
 public:
  // inner: where this rank's part is kept; null: on the device.
  PartitionedBackend(InputPartition partition, std::unique_ptr<OffloadBackend> inner)
      : partition_(std::move(partition)), inner_(std::move(inner)) {}
  // compare: the bytes are compared over the ranks first.
  void set_compare(bool compare) { compare_ = compare; }
  std::unique_ptr<OffloadHandle> offload(const at::Tensor& bytes) override;
  bool is_collective() const override { return true; }
  void wait_idle() override {
    if (inner_) inner_->wait_idle();
  }

 private:
  class Held;
  const InputPartition partition_;
  const std::unique_ptr<OffloadBackend> inner_;
  bool compare_ = true;
};

}  // namespace zero::activations
