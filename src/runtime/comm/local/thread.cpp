// Ranks as threads of one process, for tests and simulation. Each rank posts its part of an
// operation into a record that all share (begin), and takes what it needs once all have come
// (wait). Posted data is copied, so no rank's memory is read by another and waits may come in any
// order. Speed is not the aim here; noticing every misuse is.
#include <omp.h>
#include <torch/torch.h>

#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <zero/communicator.h>
#include <zero/errors.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/transport.h"

namespace zero {
namespace comm {
namespace {

// What one rank gave to an operation.
struct Posted {
  bool here = false;
  std::unique_ptr<char[]> data;
  std::string message;
};

// One operation of all ranks. `posted` is only written before its rank is `here`, and only read
// once all are.
struct Operation {
  Operation(Call call, int first, int size)
      : call(std::move(call)), first(first), posted(static_cast<std::size_t>(size)) {}
  const Call call;  // as its first rank made it
  const int first;
  std::vector<Posted> posted;
  int come = 0, gone = 0;
};

// The first thing that went wrong; nothing works after it.
struct Failure {
  int rank = -1;    // that failed, -1: not one alone
  int teller = -1;  // that noticed
  std::string text;
  std::string hint = {};
};

// What the ranks share.
class World {
 public:
  World(int size, const ThreadFaults& faults) : size(size), faults(faults), ended_(static_cast<std::size_t>(size)) {}

  std::shared_ptr<Operation> post(int rank, std::uint64_t sequence, const Call& call, Posted mine) {
    std::lock_guard lock(mutex_);
    if (failure_) throw error_of(call.op, rank, sequence);
    auto& operation = operations_[sequence];
    if (!operation) operation = std::make_shared<Operation>(call, rank, size);
    if (!(operation->call == call)) {
      fail({-1, rank,
            base::join("got different calls, expected the same on every rank: rank ", operation->first, " calls ",
                       operation->call.text(), ", rank ", rank, " calls ", call.text()),
            kSameCallsHint});
      throw error_of(call.op, rank, sequence);
    }
    mine.here = true;
    operation->posted[static_cast<std::size_t>(rank)] = std::move(mine);
    ++operation->come;
    if (operation->come == size) changed_.notify_all();
    return operation;
  }

  // Returns when all ranks have posted.
  void await(const Operation& operation, int rank, std::uint64_t sequence, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return operation.come == size || failure_ || absent_for_ever(operation) >= 0; };
    if (!changed_.wait_for(lock, timeout, over)) {
      const auto absent = absent_of(operation);
      fail({absent.size() == 1 ? absent[0] : -1, rank,
            base::join("got nothing from ", ranks_text(absent), " within ", duration_text(timeout), ", expected ",
                       operation.call.text(), " from all ", size, " ranks")});
    }
    if (operation.come == size) return;
    if (!failure_) {
      const int absent = absent_for_ever(operation);
      fail({absent, rank,
            base::join("rank ", absent, " has ended, expected ", operation.call.text(), " from all ", size, " ranks")});
    }
    throw error_of(operation.call.op, rank, sequence);
  }

  bool would_block(const Operation& operation) {
    std::lock_guard lock(mutex_);
    return operation.come < size && !failure_ && absent_for_ever(operation) < 0;
  }

  // A rank needs the operation no longer.
  void leave(std::uint64_t sequence, Operation& operation) {
    std::lock_guard lock(mutex_);
    if (++operation.gone == size) operations_.erase(sequence);
  }

  void abort(int rank, const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (!failure_) fail({rank, rank, base::join("rank ", rank, " failed: ", reason)});
  }

  void end(int rank) {
    std::lock_guard lock(mutex_);
    ended_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();
  }

  // The rank whose error is the first one, -1 when all went well.
  int teller() {
    std::lock_guard lock(mutex_);
    return failure_ ? failure_->teller : -1;
  }

  const int size;
  const ThreadFaults faults;

 private:
  // The following need the lock.
  void fail(Failure failure) {
    if (!failure_) failure_ = std::make_unique<Failure>(std::move(failure));
    changed_.notify_all();
  }

  CommError error_of(const std::string& op, int rank, std::uint64_t sequence) const {
    return CommError(at_call(op, failure_->text, rank, size, sequence, failure_->hint), failure_->rank);
  }

  std::vector<int> absent_of(const Operation& operation) const {
    std::vector<int> absent;
    for (int r = 0; r < size; ++r)
      if (!operation.posted[static_cast<std::size_t>(r)].here) absent.push_back(r);
    return absent;
  }

  int absent_for_ever(const Operation& operation) const {
    for (int r = 0; r < size; ++r)
      if (!operation.posted[static_cast<std::size_t>(r)].here && ended_[static_cast<std::size_t>(r)]) return r;
    return -1;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Operation>> operations_;
  std::unique_ptr<Failure> failure_;
  std::vector<bool> ended_;
};

// Takes what this rank needs from a complete operation.
using Take = std::function<void(const Operation&)>;

class ThreadWork final : public Work {
 public:
  ThreadWork(std::shared_ptr<World> world, std::shared_ptr<Operation> operation, int rank, std::uint64_t sequence,
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
  std::shared_ptr<Operation> operation_;  // null once taken
  const int rank_;
  const std::uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  Take take_;
  std::exception_ptr error_;
};

net::Identity identity_of(int rank, int size) {
  net::Identity identity;
  identity.rank = identity.local_rank = rank;
  identity.size = identity.local_size = size;
  identity.source = "threads";
  return identity;
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<World> world, int rank)
      : Transport(identity_of(rank, world->size)), world_(std::move(world)) {
    timeout_ = world_->faults.timeout;
  }

