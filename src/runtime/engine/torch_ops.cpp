// See torch_ops.h.
#include "engine/torch_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "engine/dtypes.h"
#include "kernels/quantize.h"
#include "step/tiers.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::engine {
namespace {

double squares_of(const Stretch& values, std::int64_t offset) {
  return kernels::sum_of_squares(values.data, values.dtype, values.numel, offset);
}

}  // namespace

TorchTensorOps::TorchTensorOps(TorchBuffers& buffers, const Lanes& lanes, const std::vector<step::GroupFacts>& groups)
    : buffers_(buffers), lanes_(lanes) {
  int count = 0;
  for (const auto& group : groups) {
    first_sum_.push_back(count);
    count += group.num_members();
  }
  most_in_order_ = count + static_cast<int>(groups.size());
  const auto device = buffers.setup().device;
  if (kernels_for(device) != nullptr) device_sums_ = std::make_unique<DeviceSums>(device, count);
}

void TorchTensorOps::copy_by_file(step::View to, step::View from) {
  constexpr std::int64_t kPart = std::int64_t{1} << 21;  // elements
  const torch_hooks::AllocationObserver::Pause pause;
  for (std::int64_t begin = 0; begin < to.numel; begin += kPart) {
    const auto numel = std::min(kPart, to.numel - begin);
    const auto source = from.part(begin, numel), target = to.part(begin, numel);
    auto values = buffers_.is_file(from.buffer) ? at::empty({numel}, scalar_type(from.dtype)) : buffers_.tensor(source);
    if (buffers_.is_file(from.buffer))
      buffers_.region(from.buffer).read(source.begin * width(from.dtype), values.mutable_data_ptr(), source.bytes());
    if (!buffers_.is_file(to.buffer)) {
      buffers_.tensor(target).copy_(values);
      continue;
    }
    values = values.to(at::kCPU, scalar_type(to.dtype));
    buffers_.region(to.buffer).write(target.begin * width(to.dtype), values.const_data_ptr(), target.bytes());
  }
}

// On its own stream, during the rest of backward. The source must neither be freed nor overwritten before it was read:
// it is kept, and the compute stream waits for the oldest copies if too much is kept.
void TorchTensorOps::send_to_host(step::View to, step::View from) {
  constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;
  const torch_hooks::AllocationObserver::Pause pause;
  release_copied();
  const auto source = buffers_.tensor(from);
  buffers_.wait_read(to.buffer);
  {
    const gpu::SideStream::Scope scope(lanes_.offload);
    buffers_.target(to).copy_(source, /*non_blocking=*/true);
    buffers_.mark_written(to.buffer);
    sent_.push_back({{}, source, 0});
    sent_.back().mark.set(source.device());
  }
  // A persistent buffer is not freed, whatever is kept.
  sent_.back().bytes = buffers_.is_adopted(from.buffer) ? static_cast<std::int64_t>(source.nbytes()) : 0;
  sent_bytes_ += sent_.back().bytes;
  while (sent_bytes_ > kMostBytes) {
    sent_.front().mark.hold();
    forget_oldest();
  }
}

void TorchTensorOps::forget_oldest() {
  sent_bytes_ -= sent_.front().bytes;
  sent_.pop_front();
}

void TorchTensorOps::release_copied() {
  while (!sent_.empty() && sent_.front().mark.reached()) forget_oldest();
}

// Lets later work on the current stream overwrite what was sent.
void TorchTensorOps::order_after_sent_copies() {
  if (sent_.empty()) return;
  sent_.back().mark.hold();
  sent_.clear();
  sent_bytes_ = 0;
}

void TorchTensorOps::copy(step::View to, step::View from, step::Lane lane) {
  if (to.numel == 0) return;
  if (buffers_.is_file(to.buffer) || buffers_.is_file(from.buffer)) return copy_by_file(to, from);
  if (lane == step::Lane::Offload && buffers_.is_pinned(to.buffer) && !buffers_.stretch(from).device.is_cpu())
    return send_to_host(to, from);
  const auto target = buffers_.stretch(to), source = buffers_.stretch(from);
  if (target.device.is_cpu() && !lanes_.unshard.device().is_cpu()) buffers_.wait_read(to.buffer);
  if (lane == step::Lane::Offload) release_copied();  // the update has waited for them
  if (target.device == source.device) return convert(target, source);
  std::optional<gpu::SideStream::Scope> side;
  if (lane == step::Lane::Unshard) side.emplace(lanes_.unshard);
  const torch_hooks::AllocationObserver::Pause pause;
  const bool overlaps = !target.device.is_cpu() && buffers_.is_pinned(from.buffer);
  buffers_.tensor(to).copy_(buffers_.tensor(from), /*non_blocking=*/overlaps);
  if (overlaps) buffers_.mark_read(from.buffer);
}

