#include "activations/activation_store.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::activations {
namespace {

using config::OffloadDevice;
using Seconds = std::chrono::duration<double>;

// Granularity, in bytes, of the begin of a range within its storage; keeps the data's alignment.
constexpr std::int64_t kBorder = 64;

at::Tensor over(const c10::Storage& storage, std::int64_t byte_offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  const auto width = static_cast<std::int64_t>(at::elementSize(dtype));
  ZERO_CHECK(byte_offset % width == 0, "a tensor of ", c10::toString(dtype), " at byte ", byte_offset);
  return at::empty({0}, at::TensorOptions(dtype).device(storage.device()))
      .set_(storage, byte_offset / width, sizes, strides);
}

void check_folder(const char* key, const std::string& folder) {
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error))
    throw ConfigError(base::join("[Engine] ", key, ": got ", folder, ", expected a folder that exists"));
}

}  // namespace

// --- a stretch --------------------------------------------------------------------------------

class ActivationStore::Away {
 public:
  Away(std::shared_ptr<ActivationStore> store, const Key& key, const c10::Storage& source, OffloadBackend& backend)
      : store_(std::move(store)),
        key_(key),
        number_(store_->next_++),
        collective_(backend.is_collective()),
        source_(source.getWeakStorageImpl()) {
    const auto begin = std::get<1>(key), end = std::get<2>(key);
    parcel_ = backend.offload(over(source, begin, {end - begin}, {1}, at::kByte));
    store_->order_[number_] = this;
    ++store_->counts_.left;
    ++store_->counts_.in_store;
    store_->counts_.bytes_left += end - begin;
  }
  ~Away() {
    const std::lock_guard lock(store_->mutex_);
    parcel_.reset();
    store_->order_.erase(number_);
    const auto known = store_->known_.find(key_);
    if (known != store_->known_.end() && known->second.first == this) store_->known_.erase(known);
    --store_->counts_.in_store;
  }
  Away(const Away&) = delete;
  Away& operator=(const Away&) = delete;

  std::uint64_t number() const { return number_; }
  std::int64_t begin() const { return std::get<1>(key_); }

  void begin_fetch() {
    if (collective_ ? !held_.defined() : source_.expired() && returned_.expired()) parcel_->begin_fetch();
  }
  // Registers hooks that will fetch the range. Each has a number, to detect when it fetched.
  void add_user() { ++users_; }
  void remove_user(std::uint64_t asked) {
    --users_;
    if (asked != pass_) one_less();
  }
  // A storage that contains the range, at the byte offset returned second.
  std::pair<c10::Storage, std::int64_t> on_device(std::uint64_t& asked) {
    if (auto there = collective_ ? nullptr : source_.lock()) {
      ++store_->counts_.still_there;
      return {c10::Storage(std::move(there)), begin()};
    }
    auto there = collective_ && !held_.defined() ? nullptr : returned_.lock();
    if (!there) {
      held_ = parcel_->fetch();
      returned_ = held_.storage().getWeakStorageImpl();
      there = returned_.lock();
      returned_begin_ = held_.storage_offset();
      ++pass_;
      awaited_ = users_;
      ++store_->counts_.returned;
      store_->counts_.bytes_returned += held_.numel();
      store_->fetch_before(*this);
    }
    if (std::exchange(asked, pass_) != pass_) one_less();
    return {c10::Storage(std::move(there)), returned_begin_};
  }
  void let_go() { held_.reset(); }

 private:
  const std::shared_ptr<ActivationStore> store_;
  const Key key_;
  const std::uint64_t number_;
  const bool collective_;  // fetched in every pass, even if the memory is still there
  // Weak: keeps the storage object's address (the key) unique without keeping its memory.
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  c10::weak_intrusive_ptr<c10::StorageImpl> returned_{c10::intrusive_ptr<c10::StorageImpl>()};
  std::int64_t returned_begin_ = 0;
  std::unique_ptr<OffloadHandle> parcel_;
  // A fetched copy stays until every hook has requested it, as the original tensor would have.
  void one_less() {
    if (--awaited_ <= 0) held_.reset();
  }
  at::Tensor held_;
  std::int64_t users_ = 0, awaited_ = 0;
  std::uint64_t pass_ = 0;
};

struct ActivationStore::View {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset;  // bytes from the begin of the range
  at::ScalarType dtype;

