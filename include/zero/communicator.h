// Ranks, and collectives on flat tensors between them. A Communicator is a value facade over a
// transport: "local", "thread", "shm", "gloo", "nccl". It knows nothing of parameters.
//
// All ranks call the same collectives in the same order. Sums are taken in fp32 in rank order
// whatever the dtype, so a result does not depend on the transport.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/work.h>

namespace at {
class Tensor;
}
namespace c10 {
enum class ScalarType : int8_t;
}

namespace zero {
namespace comm {
struct ScatteredSum;
class SharedVector;
class Transport;
struct Identity;
}  // namespace comm

// Payload bytes this rank sends, by the volume of a ring or direct algorithm:
// all-gather and reduce-scatter of S bytes (N-1)/N*S, all-reduce twice that, all-to-all
// (N-1)/N*S, broadcast S from the root to N-1 ranks counted as (N-1)/N*S on every rank.
struct CommStats {
  struct Row {
    std::uint64_t calls = 0, bytes_sent = 0;
  };
  std::map<std::string, Row> by_op;  // "all_gather" "reduce_scatter" "reduce_scatter_quantized" ...
  Row control;                       // hashes, norms, flags, barriers: not payload
  // Of the payload, what this rank itself has sent to other hosts. On several hosts an all-gather of S bytes sends each
  // shard to every other host once: (H-1)/N*S for H hosts. A reduce-scatter sends (H-1)/H*S: every rank's part goes to
  // its owner, who sums in rank order.
  std::uint64_t bytes_across_hosts = 0;
  std::uint64_t bytes_sent() const;  // sum over by_op
};

class Communicator {
 public:
  // Reads the variables of torchrun (and `zero run`), Open MPI, MPICH or Slurm; a world of one
  // without any. ZERO_TRANSPORT chooses the transport, ZERO_TIMEOUT_S the longest wait.
  // Throws ConfigError for half a set of variables, CommError when the peers do not come.
  static std::shared_ptr<Communicator> from_env();
  // A world of one that copies nothing.
  static std::shared_ptr<Communicator> local();

  explicit Communicator(std::unique_ptr<comm::Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  std::string transport() const;

  // Flat, contiguous tensors of one dtype. out.numel == size * in.numel. `in` may be rank's own
  // part of `out`. `of` names what is gathered: ranks that gather different things of one size at a time
  // hear of it by a CommError (not over "nccl") instead of mixing them.
  std::shared_ptr<Work> all_gather(at::Tensor out, const at::Tensor& in, std::string_view of = {});
  // Sum in fp32 in rank order, rounded once to out's dtype. in.numel == size * out.numel. `out`
  // may be rank's own part of `in`; the rest of `in` is left as it was.
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, const at::Tensor& in);
  // Sum; the same bits as reduce_scatter followed by all_gather.
  std::shared_ptr<Work> all_reduce(at::Tensor inout);
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root);
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in);
  void barrier();

  // The run has ended elsewhere, by the failure of `rank`: the same for the waits of this communicator, on all ranks.
  void stop(const std::string& reason, int rank) noexcept;

  // Small control messages, one per rank, of any length; counted as control. Blocking.
  std::vector<std::string> exchange(std::string_view mine);

  // Tells every peer that this rank failed: their waits throw CommError naming this rank and
  // `reason`. Never throws.
  void abort(const std::string& reason) noexcept;

  // Memory for communication, uninitialised; what the transport can move with the fewest copies.
  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);

  // A flat vector of size() shards that every rank reads where they rest; null where the transport has no such memory
  // or the shard is too small for it. All ranks call it together.
  std::shared_ptr<comm::SharedVector> share(std::int64_t shard_numel, c10::ScalarType dtype);
  // Waits until all of it may be read. Counts as the all_gather that it stands for.
  void gather(comm::SharedVector& vector);

  // The ranks of this host, `count` of them that are numbered one after the other and this one among them, as a world
  // of their own, whose errors name ranks of this one. All ranks call it together. ConfigError unless
  // has_neighbours(count): processes, numbered host by host, and count divides the ranks of every host.
  std::shared_ptr<Communicator> neighbours(int count);
  bool has_neighbours(int count) const;

  // reduce_scatter for slow links: every part is sent as integers of 8 or 4 bits, 256 elements to a scale (ZeRO++'s
  // qgZ, arXiv:2306.10209). Lossy; ranks of one host are summed exactly first. Where quantizes() is false nothing would
  // be saved, and it is reduce_scatter.
  std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, const at::Tensor& in, int bits);
  bool quantizes() const;

  // Whether ranks read each other's memory, so that reduce_scattered() may be called.
  bool reads_in_place() const;
  // Whether the data lie in memory from allocate(), where other ranks can read them.
  bool holds(const at::Tensor& tensor) const;
  // Reduce-scatter (to_all: all-reduce) of a vector that lies in stretches of memory
  // (src/runtime/comm/tensor_segments.h).
  std::shared_ptr<Work> reduce_scattered(comm::ScatteredSum sum);

  // Longest wait in one operation.
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  CommStats stats() const;
  void reset_stats();

 private:
  std::unique_ptr<comm::Transport> transport_;
  struct State;
  std::unique_ptr<State> state_;
};

// Faults to inject into ranks-as-threads, for tests and simulation.
struct ThreadFaults {
  // Called by each rank before every collective with (rank, sequence number, operation). It may
  // sleep (a delay) or throw (a failure of that rank).
  std::function<void(int rank, std::uint64_t sequence, std::string_view op)> before;
  std::chrono::milliseconds timeout{60000};
};

// Ranks as threads of this process, each with its own Communicator; returns when all have
// ended; rethrows the first failure in time (the others are told by abort). For tests and simulation.
void run_ranks(int size, const std::function<void(std::shared_ptr<Communicator>)>& body);
void run_ranks(int size, const ThreadFaults& faults, const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace zero
