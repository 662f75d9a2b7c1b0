// The engine's process group: the collectives of zero/communicator.h with argument checks and byte counts, and internal
// ones: symmetric buffers, quantized reductions, subgroups of one host. A Communicator wraps one Group. Data is moved
// by a Transport.
#pragma once
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/communicator.h>

#include "comm/family.h"
#include "comm/transport.h"

namespace zero::comm {

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Create with std::make_shared. `parent`: the group that this one was split from.
  explicit Group(std::unique_ptr<Transport> transport, std::shared_ptr<Group> parent = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // As in Communicator.
  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  int local_rank() const { return transport_->identity().local_rank; }
  int local_size() const { return transport_->identity().local_size; }
  std::string transport() const { return transport_->name(); }
  std::shared_ptr<Work> all_gather(at::Tensor out, const at::Tensor& in, std::string_view of = {});
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, const at::Tensor& in);
  std::shared_ptr<Work> all_reduce(at::Tensor inout);
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root);
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in);
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in, const std::vector<std::int64_t>& out_numels,
                                   const std::vector<std::int64_t>& in_numels);
  void barrier() { all_gather_bytes({}); }
  std::vector<std::string> all_gather_bytes(std::string_view mine);
  std::shared_ptr<Group> split(int color, int key, std::string_view name = {});
  void abort(const std::string& reason) noexcept;
  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);
  std::chrono::milliseconds timeout() const { return transport_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout);
  CommStats stats() const;
  void reset_stats();

  // A flat vector of size() shards that every rank reads in place; null if the transport does not support it or the
  // shard is too small. Collective.
  std::shared_ptr<SymmetricBuffer> share(std::int64_t shard_numel, c10::ScalarType dtype);
  // Waits until all shards may be read. Counted as the all_gather that it replaces.
  void gather(SymmetricBuffer& vector);

  // Whether tensors may be in GPU memory.
  bool takes_gpu_memory() const { return transport_->takes_gpu_memory(); }
  // The index of this rank's GPU, of `gpus` on this host; -1: there are not enough.
  int gpu_index(int gpus) const {
    if (transport_->shares_gpus() && gpus > 0) return local_rank() % gpus;
    return local_size() <= gpus ? local_rank() : -1;
  }

  // Whether ranks can read each other's memory, as peer_reduce_scatter() requires.
  bool reads_in_place() const { return transport_->reads_in_place(); }
  // Whether the data is in memory from allocate(), which other ranks can read.
  bool holds(const at::Tensor& tensor) const { return transport_->holds(tensor); }
  // Reduce-scatter (to_all: all-reduce) of a vector that consists of several pieces of memory (comm/tensor_segments.h).
  std::shared_ptr<Work> peer_reduce_scatter(PeerReduce sum);

  // reduce_scatter for slow links: parts are sent as 8- or 4-bit integers with one scale per 256 elements (ZeRO++'s
  // qgZ, arXiv:2306.10209). Lossy; ranks of one host are summed exactly first. Without quantizes() it saves no bytes
  // and is reduce_scatter.
  std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, const at::Tensor& in, int bits);
  bool quantizes() const { return transport_->quantizes(); }

  // Splits into groups of `count` consecutive ranks of one host, over shared memory. Collective. ConfigError unless
  // has_neighbours(count): ranks are processes, numbered host by host, and count divides the number of ranks of every
  // host.
  std::shared_ptr<Group> neighbours(int count);
  bool has_neighbours(int count) const;

 private:
  class TrackedWork;

  template <class Start>
  std::shared_ptr<Work> start(const char* op, const at::Tensor& whole, Start start);
  template <class Body>
  auto guarded(Body body);  // a CommError in it ends the family
  std::shared_ptr<Group> split_into(int color, int key, bool shared_memory, std::string_view name = {});
  std::vector<int> members_of(const std::vector<std::string>& messages, int color);
  std::shared_ptr<Work> exchange(at::Tensor out, const at::Tensor& in, Parts parts);
  void count(const char* op, std::uint64_t bytes_whole, std::uint64_t times = 1);
  void count_sent(const char* op, std::uint64_t bytes);
  std::uint64_t bytes_across_hosts() const;
  bool is_named() const { return !transport_->identity().group.empty(); }
  void ended_by(const CommError& error) noexcept;

  const pid_t pid_ = ::getpid();
  const std::shared_ptr<Group> parent_;  // this group may use its transport
  const std::shared_ptr<Family> family_;
  std::unique_ptr<Transport> transport_;
  // Works that have not been waited for. They may outlive this group.
  std::shared_ptr<std::atomic<int>> unfinished_ = std::make_shared<std::atomic<int>>(0);
  CommStats stats_;
  std::uint64_t across_before_ = 0;  // the transport's count at the last reset
  std::uint64_t sequence_ = 0;       // of this rank's collectives, including all_gather_bytes
  int splits_ = 0;
};

// The Group of a Communicator, and a Communicator of all ranks of a transport.
std::shared_ptr<Group> group_of(const Communicator& communicator);
std::shared_ptr<Communicator> make_communicator(std::unique_ptr<Transport> transport);

}  // namespace zero::comm
