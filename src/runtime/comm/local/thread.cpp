// Ranks as threads of one process, for tests and simulation. Each rank posts a copy of its data to a shared record
// (begin) and takes its result once all ranks have posted (wait). No rank reads another's memory, and operations may be
// waited for in any order. Optimized for detecting misuse, not for speed.
#include <ATen/Parallel.h>
#include <omp.h>
#include <torch/types.h>

#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>

#include <zero/communicator.h>
#include <zero/errors.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/group.h"
#include "comm/transport.h"

namespace zero {
namespace comm {
namespace {

// The data that one rank contributed to an operation.
struct Posted {
  bool here = false;
  std::unique_ptr<char[]> data;
  Parts parts;  // of an all_to_all
  std::string message;
};

// One operation of all ranks. `posted` is written only before its rank is `here`, and read only after all are.
struct ThreadOperation {
  ThreadOperation(Call call, int first, int size)
      : call(std::move(call)), first(first), posted(static_cast<std::size_t>(size)) {}
  const Call call;  // as the first rank called it
  const int first;
  std::vector<Posted> posted;
  int come = 0, gone = 0;
  bool refused = false;  // all ranks have posted, and their parts differ
};

// The first failure; all later operations fail. Ranks are those of the run.
struct Failure {
  int rank = -1;    // the rank that failed; -1: not one rank alone
  int teller = -1;  // the rank that detected it
  std::string text;
  std::string hint = {};
};

class World;

// State shared by the ranks of a run and its groups.
struct Run {
  Run(int size, const ThreadFaults& faults) : faults(faults), ended(static_cast<std::size_t>(size)) {}
  const ThreadFaults faults;
  std::mutex mutex;  // guards the members below and those of the worlds
  std::condition_variable changed;
  std::unique_ptr<Failure> failure;
  std::vector<bool> ended;
  // Groups that some of their ranks have not entered yet, with the number that have.
  std::map<std::string, std::pair<std::shared_ptr<World>, int>> opening;

  // Requires the mutex.
  void fail(Failure first) {
    if (!failure) failure = std::make_unique<Failure>(std::move(first));
    changed.notify_all();
  }
};

// The ranks of one communicator: those of the run, or of a group.
class World {
 public:
  World(std::shared_ptr<Run> run, const net::ProcessInfo& identity)
      : size(identity.size), run(std::move(run)), identity_(identity) {}

  std::shared_ptr<ThreadOperation> post(int rank, std::uint64_t sequence, const Call& call, Posted mine) {
    std::lock_guard lock(run->mutex);
    if (run->failure) throw error_of(call.op, rank, sequence);
    auto& operation = operations_[sequence];
    if (!operation) operation = std::make_shared<ThreadOperation>(call, rank, size);
    if (!(operation->call == call)) {
      run->fail({-1, identity_.rank_in_run(rank),
                 base::join("got different calls, expected the same on every rank: ", name(operation->first), " calls ",
                            operation->call.text(), ", ", name(rank), " calls ", call.text()),
                 kSameCallsHint});
      throw error_of(call.op, rank, sequence);
    }
    mine.here = true;
    operation->posted[static_cast<std::size_t>(rank)] = std::move(mine);
    ++operation->come;
    if (operation->come == size) {
      compare_parts(*operation, rank);
      run->changed.notify_all();
    }
    return operation;
  }

  // Blocks until all ranks have posted.
  void await(const ThreadOperation& operation, int rank, std::uint64_t sequence, std::chrono::milliseconds timeout) {
    std::unique_lock lock(run->mutex);
    const auto over = [&] { return operation.come == size || run->failure || absent_for_ever(operation) >= 0; };
    if (!run->changed.wait_for(lock, timeout, over)) {
      const auto absent = absent_of(operation);
      run->fail({absent.size() == 1 ? absent[0] : -1, identity_.rank_in_run(rank),
                 base::join("got nothing from ", ranks_text(absent), " within ", duration_text(timeout), ", expected ",
                            operation.call.text(), " from all ", size, " ranks")});
    }
    if (operation.come == size && !operation.refused) return;
    if (!run->failure) {
      const int absent = absent_for_ever(operation);
      run->fail(
          {identity_.rank_in_run(absent), identity_.rank_in_run(rank),
           base::join(name(absent), " has ended, expected ", operation.call.text(), " from all ", size, " ranks")});
    }
    throw error_of(operation.call.op, rank, sequence);
  }

