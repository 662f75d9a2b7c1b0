// Ranks, and collectives between them on flat tensors. A Communicator connects the ranks of a run, or of a group split
// from it, over one transport: "local", "thread", "shm", "gloo", "shm+gloo", "nccl", "c10d", "fake", or for ranks that
// share a GPU "staged shm", "staged gloo" or "staged shm+gloo".
//
// Collective calls are made by all ranks, in the same order. Sums are taken in fp32 in rank order for every dtype, so
// results do not depend on the transport. Use a Communicator from one thread at a time.
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
std::shared_ptr<Group> group_of(const Communicator& communicator);  // for the engine
}  // namespace comm

// Payload bytes that this rank sends, by the volume of a ring or direct algorithm on N ranks. For S bytes, all-gather
// and reduce-scatter count (N-1)/N*S, and all-reduce twice that. A broadcast's S from the root to N-1 ranks is counted
// as (N-1)/N*S on every rank. An all-to-all counts what it sends to the other ranks.
struct ZERO_API CommStats {
  struct Row {
    std::uint64_t calls = 0, bytes_sent = 0;
  };
  std::map<std::string, Row> by_op;  // "all_gather" "reduce_scatter" "reduce_scatter_quantized" ...
  Row control;                       // hashes, norms, flags, barriers; not part of the payload
  // The part of the payload that this rank sends to other hosts. On H hosts an all-gather of S bytes sends each shard
  // to every other host once, (H-1)/N*S. A reduce-scatter sends (H-1)/H*S: every rank's part goes to its owner, which
  // sums in rank order.
  std::uint64_t bytes_across_hosts = 0;
  std::uint64_t bytes_sent() const;  // sum over by_op
};

// Errors of all methods. ConfigError: a wrong argument, thrown on the rank that passed it before anything is sent; the
// Communicator stays usable. CommError: a peer failed, exited, timed out or made a different call. Its rank() is a rank
// of the run, also in a split group. Afterwards this Communicator and all others split from the same one are unusable.
//
// Collectives on tensors start and return at once. The returned Work holds the tensors; wait for it in any order, also
// over groups. Operations of several groups of one run start in the same order on all ranks. Tensors are flat,
// contiguous, and of one dtype and device. Reductions take fp32, bf16 and fp16; the other collectives take any dtype.
class ZERO_API Communicator {
 public:
  // Collective, blocking. Reads the environment variables of torchrun (and `zero run`), Open MPI, MPICH or Slurm;
  // without any, the world size is 1. ZERO_TRANSPORT selects the transport, ZERO_TIMEOUT_S sets the timeout. Throws
  // ConfigError if the variables are incomplete, CommError if a peer does not connect in time.
  static std::shared_ptr<Communicator> from_env();
  // Local. Whether from_env() finds a launcher's variables. Throws ConfigError if they are incomplete.
  static bool launched();
  // World size 1. Copies nothing. Local.
  static std::shared_ptr<Communicator> local();
  // Wraps an existing c10d process group. Include <zero/process_group.h>, which documents it.
  template <class Pointer>
  static std::shared_ptr<Communicator> from_process_group(const Pointer& group);

  explicit Communicator(std::shared_ptr<comm::Group> group);
  // Local. Waits up to a few seconds until peers have received what this rank sent.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Local. Within this Communicator's group.
  int rank() const;
  int size() const;
  // Local. Among the ranks of this host.
  int local_rank() const;
  int local_size() const;
  std::string transport() const;

  // Collective. out.numel == size * in.numel. `in` may be this rank's own part of `out`. `of` identifies what is
  // gathered: if ranks gather different things of equal size at the same time, they get a CommError instead of mixed
  // data (not with "nccl" and "c10d").
  std::shared_ptr<Work> all_gather(at::Tensor out, const at::Tensor& in, std::string_view of = {});
  // Collective. Sums in fp32 in rank order and rounds once to out's dtype. in.numel == size * out.numel. `out` may be
  // this rank's own part of `in`; the rest of `in` is unchanged.
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, const at::Tensor& in);
  // Collective. Sum, bit-identical to reduce_scatter followed by all_gather.
  std::shared_ptr<Work> all_reduce(at::Tensor inout);
  // Collective. Copies the root's values to every rank.
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root);
  // Collective. Part p of `in` goes to rank p. out.numel == in.numel, a multiple of size. `in` and `out` must not
  // overlap.
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in);
  // Collective. The same with parts of any size, one after another: in_numels[p] elements go to rank p, out_numels[p]
  // come from it. 0 is allowed. out_numels[p] must be what in_numels[rank()] is on rank p; otherwise CommError with
  // both numbers (not checked with "nccl").
  std::shared_ptr<Work> all_to_all(at::Tensor out, const at::Tensor& in, const std::vector<std::int64_t>& out_numels,
                                   const std::vector<std::int64_t>& in_numels);
  // Collective, blocking.
  void barrier();
  // Collective, blocking. Gathers one string per rank, in rank order. For control messages; counted as control.
  std::vector<std::string> all_gather_bytes(std::string_view mine);
  [[deprecated("use all_gather_bytes")]] std::vector<std::string> exchange(std::string_view mine) {
    return all_gather_bytes(mine);
  }

  // Collective, blocking, as MPI_Comm_split: ranks with the same color form a new Communicator, ordered by key, then by
  // rank. A rank with a negative color takes part in the call and gets nullptr. A group can be split again.
  // A group inherits the timeout and has its own statistics. With a `name`, its errors contain it, and the run's
  // Communicator counts the group's calls as well, as "NAME.all_reduce" and so on. It keeps the connections of this
  // Communicator alive, and its errors name ranks of the run. A failure in one group ends all groups of the run. Throws
  // ConfigError on all ranks if one of them has unfinished operations, or over a process group that is not gloo's.
  std::shared_ptr<Communicator> split(int color, int key, std::string_view name = {});

  // Local. Reports this rank's failure to all peers: their waits throw CommError with this rank and `reason`.
  void abort(const std::string& reason) noexcept;

  // Local. Returns uninitialized memory that this transport can communicate with the fewest copies. Flat.
  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype);

  // Local. The longest wait of one operation. set_timeout affects operations that start after it.
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  // Local. Since construction or the last reset. Groups split from this Communicator count separately; the run's
  // Communicator also counts those that have a name.
  CommStats stats() const;
  void reset_stats();

 private:
  friend std::shared_ptr<comm::Group> comm::group_of(const Communicator& communicator);
  std::shared_ptr<comm::Group> group_;
};

// Fault injection for ranks as threads.
struct ThreadFaults {
  // Called by each rank before every collective. It may sleep (a delay) or throw (a failure of that rank).
  std::function<void(int rank, std::uint64_t sequence, std::string_view op)> before;
  std::chrono::milliseconds timeout{60000};
};

// Runs each rank as a thread of this process with its own Communicator. Blocks until all threads have ended, then
// rethrows the first failure; it reaches the other ranks as by abort(). For tests and simulation.
ZERO_API void run_ranks(int size, const std::function<void(std::shared_ptr<Communicator>)>& body);
ZERO_API void run_ranks(int size, const ThreadFaults& faults,
                        const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace zero