  View(const at::Tensor& tensor, std::int64_t begin)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        offset(tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size()) - begin),
        dtype(tensor.scalar_type()) {}
  at::Tensor in(Away& stretch, std::uint64_t& asked) const {
    const auto [storage, begin] = stretch.on_device(asked);
    return over(storage, begin + offset, sizes, strides, dtype);
  }
};

// --- what autograd holds ----------------------------------------------------------------------

class ActivationStore::Stored final : public torch_hooks::CheckpointFrame {
 public:
  Stored(std::shared_ptr<ActivationStore> store, std::size_t index, std::weak_ptr<Stored> before)
      : store_(std::move(store)), index_(index), before_(std::move(before)) {}

  std::unique_ptr<torch_hooks::SavedTensorHooks> input(const at::Tensor& tensor) override;
  void begin_recompute() override {
    store_->synchronize();
    begin_ = Clock::now();
    const std::lock_guard lock(store_->mutex_);
    fetch();
    if (const auto before = before_.lock()) before->fetch();
  }
  void end_again() override {
    store_->synchronize();
    const std::lock_guard lock(store_->mutex_);
    if (index_ < store_->times_.size()) store_->times_[index_].again += Seconds(Clock::now() - begin_).count();
  }
  void add(const std::shared_ptr<Away>& stretch) { stretches_.push_back(stretch); }
  ActivationStore& store() const { return *store_; }

 private:
  void fetch() const {
    for (const auto& stretch : stretches_)
      if (const auto one = stretch.lock()) one->begin_fetch();
  }
  const std::shared_ptr<ActivationStore> store_;
  const std::size_t index_;
  const std::weak_ptr<Stored> before_;
  std::vector<std::weak_ptr<Away>> stretches_;
  std::size_t position_ = 0;
  Clock::time_point begin_;
};