  bool would_block(const ThreadOperation& operation) {
    std::lock_guard lock(run->mutex);
    return operation.come < size && !run->failure && absent_for_ever(operation) < 0;
  }

  // A rank has finished with the operation.
  void leave(std::uint64_t sequence, ThreadOperation& operation) {
    std::lock_guard lock(run->mutex);
    if (++operation.gone == size) operations_.erase(sequence);
  }

  void abort(int rank, const std::string& reason) {
    std::lock_guard lock(run->mutex);
    const int of_run = identity_.rank_in_run(rank);
    run->fail({of_run, of_run, base::join(name(rank), " failed: ", reason)});
  }

  const int size;
  const std::shared_ptr<Run> run;

 private:
  // The following functions require the lock.
  std::string name(int rank) const { return identity_.name_of(rank); }

  CommError error_of(const std::string& op, int rank, std::uint64_t sequence) const {
    const auto& failure = *run->failure;
    return CommError(at_call(op, failure.text, identity_.rank_in_run(rank), static_cast<int>(run->ended.size()),
                             sequence, failure.hint),
                     failure.rank);
  }

  void compare_parts(ThreadOperation& operation, int teller) {
    if (operation.call.op != "all_to_all") return;
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        const auto sent = operation.posted[static_cast<std::size_t>(from)].parts.in[static_cast<std::size_t>(to)];
        const auto expected = operation.posted[static_cast<std::size_t>(to)].parts.out[static_cast<std::size_t>(from)];
        if (sent == expected) continue;
        operation.refused = true;
        run->fail({-1, identity_.rank_in_run(teller), parts_differ(name(from), sent, name(to), expected)});
        return;
      }
    }
  }

  std::vector<int> absent_of(const ThreadOperation& operation) const {
    std::vector<int> absent;
    for (int r = 0; r < size; ++r)
      if (!operation.posted[static_cast<std::size_t>(r)].here) absent.push_back(identity_.rank_in_run(r));
    return absent;
  }

  int absent_for_ever(const ThreadOperation& operation) const {
    for (int r = 0; r < size; ++r)
      if (!operation.posted[static_cast<std::size_t>(r)].here &&
          run->ended[static_cast<std::size_t>(identity_.rank_in_run(r))])
        return r;
    return -1;
  }

  const net::ProcessInfo identity_;  // of any rank; maps ranks to ranks of the run
  std::unordered_map<std::uint64_t, std::shared_ptr<ThreadOperation>> operations_;
};

// Computes this rank's result of a complete operation.
using Take = std::function<void(const ThreadOperation&)>;

class ThreadWork final : public Work {
 public:
  ThreadWork(std::shared_ptr<World> world, std::shared_ptr<ThreadOperation> operation, int rank, std::uint64_t sequence,
             std::chrono::milliseconds timeout, Take take)
      : world_(std::move(world)),
        operation_(std::move(operation)),
        rank_(rank),
        sequence_(sequence),
        timeout_(timeout),
        take_(std::move(take)) {}
  ~ThreadWork() override {
    if (operation_) world_->leave(sequence_, *operation_);
  }