void TorchTensorOps::accumulate(step::View to, step::View from) {
  engine::accumulate(buffers_.stretch(to), buffers_.stretch(from));
}

void TorchTensorOps::scale(step::View data, float factor) { engine::scale(buffers_.stretch(data), factor); }

void TorchTensorOps::fill(step::View data, float value) {
  if (data.numel == 0) return;
  if (buffers_.is_file(data.buffer)) {
    const torch_hooks::AllocationObserver::Pause pause;
    const auto values = at::full({data.numel}, value, scalar_type(data.dtype));
    return buffers_.region(data.buffer).write(data.begin * width(data.dtype), values.const_data_ptr(), data.bytes());
  }
  const auto stretch = buffers_.stretch(data);
  if (!stretch.device.is_cpu()) {
    buffers_.tensor(data).fill_(value);
    return;
  }
  buffers_.wait_read(data.buffer);
  if (value == 0)
    std::memset(stretch.data, 0, static_cast<std::size_t>(data.bytes()));
  else
    buffers_.tensor(data).fill_(value);
}

void TorchTensorOps::quantize(step::View to, step::View from, int bits) {
  const auto source = buffers_.stretch(from);
  kernels::quantize(buffers_.data(to), bits, source.data, source.dtype, source.numel);
}

void TorchTensorOps::dequantize(step::View to, step::View from, int bits) {
  const auto target = buffers_.stretch(to);
  kernels::dequantize(target.data, target.dtype, buffers_.data(from), bits, target.numel);
}

// --- norms ------------------------------------------------------------------------------------

void TorchTensorOps::begin_squares(int group) {
  order_after_sent_copies();  // the group's gradients are written next
  for (const auto& [slot, square] : squares_[group])
    if (square.on_device >= 0) device_sums_->cancel(square.on_device);
  squares_[group].clear();
  fetched_ = false;
}

void TorchTensorOps::read_squared() {
  if (squares_on_device()) device_sums_->enqueue();
}

void TorchTensorOps::set_square(int group, int slot, double sum) { squares_[group][slot] = {sum, -1}; }

void TorchTensorOps::square(int group, int slot, step::View values, std::int64_t offset) {
  if (values.numel == 0) return;
  const auto stretch = buffers_.stretch(values);
  const bool on_host = kernels_for(stretch.device) == nullptr;  // a copy that is offloaded, or no GPU
  if (on_host || !squares_on_device()) return set_square(group, slot, squares_of(stretch, offset));
  auto& square = squares_[group][slot];
  square.on_device = first_sum_[static_cast<std::size_t>(group)] + slot;
  device_sums_->add(square.on_device, stretch);
  fetched_ = false;
}

double TorchTensorOps::sum_of_squares(int group) {
  if (squares_on_device() && !std::exchange(fetched_, true)) device_sums_->fetch();
  double sum = 0;
  for (const auto& [slot, square] : squares_[group])
    sum += square.on_device < 0 ? square.sum : (*device_sums_)[square.on_device];
  return sum;
}

void TorchTensorOps::combine_norms(DeviceNorms how) {
  how_ = std::move(how);
  if (squares_on_device() && most_in_order_ <= cuda::kMaxOrder)
    norm_ = std::make_unique<DeviceNorm>(buffers_.setup().device, how_.ranks);
}

// Ranks must agree on the result: it depends on nothing that differs between them. Sums of the host come from
// transports that sum on the host, which all ranks have or none.
bool TorchTensorOps::begin_norm(const step::NormRequest& request) {
  if (!norm_) return false;
  std::vector<int> order;
  for (const int group : request.groups) {
    for (const auto& [slot, square] : squares_[group]) {
      if (square.on_device < 0) return false;
      order.push_back(square.on_device);
    }
    order.push_back(-1);
  }
  norm_->begin(device_sums_->enqueue(), order, how_.tag(),
               {request.scale, request.clip, request.postmultiply, request.checks_overflow ? 1 : 0}, how_.gather);
  return true;
}

double TorchTensorOps::end_norm() {
  const auto parts = norm_->end();
  how_.check(parts);
  double total = 0;
  for (const auto& part : parts) total += part.sum;
  return total;
}

// --- files ------------------------------------------------------------------------------------

step::WorkPtr TorchTensorOps::read(step::View to, step::View file) {
  return buffers_.region(file.buffer)
      .begin_read(file.begin * width(file.dtype), buffers_.data(to), step::whole_blocks(file.bytes()));
}

step::WorkPtr TorchTensorOps::write(step::View file, step::View from) {
  return buffers_.region(file.buffer)
      .begin_write(file.begin * width(file.dtype), buffers_.data(from), step::whole_blocks(file.bytes()));
}

}  // namespace zero::engine