class ActivationStore::Hooks final : public torch_hooks::SavedTensorHooks {
 public:
  // For an input of `segment`, or null. Offloads to `backend` from at_least bytes on.
  Hooks(std::shared_ptr<ActivationStore> store, OffloadBackend& backend, std::int64_t at_least, Stored* segment)
      : store_(std::move(store)), backend_(backend), at_least_(at_least), segment_(segment) {}
  ~Hooks() override {
    if (!stretch_) return;
    const std::lock_guard lock(store_->mutex_);
    stretch_->remove_user(asked_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = torch_hooks::SavedVersion(tensor);
    if (store_->eligible(tensor)) {
      const std::lock_guard lock(store_->mutex_);
      stretch_ = store_->away(tensor, at_least_, backend_);
      if (stretch_) stretch_->add_user();
    }
    if (stretch_) {
      view_.emplace(tensor, stretch_->begin());
      if (segment_ != nullptr) segment_->add(stretch_);
    } else {
      // detach(): otherwise an output saved by its own node would form a cycle.
      kept_ = tensor.detach();
    }
  }
  at::Tensor call_unpack_hook() override {
    if (!version_.unchanged()) {
      if (segment_ != nullptr)
        throw ConfigError(
            "[activation_checkpoint] got an input that was written in place after the segment ran, expected it "
            "unchanged");
      throw ConfigError(
          "[Engine::backward] got a tensor that was written in place after an operation had saved it for backward, "
          "expected it unchanged. Hint: leave out the underscore: x = x.add(y) instead of x.add_(y).");
    }
    if (!stretch_) return kept_;
    const std::lock_guard lock(store_->mutex_);
    return view_->in(*stretch_, asked_);
  }

 private:
  const std::shared_ptr<ActivationStore> store_;
  OffloadBackend& backend_;
  const std::int64_t at_least_;
  Stored* const segment_;  // after packing, only compared with null
  torch_hooks::SavedVersion version_;
  std::shared_ptr<Away> stretch_;
  std::uint64_t asked_ = 0;
  std::optional<View> view_;
  at::Tensor kept_;
};

std::unique_ptr<torch_hooks::SavedTensorHooks> ActivationStore::Stored::input(const at::Tensor& tensor) {
  // Only what is equal on all ranks can be divided; integers are small and stay whole.
  const bool divides = store_->setup_.partition.has_value();
  const bool whole = divides && (store_->parts_already_ || !tensor.is_floating_point() ||
                                 tensor.numel() < store_->setup_.partition->ranks);
  if (whole) {
    auto* const backend = store_->backend_for_whole_input();
    return backend ? std::make_unique<Hooks>(store_, *backend, 1, this) : nullptr;
  }
  if (!store_->keeps_inputs()) {
    if (store_->setup_.settings.offload.device == OffloadDevice::None) return nullptr;
    return std::make_unique<Hooks>(store_, store_->backend_for_saved(), store_->setup_.settings.offload.min_bytes,
                                   this);
  }
  return std::make_unique<Hooks>(store_, store_->backend_for_input(position_++), 1, this);
}

// --- the store --------------------------------------------------------------------------------

std::shared_ptr<ActivationStore> ActivationStore::create(Setup setup) {
  const auto& s = setup.settings;
  const bool keeps =
      s.to_host || s.contiguous || !s.file_path.empty() || s.offload.device != OffloadDevice::None || setup.partition;
  if (!keeps && !s.profile && !s.synchronize) return nullptr;
  torch_hooks::install_engine();  // refuses here, not in the first forward
  check_folder("libzero.activation_file_path", s.file_path);
  if (s.offload.device == OffloadDevice::Nvme) check_folder("libzero.activation_offload.nvme_path", s.offload.path);
  return std::make_shared<ActivationStore>(std::move(setup));
}

ActivationStore::ActivationStore(Setup setup) : setup_(std::move(setup)) { set_resident(setup_.resident); }

void ActivationStore::set_resident(const std::vector<const void*>& storages) {
  const std::lock_guard lock(mutex_);
  resident_ = {storages.begin(), storages.end()};
}

ActivationStore::~ActivationStore() = default;

bool ActivationStore::keeps_inputs() const {
  return setup_.settings.to_host || setup_.settings.contiguous || !setup_.settings.file_path.empty() ||
         setup_.partition;
}

HostBlocks* ActivationStore::new_blocks() {
  blocks_.push_back(std::make_shared<HostBlocks>(setup_.device, setup_.ledger));
  return blocks_.back().get();
}

std::unique_ptr<OffloadBackend> ActivationStore::in_host_memory() {
  new_blocks();
  return std::make_unique<HostBackend>(setup_.device, blocks_.back());
}

std::unique_ptr<OffloadBackend> ActivationStore::in_file(const std::string& folder) {
  new_blocks();
  return std::make_unique<FileBackend>(setup_.device, blocks_.back(), setup_.ledger, folder, setup_.io, setup_.who);
}

OffloadBackend& ActivationStore::backend_for_saved() {
  const std::lock_guard lock(mutex_);
  const auto& offload = setup_.settings.offload;
  if (!saved_depot_) saved_depot_ = offload.device == OffloadDevice::Nvme ? in_file(offload.path) : in_host_memory();
  return *saved_depot_;
}

// Where inputs are kept: a file, host memory, or a slab on the device. nullptr: on the device as they are.
std::unique_ptr<OffloadBackend> ActivationStore::new_input_backend(bool slab) {
  const auto& s = setup_.settings;
  if (!s.file_path.empty()) return in_file(s.file_path);
  if (!slab) return s.to_host ? in_host_memory() : nullptr;
  if (s.to_host)
    return std::make_unique<HostBackend>(
        setup_.device,
        std::make_shared<Slab>(
            s.num_checkpoints, [device = setup_.device](std::int64_t bytes) { return host_memory(device, bytes); },
            [ledger = setup_.ledger](std::int64_t bytes) {
              ledger->book(step::Tier::Host, step::Purpose::Activations, bytes);
            }));
  // Booked on the device's tier.
  return std::make_unique<SlabBackend>(
      std::make_unique<Slab>(s.num_checkpoints, [device = setup_.device](std::int64_t bytes) {
        return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
      }));
}

OffloadBackend& ActivationStore::backend_for_input(std::size_t position) {
  const std::lock_guard lock(mutex_);
  const auto& s = setup_.settings;
  const bool slabs = s.contiguous && s.file_path.empty();  // a file is contiguous anyway
  if (!slabs) position = 0;
  while (input_depots_.size() <= position) {
    auto backend = new_input_backend(slabs);
    if (setup_.partition) {
      auto divided = std::make_unique<PartitionedBackend>(*setup_.partition, std::move(backend));
      divided->set_compare(compare_);
      partitioned_.push_back(divided.get());
      backend = std::move(divided);
    }
    input_depots_.push_back(std::move(backend));
  }
  return *input_depots_[position];
}

OffloadBackend* ActivationStore::backend_for_whole_input() {
  const std::lock_guard lock(mutex_);
  const auto& s = setup_.settings;
  if (!whole_depot_ && (s.to_host || !s.file_path.empty())) whole_depot_ = new_input_backend(/*slab=*/false);
  return whole_depot_.get();
}

void ActivationStore::compare_inputs(bool compare) {
  const std::lock_guard lock(mutex_);
  compare_ = compare;
  for (auto* backend : partitioned_) backend->set_compare(compare);
}

bool ActivationStore::eligible(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == setup_.device &&
         tensor.has_storage() && !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor() && tensor.numel() > 0 && tensor.storage().data() != nullptr &&
         resident_.count(tensor.storage().unsafeGetStorageImpl()) == 0 && !torch_hooks::is_parameter(tensor);
}

std::shared_ptr<ActivationStore::Away> ActivationStore::away(const at::Tensor& tensor, std::int64_t at_least,
                                                             OffloadBackend& backend) {
  const auto width = static_cast<std::int64_t>(tensor.element_size());
  const auto total = static_cast<std::int64_t>(tensor.storage().nbytes());
  std::int64_t first = tensor.storage_offset() * width, last = first + width;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d) * width;
  // The whole storage, unless it is much larger than the tensor: other views of it are usually saved as well.
  std::int64_t begin = 0, end = total;
  if (2 * (last - first) < total) {
    begin = first / kBorder * kBorder;
    end = last;
  }
  if (end - begin < at_least) return nullptr;
  const Key key{tensor.storage().unsafeGetStorageImpl(), begin, end, torch_hooks::SavedVersion(tensor).value()};
  if (const auto known = known_.find(key); known != known_.end())
    if (auto stretch = known->second.second.lock()) return stretch;
  auto stretch = std::make_shared<Away>(shared_from_this(), key, tensor.storage(), backend);
  known_[key] = {stretch.get(), stretch};
  return stretch;
}