  void wait() override {
    if (error_) std::rethrow_exception(error_);
    if (!operation_) return;
    try {
      world_->await(*operation_, rank_, sequence_, timeout_);
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    take_(*operation_);
    take_ = nullptr;
    world_->leave(sequence_, *operation_);
    operation_ = nullptr;
  }

  bool done() override { return error_ || !operation_ || !world_->would_block(*operation_); }

 private:
  const std::shared_ptr<World> world_;
  std::shared_ptr<ThreadOperation> operation_;  // null once taken
  const int rank_;
  const std::uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  Take take_;
  std::exception_ptr error_;
};

net::ProcessInfo identity_of(int rank, int size) {
  net::ProcessInfo identity;
  identity.rank = identity.local_rank = rank;
  identity.size = identity.local_size = size;
  identity.source = "threads";
  return identity;
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<World> world, const net::ProcessInfo& identity)
      : Transport(identity), world_(std::move(world)) {
    timeout_ = world_->run->faults.timeout;
  }

  std::string name() const override { return "thread"; }
  bool has_neighbours(int) const override { return false; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    const Call call{"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)};
    return begin(call, copy_of(in), [out, size = size()](const ThreadOperation& all) {
      const auto part = out.nbytes() / static_cast<std::size_t>(size);
      auto* to = data_of(out);
      for (const auto& posted : all.posted) {
        if (part > 0) std::memcpy(to, posted.data.get(), part);
        to += part;
      }
    });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    const Call call{"reduce_scatter", in.scalar_type(), in.numel()};
    return begin(call, copy_of(in), [out, rank = rank()](const ThreadOperation& all) {
      sum(out, all, out.nbytes() * static_cast<std::size_t>(rank));
    });
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    const Call call{"all_reduce", inout.scalar_type(), inout.numel()};
    return begin(call, copy_of(inout), [inout](const ThreadOperation& all) { sum(inout, all, 0); });
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    const Call call{"broadcast", inout.scalar_type(), inout.numel(), root};
    return begin(call, rank() == root ? copy_of(inout) : Posted{},
                 [inout, root, rank = rank()](const ThreadOperation& all) {
                   if (rank == root || inout.numel() == 0) return;
                   std::memcpy(data_of(inout), all.posted[static_cast<std::size_t>(root)].data.get(), inout.nbytes());
                 });
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    const auto call = parts.call(in);
    auto mine = copy_of(in);
    mine.parts = std::move(parts);
    return begin(call, std::move(mine), [out, rank = rank()](const ThreadOperation& all) {
      const auto width = out.element_size();
      auto* to = data_of(out);
      for (const auto& posted : all.posted) {
        const auto& numels = posted.parts.in;
        const auto before = std::accumulate(numels.begin(), numels.begin() + rank, std::int64_t{0});
        const auto bytes = numels[static_cast<std::size_t>(rank)] * width;
        if (bytes > 0) std::memcpy(to, posted.data.get() + before * width, bytes);
        to += bytes;
      }
    });
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    std::vector<std::string> messages;
    Posted posted;
    posted.message = mine;
    begin({"all_gather_bytes"}, std::move(posted), [&messages](const ThreadOperation& all) {
      for (const auto& p : all.posted) messages.push_back(p.message);
    })->wait();
    return messages;
  }

  void abort(const std::string& reason) noexcept override {
    try {
      world_->abort(rank(), reason);
    } catch (...) {
    }
  }
  void stop(const std::string& reason, int failed) noexcept override {
    try {
      std::lock_guard lock(world_->run->mutex);
      world_->run->fail({failed, rank_in_run(), reason});
    } catch (...) {
    }
  }

  // The first rank to arrive creates the group; the last one removes it from `opening`.
  std::unique_ptr<Transport> split(const Split& split) override {
    auto& run = *world_->run;
    std::lock_guard lock(run.mutex);
    auto& [world, entered] = run.opening[split.identity.run_id];
    if (!world) world = std::make_shared<World>(world_->run, split.identity);
    auto transport = std::make_unique<ThreadTransport>(world, split.identity);
    if (++entered == split.identity.size) run.opening.erase(split.identity.run_id);
    return transport;
  }

 private:
  static Posted copy_of(const at::Tensor& tensor) {
    if (!tensor.is_cpu())
      throw ConfigError("[Communicator] got a tensor on " + tensor.device().str() +
                        ", expected CPU memory between ranks that are threads");
    Posted posted;
    posted.data.reset(new char[tensor.nbytes()]);
    if (tensor.nbytes() > 0) std::memcpy(posted.data.get(), tensor.const_data_ptr(), tensor.nbytes());
    return posted;
  }

  // out = the sum over ranks of the data posted from byte `offset` on.
  static void sum(const at::Tensor& out, const ThreadOperation& all, std::size_t offset) {
    std::vector<const void*> parts;
    for (const auto& posted : all.posted) parts.push_back(posted.data.get() + offset);
    const auto dtype = sum_dtype(out.scalar_type());
    kernels::sum_parts(out.mutable_data_ptr(), dtype, parts.data(), static_cast<int>(parts.size()), dtype, out.numel());
  }

  std::shared_ptr<Work> begin(const Call& call, Posted mine, Take take) {
    const auto sequence = sequence_++;
    if (world_->run->faults.before) world_->run->faults.before(rank_in_run(), sequence, call.op);
    auto operation = world_->post(rank(), sequence, call, std::move(mine));
    return std::make_shared<ThreadWork>(world_, std::move(operation), rank(), sequence, timeout_, std::move(take));
  }

  const std::shared_ptr<World> world_;
  std::uint64_t sequence_ = 0;
};

// Runs `body` as one rank; returns its error, if any.
std::exception_ptr run_rank(const std::shared_ptr<World>& world, int rank,
                            const std::function<void(std::shared_ptr<Communicator>)>& body) {
  // The ranks already share the cores. Torch sets its thread count when a thread first queries it.
  at::get_num_threads();
  omp_set_num_threads(1);
  std::exception_ptr error;
  std::string reason;
  try {
    body(make_communicator(std::make_unique<ThreadTransport>(world, identity_of(rank, world->size))));
  } catch (const std::exception& e) {
    error = std::current_exception();
    reason = e.what();
  } catch (...) {
    error = std::current_exception();
    reason = "an exception that is not a std::exception";
  }
  if (error) world->abort(rank, reason);
  std::lock_guard lock(world->run->mutex);
  world->run->ended[static_cast<std::size_t>(rank)] = true;
  world->run->changed.notify_all();
  return error;
}

}  // namespace
}  // namespace comm

