#include "activations/partitioned_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace zero::activations {
namespace {

// Parts begin at multiples of the widest element, so that no element is divided.
constexpr std::int64_t kElement = 8;

}  // namespace

class PartitionedBackend::Held final : public OffloadHandle {
 public:
  Held(const InputPartition& partition, std::unique_ptr<OffloadHandle> inner, at::Tensor part, std::int64_t numel)
      : partition_(partition), inner_(std::move(inner)), part_(std::move(part)), numel_(numel) {}
  ~Held() override {
    // Peers may still read this rank's part.
    if (work_) try {
        work_->wait();
      } catch (const std::exception&) {
        // The failure ends the run elsewhere.
      }
  }

  // Of a part that is elsewhere only its way back is started: the all-gather needs it here.
  void begin_fetch() override {
    if (inner_) return inner_->begin_fetch();
    gather(part_);
  }
  at::Tensor fetch() override {
    gather(inner_ ? inner_->fetch() : part_);
    std::exchange(work_, nullptr)->wait();
    return std::exchange(whole_, {}).narrow(0, 0, numel_);
  }

 private:
  void gather(const at::Tensor& part) {
    if (work_) return;
    whole_ = at::empty({partition_.ranks * part.numel()}, part.options());
    work_ = partition_.all_gather(whole_, part);
  }

  const InputPartition& partition_;
  const std::unique_ptr<OffloadHandle> inner_;
  const at::Tensor part_;  // if there is no inner handle
  const std::int64_t numel_;
  at::Tensor whole_;
  std::shared_ptr<Work> work_;
};

std::unique_ptr<OffloadHandle> PartitionedBackend::offload(const at::Tensor& bytes) {
  if (compare_) partition_.compare(bytes);
  const auto unit = partition_.ranks * kElement;
  const auto numel = (bytes.numel() + unit - 1) / unit * kElement;
  const auto begin = std::min(partition_.rank * numel, bytes.numel());
  const auto own = bytes.narrow(0, begin, std::min(numel, bytes.numel() - begin));
  at::Tensor part;
  if (own.numel() == numel && inner_) {
    part = own;
  } else {
    part = at::zeros({numel}, bytes.options());
    part.narrow(0, 0, own.numel()).copy_(own);
  }
  auto inner = inner_ ? inner_->offload(part) : nullptr;
  return std::make_unique<Held>(partition_, std::move(inner), inner_ ? at::Tensor() : part, bytes.numel());
}

}  // namespace zero::activations