// Backward requests ranges in about the reverse order of their offload.
void ActivationStore::fetch_before(const Away& stretch) {
  const auto it = order_.find(stretch.number());
  if (it != order_.end() && it != order_.begin()) std::prev(it)->second->begin_fetch();
}

void ActivationStore::synchronize() const {
  if (setup_.settings.synchronize || setup_.settings.profile) gpu::synchronize(setup_.device);
}

std::unique_ptr<torch_hooks::SavedTensorHooks> ActivationStore::saved() {
  const auto& offload = setup_.settings.offload;
  if (offload.device == OffloadDevice::None || ended_) return nullptr;
  const std::lock_guard lock(mutex_);  // forwards may run in several threads
  return std::make_unique<Hooks>(shared_from_this(), backend_for_saved(), offload.min_bytes, nullptr);
}

void ActivationStore::begin_segment() {
  if (ended_) return;
  synchronize();
  const std::lock_guard lock(mutex_);
  segment_begin_ = Clock::now();
  parts_already_ = setup_.partition && setup_.partition->inside_split_region();
}

std::shared_ptr<torch_hooks::CheckpointFrame> ActivationStore::end_segment() {
  if (ended_) return nullptr;
  synchronize();
  const std::lock_guard lock(mutex_);
  times_.push_back({Seconds(Clock::now() - segment_begin_).count(), 0});
  auto segment = std::make_shared<Stored>(shared_from_this(), times_.size() - 1, last_segment_);
  last_segment_ = segment;
  return segment;
}

void ActivationStore::end_backward() {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, stretch] : order_) stretch->let_go();  // ranges whose hooks this pass did not reach
  if (saved_depot_) saved_depot_->wait_idle();
  if (whole_depot_) whole_depot_->wait_idle();
  for (const auto& backend : input_depots_) backend->wait_idle();
  for (const auto& blocks : blocks_) blocks->trim();
  if (setup_.settings.profile && setup_.profile && !times_.empty()) {
    std::string line = base::join("activation checkpointing: ", times_.size(), " segments, ms forward + again:");
    double first = 0, again = 0;
    char text[64];
    for (const auto& times : times_) {
      std::snprintf(text, sizeof text, " %.2f+%.2f", times.first * 1e3, times.again * 1e3);
      line += text;
      first += times.first;
      again += times.again;
    }
    std::snprintf(text, sizeof text, "; together %.2f + %.2f", first * 1e3, again * 1e3);
    setup_.profile(line + text);
  }
  times_.clear();
}

ActivationStore::Counts ActivationStore::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace zero::activations
