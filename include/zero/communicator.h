// Ranks, and collectives on flat tensors between them. A Communicator joins the ranks of a run, or of a group that is
// split from it, over one transport: "local", "thread", "shm", "gloo", "shm+gloo", "nccl", "c10d". It knows nothing of
// parameters.
//
// Collective: all ranks call it, in the same order. Sums are taken in fp32 in rank order whatever the dtype, so a
// result does not depend on the transport. One thread at a time may use a Communicator.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/work.h>

namespace at {
class Tensor;
}
namespace c10 {
enum class ScalarType : int8_t;
}

namespace zero {
class Communicator;
namespace comm {
class Group;
std::shared_ptr<Group> group_of(const Communicator& communicator);  // what the engine works with
}  // namespace comm

// Payload bytes this rank sends, by the volume of a ring or direct algorithm:
// all-gather and reduce-scatter of S bytes (N-1)/N*S, all-reduce twice that, all-to-all
// (N-1)/N*S, broadcast S from the root to N-1 ranks counted as (N-1)/N*S on every rank.
struct ZERO_API CommStats {
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

// Errors of all methods: ConfigError for a wrong argument, on the rank that passed it and before anything is sent, so
// the Communicator stays usable. CommError where a peer failed, ended, was late or made another call; its rank() is the
// run's number of that rank, also in a group. The Communicator is unusable afterwards, and so is every other one that
// was split from the same one.
//
// Collectives on tensors begin at once and return; the Work is waited for, in any order, and keeps its tensors. Over
// several groups of one run, ranks wait in the order in which the operations began. Tensors are flat and contiguous, of
// one dtype and device: sums take fp32, bf16 and fp16, the others any dtype.
class ZERO_API Communicator {
 public:
  // Collective, blocking. Reads the variables of torchrun (and `zero run`), Open MPI, MPICH or Slurm; a world of one
  // without any. ZERO_TRANSPORT chooses the transport, ZERO_TIMEOUT_S the longest wait.
  // Throws ConfigError for half a set of variables, CommError when the peers do not come.
  static std::shared_ptr<Communicator> from_env();
  // A world of one that copies nothing. Local.
  static std::shared_ptr<Communicator> local();
  // The ranks of a c10d process group that the program has already; include <zero/process_group.h>, which says more.
  template <class Pointer>
  static std::shared_ptr<Communicator> from_process_group(const Pointer& group);

  explicit Communicator(std::shared_ptr<comm::Group> group);
  // Local. Waits up to a few seconds for peers to receive what this rank has sent.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Local. In a group, the group's.
  int rank() const;
  int size() const;
  // Among the ranks of this host.
  int local_rank() const;
  int local_size() const;
  std::string transport() const;

  // Collective. out.numel == size * in.numel; `in` may be this rank's own part of `out`. `of` names what is gathered:
  // ranks that gather different things of one size at a time hear of it by a CommError (not over "nccl" and "c10d")
  // instead of mixing them.
  std::shared_ptr<Work> all_gather(at::Tensor out, const at::Tensor& in, std::string_view of = {});
  // Collective. Sum in fp32 in rank order, rounded once to out's dtype. in.numel == size * out.numel. `out` may be this
  // rank's own part of `in`; the rest of `in` is left as it was.
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, const at::Tensor& in);
  // Collective. Sum; the same bits as reduce_scatter followed by all_gather.
  std::shared_ptr<Work> all_reduce(at::Tensor inout);
  // Collective. The root's values on every rank.
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root);
  // Collective. Part p of `in` goes to rank p. out.numel == in.numel, a multiple of size; separate memory.
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in);
  // Collective, blocking.
  void barrier();
  // Collective, blocking. Small control messages of any length, one per rank, in rank order; counted as control.
  std::vector<std::string> all_gather_bytes(std::string_view mine);
  [[deprecated("use all_gather_bytes")]] std::vector<std::string> exchange(std::string_view mine) {
    return all_gather_bytes(mine);
  }

  // Collective, blocking, as MPI_Comm_split: ranks of one color become a Communicator of their own, numbered by key,
  // then by rank here. A color below 0 takes part in the call and gets null. A group may be split again. It has this
  // one's timeout, counts for itself, names ranks of the run in its errors, and keeps this one's connections while it
  // lives. Groups share their end: a failure in one is told to all ranks of the run.
  // ConfigError on all ranks where one has operations that it has not waited for, or the transport is nccl or c10d.
  std::shared_ptr<Communicator> split(int color, int key);

  // Local. Tells every peer that this rank failed: their waits throw CommError naming this rank and `reason`. Never
  // throws.
  void abort(const std::string& reason) noexcept;

  // Local. Memory for communication, uninitialised; what the transport can move with the fewest copies.
  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);

  // Local. Longest wait in one operation; of those that begin after set_timeout.
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  // Local. What this Communicator has sent since the start or the last reset; its groups count for themselves.
  CommStats stats() const;
  void reset_stats();

 private:
  friend std::shared_ptr<comm::Group> comm::group_of(const Communicator& communicator);
  std::shared_ptr<comm::Group> group_;
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
ZERO_API void run_ranks(int size, const std::function<void(std::shared_ptr<Communicator>)>& body);
ZERO_API void run_ranks(int size, const ThreadFaults& faults,
                        const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace zero
