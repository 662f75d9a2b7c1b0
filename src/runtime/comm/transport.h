// The virtual interface of the transports, which move bytes between ranks. Arguments are already checked by comm::Group
// (flat, contiguous, one dtype, correct numel), which also counts bytes. Not thread-safe; all ranks make the same calls
// in the same order.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/work.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/symmetric_buffer.h"
#include "comm/tensor_segments.h"
#include "net/process_info.h"

namespace zero::comm {
namespace shm {
class Mappings;
}

// Why the run cannot continue: the rank of the run that failed; -1: not one rank alone.
struct PeerFailure {
  int rank = -1;
  std::string reason;
};

// A group to create from some ranks of a transport, as one member sees it.
struct Split {
  struct Member {
    int rank = 0;                        // of the transport
    int local_rank = 0, local_size = 1;  // among the members of its host
    std::string offer;                   // its split_offer()
  };
  net::ProcessInfo identity;    // of this rank in the group
  std::vector<Member> members;  // in the order of the group
  bool shared_memory = false;   // all members are on one host; overrides the transport's own kind
  std::function<void()>
      abort_check;  // to be called by who waits, every 100 ms or so; throws CommError once the run has failed
};

class Transport {
 public:
  explicit Transport(net::ProcessInfo identity) : identity_(std::move(identity)) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const net::ProcessInfo& identity() const { return identity_; }
  int rank() const { return identity_.rank; }
  int size() const { return identity_.size; }
  int rank_in_run() const { return identity_.rank_in_run(identity_.rank); }
  virtual std::string name() const = 0;

  // Contracts as in zero/communicator.h: `in` may be this rank's part of `out` (all_gather), `out` this rank's part of
  // `in` (reduce_scatter). Data movement takes every dtype including kByte; sums take fp32, bf16 and fp16, accumulate
  // in fp32 in rank order and round once. The Work holds its tensors and must be waited for; a wait must not require
  // that earlier operations were waited for.
  virtual std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of = {}) = 0;
  virtual std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) = 0;
  // The same with fewer bytes over a network: parts are sent as integers of `bits` bits (kernels/quantize.h). Lossy.
  // Where ranks share memory it is the exact sum.
  virtual std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, at::Tensor in, int bits) {
    (void)bits;
    return reduce_scatter(std::move(out), std::move(in));
  }
  virtual std::shared_ptr<Work> all_reduce(at::Tensor inout) = 0;
  virtual std::shared_ptr<Work> broadcast(at::Tensor inout, int root) = 0;
  // The numbers of each rank's own part are equal in `parts.out` and `parts.in`.
  virtual std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) = 0;

  // One message of any length per rank, blocking; also the barrier.
  virtual std::vector<std::string> all_gather_bytes(std::string_view mine) = 0;

  // Waits of the peers soon throw CommError(reason, rank()), and so do later calls of this rank.
  virtual void abort(const std::string& reason) noexcept = 0;

  // Whether tensors may be in GPU memory. shares_gpus: and several ranks may use one GPU.
  virtual bool takes_gpu_memory() const { return false; }
  virtual bool shares_gpus() const { return false; }

  // Whether reduce_scatter_quantized() sends integers to any peer.
  virtual bool quantizes() const { return false; }

  // A failure elsewhere ended the run: waits here and on the peers soon throw CommError(reason, rank). Thread-safe.
  virtual void stop(const std::string& reason, int rank) noexcept {
    (void)rank;
    abort(reason);
  }

  // The failure that ended this transport, if any. Thread-safe.
  virtual std::optional<PeerFailure> failure() const { return std::nullopt; }

  // The number of each rank's host.
  virtual std::vector<int> hosts() const { return std::vector<int>(static_cast<std::size_t>(size()), 0); }
  // What the other members need of this rank to create a group with it. Local.
  virtual std::string split_offer() { return {}; }
  // Called by all members. This transport outlives the new one. If groups are unsupported: ConfigError with the reason,
  // before anything is sent.
  virtual std::unique_ptr<Transport> split(const Split& split) = 0;
  // Why split() would throw, the same on all ranks; empty: it would not.
  virtual std::string why_no_split() const { return {}; }

  // Takes this rank's operations in flight as far as they go without waiting. Returns whether there are any left that
  // this has to be called for again. Any group of the run may be waiting.
  virtual bool advance() { return false; }
  // `advance_others` is advance() of this rank's other groups. Waits in the program's thread call it until it returns
  // false or their operation is complete, because peers may need those operations to reach this one.
  virtual void on_wait(std::function<bool()> advance_others) { (void)advance_others; }

  // Whether ranks are processes, numbered host by host, and `count` divides the number of ranks of every host.
  virtual bool has_neighbours(int count) const {
    return identity_.one_host() && count > 0 && identity_.local_size % count == 0;
  }

  // Payload sent by this rank to other hosts so far, without control messages; exact when all its Works are done.
  virtual std::uint64_t bytes_across_hosts() const { return 0; }

  // Uninitialized memory that this transport moves with the fewest copies.
  virtual at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);

  // Whether peers can read this rank's memory in place, as peer_reduce_scatter() requires.
  virtual bool reads_in_place() const { return false; }
  // Whether the data is in memory from allocate().
  virtual bool holds(const at::Tensor&) const { return false; }
  // The vector must not be accessed before the Work is done.
  virtual std::shared_ptr<Work> peer_reduce_scatter(PeerReduce) {
    ZERO_CHECK(false, "transport ", name(), " reads nothing in place");
  }

  // Creates memory of a vector that every rank reads in place; called by all ranks. null: unsupported, or not
  // worthwhile.
  virtual std::shared_ptr<SymmetricBuffer> share(std::int64_t, c10::ScalarType) { return nullptr; }

  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 protected:
  // "rank 2 failed: REASON"; empty if out of memory.
  std::string own_failure(const std::string& reason) const noexcept;

  std::chrono::milliseconds timeout_{std::chrono::minutes(30)};

 private:
  net::ProcessInfo identity_;
};

// One constructor per transport.
std::unique_ptr<Transport> make_local(const net::ProcessInfo& identity = {});
// Processes of one host. Blocks until all have connected; CommError that names the missing ranks after `timeout`.
// abort_check is called repeatedly now and in later waits, and may throw CommError. Ranks may also be threads of one
// process, if each passes the same `mappings`, which are used until make_shm returns. A thread that ends without
// destroying its transport is not detected.
std::unique_ptr<Transport> make_shm(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                    const std::function<void()>& abort_check = nullptr,
                                    shm::Mappings* mappings = nullptr);
// c10d over TCP, any hosts.
std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
// Shared memory inside each host and c10d between hosts. If hosts have different numbers of ranks, or ranks are not
// numbered host by host, everything goes over TCP as with make_gloo; asked: this is a ConfigError on every rank
// instead.
std::unique_ptr<Transport> make_shm_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                         bool asked = false);
// GPUs. Loads the plug-in library libzero_nccl.so; ConfigError with the reason if it cannot be loaded.
std::unique_ptr<Transport> make_nccl(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
// Ranks that share GPUs: copies tensors to host memory, which `host` moves.
std::unique_ptr<Transport> make_staged(std::unique_ptr<Transport> host);

}  // namespace zero::comm