  std::string name() const override { return "thread"; }
  bool has_neighbours(int) const override { return false; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    const Call call{"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)};
    return begin(call, copy_of(in), [out, size = size()](const Operation& all) {
      const auto part = out.nbytes() / static_cast<std::size_t>(size);
      auto* to = bytes_of(out);
      for (const auto& posted : all.posted) {
        if (part > 0) std::memcpy(to, posted.data.get(), part);
        to += part;
      }
    });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    const Call call{"reduce_scatter", in.scalar_type(), in.numel()};
    return begin(call, copy_of(in), [out, rank = rank()](const Operation& all) {
      sum(out, all, out.nbytes() * static_cast<std::size_t>(rank));
    });
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    const Call call{"all_reduce", inout.scalar_type(), inout.numel()};
    return begin(call, copy_of(inout), [inout](const Operation& all) { sum(inout, all, 0); });
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    const Call call{"broadcast", inout.scalar_type(), inout.numel(), root};
    return begin(call, rank() == root ? copy_of(inout) : Posted{}, [inout, root, rank = rank()](const Operation& all) {
      if (rank == root || inout.numel() == 0) return;
      std::memcpy(bytes_of(inout), all.posted[static_cast<std::size_t>(root)].data.get(), inout.nbytes());
    });
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in) override {
    const Call call{"all_to_all", in.scalar_type(), in.numel()};
    return begin(call, copy_of(in), [out, size = size(), rank = rank()](const Operation& all) {
      const auto part = out.nbytes() / static_cast<std::size_t>(size);
      if (part == 0) return;
      auto* to = bytes_of(out);
      for (const auto& posted : all.posted) {
        std::memcpy(to, posted.data.get() + part * static_cast<std::size_t>(rank), part);
        to += part;
      }
    });
  }

  std::vector<std::string> exchange(std::string_view mine) override {
    std::vector<std::string> messages;
    Posted posted;
    posted.message = mine;
    begin({"exchange"}, std::move(posted), [&messages](const Operation& all) {
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

  // out = the sum over ranks of what each posted from `offset` bytes on.
  static void sum(const at::Tensor& out, const Operation& all, std::size_t offset) {
    std::vector<const void*> parts;
    for (const auto& posted : all.posted) parts.push_back(posted.data.get() + offset);
    const auto dtype = sum_dtype(out.scalar_type());
    kernels::sum_parts(out.mutable_data_ptr(), dtype, parts.data(), static_cast<int>(parts.size()), dtype, out.numel());
  }

  std::shared_ptr<Work> begin(const Call& call, Posted mine, Take take) {
    const auto sequence = sequence_++;
    if (world_->faults.before) world_->faults.before(rank(), sequence, call.op);
    auto operation = world_->post(rank(), sequence, call, std::move(mine));
    return std::make_shared<ThreadWork>(world_, std::move(operation), rank(), sequence, timeout_, std::move(take));
  }

  const std::shared_ptr<World> world_;
  std::uint64_t sequence_ = 0;
};

// Runs `body` as one rank; its error, if any.
std::exception_ptr run_rank(const std::shared_ptr<World>& world, int rank,
                            const std::function<void(std::shared_ptr<Communicator>)>& body) {
  // The ranks share the cores already. Torch sets its own number when a thread first asks for it.
  at::get_num_threads();
  omp_set_num_threads(1);
  std::exception_ptr error;
  std::string reason;
  try {
    body(std::make_shared<Communicator>(std::make_unique<ThreadTransport>(world, rank)));
  } catch (const std::exception& e) {
    error = std::current_exception();
    reason = e.what();
  } catch (...) {
    error = std::current_exception();
    reason = "an exception that is not a std::exception";
  }
  if (error) world->abort(rank, reason);
  world->end(rank);
  return error;
}

}  // namespace
}  // namespace comm

void run_ranks(int size, const ThreadFaults& faults, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  if (size < 1) throw ConfigError(base::join("[run_ranks] got ", size, " ranks, expected 1 or more"));
  if (faults.timeout.count() <= 0)
    throw ConfigError(base::join("[run_ranks] got a timeout of ", faults.timeout.count(), " ms, expected more than 0"));
  const auto world = std::make_shared<comm::World>(size, faults);
  std::mutex mutex;
  std::vector<std::pair<int, std::exception_ptr>> errors;  // in time
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
  // An error is told to the others before it arrives here, so theirs may arrive earlier.
  const int teller = world->teller();
  for (const auto& [rank, error] : errors)
    if (rank == teller) std::rethrow_exception(error);
  if (!errors.empty()) std::rethrow_exception(errors.front().second);
}

void run_ranks(int size, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  run_ranks(size, ThreadFaults{}, body);
}

}  // namespace zero
