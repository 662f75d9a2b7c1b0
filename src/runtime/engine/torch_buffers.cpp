// See torch_buffers.h.
#include "engine/torch_buffers.h"

#include <ATen/ATen.h>

#include "base/check.h"
#include "engine/dtypes.h"
#include "engine/tensor_arithmetic.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::engine {
namespace {

using step::Place;
using step::Role;

bool is_optimizer_state(Role role) { return role == Role::Master || role == Role::OptimizerState; }

// Whether the transport never moves this memory.
bool stays_local(Role role) {
  return is_optimizer_state(role) || role == Role::PendingParams || role == Role::GradsCopy;
}

}  // namespace

// Groups over shared memory share the memory of the run.
comm::Group& TorchBuffers::peer_readable() const {
  for (const auto& axis : setup_.axes)
    if (axis->size() > 1 && axis->reads_in_place()) return *axis;
  return group(0);
}

TorchBuffers::Entry TorchBuffers::make(const step::Allocation& allocation) const {
  Entry entry;
  const auto bytes = allocation.bytes;
  const bool cpu = setup_.device.is_cpu();
  const auto host = at::TensorOptions().dtype(at::kByte);
  switch (allocation.place) {
    case Place::Symmetric:
      entry.symmetric = group(allocation.axis).share(bytes, at::kByte);
      ZERO_CHECK(entry.symmetric, "no symmetric memory of ", bytes, " bytes over ", group(allocation.axis).transport());
      entry.memory = entry.symmetric->shard();
      entry.own_begin = group(allocation.axis).rank() * bytes;
      break;
    case Place::File:
      entry.region.emplace(allocation.role == Role::Params ? setup_.params_file : setup_.states_file, bytes);
      break;
    case Place::IoBuffer:
      // Prefer the buffers of the file that it is used for; those of any file work.
      entry.io_file = allocation.role == Role::ParamsTile ? setup_.params_file : setup_.states_file;
      if (!entry.io_file) entry.io_file = setup_.params_file ? setup_.params_file : setup_.states_file;
      entry.io_bytes = bytes;
      break;
    case Place::PinnedHost:
      entry.pinned = !is_optimizer_state(allocation.role) || setup_.pin_states;
      entry.memory = entry.pinned && !cpu ? pinned_memory(setup_.device, bytes) : at::empty({bytes}, host);
      break;
    case Place::PeerReadable:
      entry.memory = peer_readable().allocate(bytes, at::kByte);
      break;
    case Place::Device:
    case Place::Host:
      // Memory that the transport moves is allocated where it needs the fewest copies.
      if (cpu && !stays_local(allocation.role))
        entry.memory = (allocation.role == Role::SecondaryShard ? *setup_.node : group(allocation.axis))
                           .allocate(bytes, at::kByte);
      else
        entry.memory = at::empty({bytes}, allocation.place == Place::Host ? host : host.device(setup_.device));
      break;
  }
  return entry;
}

void TorchBuffers::allocate(int buffer, const step::Allocation& allocation) {
  const torch_hooks::AllocationObserver::Pause pause;  // step::Memory has already booked it
  auto entry = std::make_unique<Entry>(make(allocation));
  const std::lock_guard lock(mutex_);
  if (allocation.place == Place::PeerReadable) blocks_[entry->memory.const_data_ptr()] = buffer;
  entries_[buffer] = std::move(entry);
}

void TorchBuffers::free(int buffer) {
  std::unique_ptr<Entry> entry;  // destroyed without the lock: freeing a tensor may call back
  {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find(buffer);
    if (it == entries_.end()) return;
    entry = std::move(it->second);
    entries_.erase(it);
    if (entry->memory.defined()) {
      const auto block = blocks_.find(entry->memory.const_data_ptr());
      if (block != blocks_.end() && block->second == buffer) blocks_.erase(block);
    }
  }
  try {
    entry->read.wait();
    entry->written.wait();
  } catch (const std::exception&) {
    // An error of the device, which the operation that met it reports; no copy is under way any more.
  }
}

