// The one virtual seam of this layer: how bytes move between ranks. A transport may trust its
// arguments, the Communicator has checked them (flat, contiguous, one dtype, right numel), and it
// counts nothing. It knows nothing of parameters. Not safe for two threads at once; all ranks make
// the same calls in the same order.
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
#include "comm/symmetric_buffer.h"
#include "comm/tensor_segments.h"
#include "net/process_info.h"

namespace zero::comm {
namespace shm {
class Mappings;
}

// Why nothing goes on: the rank of the run that failed, -1: not one alone.
struct PeerFailure {
  int rank = -1;
  std::string reason;
};

// A group of some ranks of a transport, as one of its members makes it together with the others.
struct Split {
  net::ProcessInfo identity;  // of this rank in the group
  std::vector<int> members;   // the group's ranks as the transport numbers them, in the group's order
  // Where each member is on its host: local rank and local size in the group. Empty: not known.
  std::vector<std::pair<int, int>> hosts;
  std::uint64_t taken = 0;     // the split_marks() of all members together
  bool shared_memory = false;  // on one host whatever the transport itself uses
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

  // Contracts as in zero/communicator.h: `in` may be the own part of `out` (all_gather), `out` the
  // own part of `in` (reduce_scatter). Movement takes every dtype, kByte included; sums take fp32,
  // bf16 and fp16, added in fp32 in rank order and rounded once (base::sum_parts).
  // The Work keeps what it needs alive; it must be waited for, and is waited for in order of issue
  // or later (a wait for a later operation may not need an earlier one's wait).
  virtual std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of = {}) = 0;
  virtual std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) = 0;
  // The same in fewer bytes where a network is in the way, each part as integers of `bits` (kernels/quantize.h): lossy.
  // In memory that ranks share nothing is saved, and it is the exact sum.
  virtual std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, at::Tensor in, int bits) {
    (void)bits;
    return reduce_scatter(std::move(out), std::move(in));
  }
  virtual std::shared_ptr<Work> all_reduce(at::Tensor inout) = 0;
  virtual std::shared_ptr<Work> broadcast(at::Tensor inout, int root) = 0;
  virtual std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in) = 0;

  // One message of any length per rank, blocking; also serves as the barrier.
  virtual std::vector<std::string> exchange(std::string_view mine) = 0;

  // Peers' waits throw CommError(reason, rank()) soon; so do this rank's later calls.
  virtual void abort(const std::string& reason) noexcept = 0;

  // Whether reduce_scatter_quantized() sends integers to some peer.
  virtual bool quantizes() const { return false; }

  // What ended the run elsewhere: waits here and of the peers throw CommError(reason, rank) soon. From any thread.
  virtual void stop(const std::string& reason, int rank) noexcept {
    (void)rank;
    abort(reason);
  }

  // What has ended this transport, if anything has. From any thread.
  virtual std::optional<PeerFailure> failure() const { return std::nullopt; }

  // A number for the host of each rank.
  virtual std::vector<int> hosts() const { return std::vector<int>(static_cast<std::size_t>(size()), 0); }
  // Bits of what groups of this rank use already, of which a new one needs one that no member uses.
  virtual std::uint64_t split_marks() const { return 0; }
  // All members call it together. This transport outlives the new one. Where groups are not possible: ConfigError that
  // says why, before anything is sent.
  virtual std::unique_ptr<Transport> split(const Split& split) = 0;
  // The reason why split() would throw, alike on all ranks; empty: it would not.
  virtual std::string why_no_split() const { return {}; }

  // Whether the ranks are processes, numbered host by host, and `count` divides the ranks of every host.
  virtual bool has_neighbours(int count) const {
    return identity_.one_host() && count > 0 && identity_.local_size % count == 0;
  }

  // Payload that this rank has sent to other hosts so far, exchanges left out; complete when all its Works are done.
  virtual std::uint64_t bytes_across_hosts() const { return 0; }

  // Memory that this transport moves with the fewest copies; uninitialised.
  virtual at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);

  // Whether peers read this rank's memory where it lies, so that reduce_scattered() may be called.
  virtual bool reads_in_place() const { return false; }
  // Whether the data lie in memory from allocate().
  virtual bool holds(const at::Tensor&) const { return false; }
  // The vector must not be touched before the Work is done.
  virtual std::shared_ptr<Work> reduce_scattered(PeerReduce) {
    ZERO_CHECK(false, "transport ", name(), " reads nothing in place");
  }

  // Memory of a vector that every rank reads in place, all ranks together; null: this transport cannot, or it would not
  // pay.
  virtual std::shared_ptr<SymmetricBuffer> share(std::int64_t, c10::ScalarType) { return nullptr; }

  std::chrono::milliseconds timeout() const { return timeout_; }
  virtual void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 protected:
  // "rank 2 failed: REASON"; empty where there is no memory for it.
  std::string own_failure(const std::string& reason) const noexcept;

  std::chrono::milliseconds timeout_{std::chrono::minutes(30)};

 private:
  net::ProcessInfo identity_;
};

// One constructor per transport; each is the only thing its file shows.
std::unique_ptr<Transport> make_local(const net::ProcessInfo& identity = {});
// Processes of one host; blocks until all have come or `timeout` is over (CommError naming who is missing).
// `look` is called now and then meanwhile, and by who waits later; it may throw a CommError. Threads of one process may
// be the ranks, too: each passes the same `mappings`, which are used until it returns. A thread that ends and leaves
// its transport is not noticed.
std::unique_ptr<Transport> make_shm(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                    const std::function<void()>& abort_check = nullptr,
                                    shm::Mappings* mappings = nullptr);
// c10d over TCP, any hosts.
std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
// Shared memory inside each host and c10d between them. Where hosts have different numbers of ranks, or ranks are not
// numbered host by host, all of it over TCP as make_gloo; a ConfigError on every rank if it was asked for.
std::unique_ptr<Transport> make_shm_gloo(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                         bool asked = false);
// GPUs; opens the plug-in library libzero_nccl.so, ConfigError with the reason where that is not possible.
std::unique_ptr<Transport> make_nccl(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);

}  // namespace zero::comm
