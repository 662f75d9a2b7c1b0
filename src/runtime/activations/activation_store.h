// Offloads tensors that autograd saves between forward and backward: the inputs of checkpointed segments, and saved
// tensors above a size. Decides which bytes are offloaded, each once, and when they are fetched. offload_backend.h
// stores them; torch_hooks/saved_tensors.h connects to autograd. One per Engine that requests it.
//
// [Note: bytes, not tensors] The unit of offload is a range of a storage, so that views of one storage are offloaded
// together and keep their strides when fetched. Kernels then take the same paths and give the same bits.
#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "activations/offload_backend.h"
#include "activations/partitioned_backend.h"
#include "config/settings.h"
#include "step/memory_ledger.h"
#include "torch_hooks/saved_tensors.h"

namespace zero::activations {

class ActivationStore final : public torch_hooks::SavedTensorPolicy,
                              public std::enable_shared_from_this<ActivationStore> {
 public:
  struct Setup {
    config::ActivationSettings settings;
    storage::IoSettings io;
    at::Device device = at::kCPU;  // of the activations; tensors on other devices are not offloaded
    std::shared_ptr<step::MemoryLedger> ledger;
    std::string who;                                  // "rank 2/4"
    std::optional<InputPartition> partition{};        // inputs of segments are divided over these ranks
    std::vector<const void*> resident;                // set_resident()
    std::function<void(const std::string&)> profile;  // called with a log line after each backward
  };
  // nullptr if the settings request nothing. Throws ConfigError if a folder does not exist.
  static std::shared_ptr<ActivationStore> create(Setup setup);
  explicit ActivationStore(Setup setup);
  ~ActivationStore() override;

  // Storages that exist in backward anyway (buffers) and are not offloaded.
  void set_resident(const std::vector<const void*>& storages);
  std::unique_ptr<torch_hooks::SavedTensorHooks> saved() override;
  void begin_segment() override;
  std::shared_ptr<torch_hooks::CheckpointFrame> end_segment() override;
  // Whether inputs of segments are compared over the ranks of the partition from now on. At first they are.
  void compare_inputs(bool compare);
  // Ends a backward pass: waits for pending copies and frees idle host memory that was not needed.
  void end_backward();
  // The Engine has ended: threads that still use this policy offload nothing more.
  void end() { ended_ = true; }

  struct Counts {
    std::int64_t left = 0, bytes_left = 0;          // ranges offloaded
    std::int64_t returned = 0, bytes_returned = 0;  // copies fetched
    std::int64_t still_there = 0;                   // fetches of ranges that were still referenced on the device
    std::int64_t in_store = 0;                      // ranges stored now
  };
  Counts counts() const;

 private:
  class Away;                                                                      // a range of a storage
  class Hooks;                                                                     // of one saved tensor
  class Stored;                                                                    // the inputs of one segment
  struct View;                                                                     // a tensor within a range
  using Key = std::tuple<const void*, std::int64_t, std::int64_t, std::uint32_t>;  // storage, begin, end, version
  using Clock = std::chrono::steady_clock;

  bool eligible(const at::Tensor& tensor) const;
  // nullptr: smaller than at_least.
  std::shared_ptr<Away> away(const at::Tensor& tensor, std::int64_t at_least, OffloadBackend& backend);
  OffloadBackend& backend_for_saved();
  OffloadBackend& backend_for_input(std::size_t position);
  OffloadBackend* backend_for_whole_input();
  bool keeps_inputs() const;
  std::unique_ptr<OffloadBackend> new_input_backend(bool slab);
  HostBlocks* new_blocks();
  std::unique_ptr<OffloadBackend> in_host_memory();
  std::unique_ptr<OffloadBackend> in_file(const std::string& folder);
  void fetch_before(const Away& stretch);
  void synchronize() const;

  const Setup setup_;
  std::atomic<bool> ended_{false};
  bool compare_ = true, parts_already_ = false;  // parts_already: the open segment's inputs are not whole
  std::unordered_set<const void*> resident_;
  mutable std::recursive_mutex mutex_;
  std::vector<std::shared_ptr<HostBlocks>> blocks_;  // one per backend, see its note on streams
  std::unique_ptr<OffloadBackend> saved_depot_;
  std::vector<std::unique_ptr<OffloadBackend>> input_depots_;  // one per position if each has a slab, else one
  std::unique_ptr<OffloadBackend> whole_depot_;                // of inputs that the partition leaves whole
  std::vector<PartitionedBackend*> partitioned_;               // those of input_depots_ that divide inputs
  std::map<Key, std::pair<const Away*, std::weak_ptr<Away>>> known_;
  std::map<std::uint64_t, Away*> order_;  // in order of offload
  std::uint64_t next_ = 0;
  std::weak_ptr<Stored> last_segment_;
  Counts counts_;
  Clock::time_point segment_begin_;
  struct Times {
    double first = 0, again = 0;  // seconds
  };
  std::vector<Times> times_;  // of the segments since the last backward
};

}  // namespace zero::activations