void run_ranks(int size, const ThreadFaults& faults, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  if (size < 1) throw ConfigError(base::join("[run_ranks] got ", size, " ranks, expected 1 or more"));
  if (faults.timeout.count() <= 0)
    throw ConfigError(base::join("[run_ranks] got a timeout of ", faults.timeout.count(), " ms, expected more than 0"));
  const auto run = std::make_shared<comm::Run>(size, faults);
  const auto world = std::make_shared<comm::World>(run, comm::identity_of(0, size));
  std::mutex mutex;
  std::vector<std::pair<int, std::exception_ptr>> errors;  // in order of time
  std::vector<std::thread> threads;
  std::exception_ptr not_started;
  try {
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        auto error = comm::run_rank(world, rank, body);
        std::lock_guard lock(mutex);
        if (error) errors.emplace_back(rank, std::move(error));
      });
  } catch (const std::exception& e) {
    not_started = std::current_exception();
    world->abort(static_cast<int>(threads.size()), base::join("its thread could not be started: ", e.what()));
  }
  for (auto& thread : threads) thread.join();
  if (not_started) std::rethrow_exception(not_started);
  // A rank reports its error to the others before it is recorded here, so their errors may be recorded first.
  const int teller = run->failure ? run->failure->teller : -1;
  for (const auto& [rank, error] : errors)
    if (rank == teller) std::rethrow_exception(error);
  if (!errors.empty()) std::rethrow_exception(errors.front().second);
}

void run_ranks(int size, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  run_ranks(size, ThreadFaults{}, body);
}

}  // namespace zero