void TorchBuffers::make_files() {
  for (auto* file : {setup_.params_file.get(), setup_.states_file.get()})
    if (file != nullptr) file->make();
}

void TorchBuffers::adopt(int buffer, at::Tensor tensor) {
  auto entry = std::make_unique<Entry>();
  entry->memory = std::move(tensor);
  entry->adopted = true;
  const std::lock_guard lock(mutex_);
  entries_[buffer] = std::move(entry);
}

bool TorchBuffers::drop(int buffer) {
  std::unique_ptr<Entry> entry;
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(buffer);
  if (it == entries_.end() || !it->second->adopted) return false;
  entry = std::move(it->second);
  entries_.erase(it);
  return true;
}

void TorchBuffers::close() {
  std::vector<std::unique_ptr<Entry>> adopted;  // destroyed without the lock
  Setup setup;
  const std::lock_guard lock(mutex_);
  std::swap(setup, setup_);
  for (auto& [buffer, entry] : entries_)
    if (entry->adopted) adopted.push_back(std::move(entry));
  std::erase_if(entries_, [](const auto& each) { return each.second == nullptr; });
}

const TorchBuffers::Entry& TorchBuffers::find(int buffer) const {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find(buffer);
  ZERO_CHECK(it != entries_.end(), "buffer ", buffer, " is not there");
  auto& entry = *it->second;
  if (entry.io_file && !entry.io) entry.io = entry.io_file->file().buffer(entry.io_bytes);
  return entry;
}

at::Tensor TorchBuffers::tensor(const step::View& view) const {
  const auto& entry = find(view.buffer);
  entry.written.wait();
  return tensor_of(entry, view);
}

at::Tensor TorchBuffers::tensor_of(const Entry& entry, const step::View& view) const {
  const auto type = scalar_type(view.dtype);
  const auto begin = view.begin * width(view.dtype), bytes = view.bytes();
  if (entry.adopted) return entry.memory.view({-1}).narrow(0, view.begin, view.numel);
  if (entry.io)
    return at::from_blob(static_cast<char*>(entry.io->data()) + begin, {view.numel}, at::TensorOptions().dtype(type));
  if (entry.symmetric && (begin < entry.own_begin || begin + bytes > entry.own_begin + entry.memory.numel()))
    return entry.symmetric->whole().narrow(0, begin, bytes).view(type);
  return entry.memory.narrow(0, begin - entry.own_begin, bytes).view(type);
}

at::Tensor TorchBuffers::shaped(const step::View& view) const {
  const auto& entry = find(view.buffer);
  return entry.adopted ? entry.memory : tensor(view);
}

Stretch TorchBuffers::stretch(const step::View& view) const {
  const auto& entry = find(view.buffer);
  entry.written.wait();
  if (entry.symmetric || (entry.adopted && !entry.memory.is_contiguous())) return Stretch(tensor(view));
  auto* const base = entry.io ? entry.io->data() : const_cast<void*>(entry.memory.const_data_ptr());
  return {static_cast<char*>(base) + view.begin * width(view.dtype), view.numel, kernels_dtype(view.dtype),
          entry.io ? at::Device(at::kCPU) : entry.memory.device()};
}

int TorchBuffers::block_at(const void* data) const {
  const std::lock_guard lock(mutex_);
  const auto it = blocks_.find(data);
  return it == blocks_.end() ? 0 : it->second;
}

void TorchBuffers::mark_read(int buffer) { const_cast<Entry&>(find(buffer)).read.set(setup_.device); }

void TorchBuffers::wait_read(int buffer) const { find(buffer).read.wait(); }

void TorchBuffers::mark_written(int buffer) { const_cast<Entry&>(find(buffer)).written.set(setup_.device); }

}  // namespace zero::engine
