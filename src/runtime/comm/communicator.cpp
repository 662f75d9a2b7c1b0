// The facade of every transport: checks the arguments, so that a transport may trust them, and
// counts what is sent. Nothing here moves data or waits.
#include <zero/communicator.h>

#include <torch/torch.h>
#include <unistd.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/transport.h"
#include "kernels/quantize.h"
#include "observe/status_page.h"

namespace zero {

std::uint64_t CommStats::bytes_sent() const {
  std::uint64_t sum = 0;
  for (const auto& [op, row] : by_op) sum += row.bytes_sent;
  return sum;
}

namespace comm {

at::Tensor Transport::allocate(std::int64_t numel, c10::ScalarType dtype) { return at::empty({numel}, dtype); }

std::unique_ptr<Transport> Transport::neighbours(int count) {
  return make_shm(identity_.of_neighbours(count), timeout_);
}

namespace {

// The checks of one call; every message names the operation and the rank.
class Arguments {
 public:
  Arguments(const char* op, const Transport& transport) : op_(op), rank_(transport.rank()), size_(transport.size()) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (condition) return;
    throw ConfigError(
        base::join("[Communicator::", op_, "] got ", base::join(parts...), " (rank ", rank_, "/", size_, ")"));
  }

  void flat(const char* name, const at::Tensor& tensor) const {
    require(tensor.defined(), "an undefined tensor as `", name, "`, expected a flat tensor");
    require(tensor.layout() == at::kStrided && tensor.dim() == 1 && tensor.is_contiguous(), "`", name, "` of shape ",
            tensor.sizes(), tensor.layout() == at::kStrided && !tensor.is_contiguous() ? " that is not contiguous" : "",
            ", expected a flat contiguous tensor. Hint: pass tensor.contiguous().view({-1})");
    require(tensor.is_cpu() || tensor.is_cuda(), "`", name, "` on ", tensor.device().str(),
            ", expected CPU or CUDA memory");
    const auto end = static_cast<std::size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
    require(tensor.numel() == 0 || tensor.storage().nbytes() >= end, "`", name, "` of ", tensor.numel(),
            " elements whose storage holds ", tensor.storage().nbytes(), " bytes, expected ", end,
            " or more. Hint: the memory was released; gather it first");
  }

  void alike(const at::Tensor& out, const at::Tensor& in) const {
    flat("out", out);
    flat("in", in);
    require(out.scalar_type() == in.scalar_type(), "`in` of dtype ", dtype_text(in.scalar_type()), ", expected ",
            dtype_text(out.scalar_type()), " as `out`");
    require(out.device() == in.device(), "`in` on ", in.device().str(), ", expected ", out.device().str(), " as `out`");
  }

  void sums(const at::Tensor& tensor) const {
    require(summable(tensor.scalar_type()), "dtype ", dtype_text(tensor.scalar_type()),
            ", expected fp32, bf16 or fp16");
  }

  // `part` is apart from `whole`, or exactly the part of this rank.
  void apart_or_own(const at::Tensor& whole, const at::Tensor& part, bool own_allowed) const {
    if (part.numel() == 0) return;
    const auto* w = static_cast<const char*>(whole.const_data_ptr());
    const auto* p = static_cast<const char*>(part.const_data_ptr());
    if (std::less_equal<>()(w + whole.nbytes(), p) || std::less_equal<>()(p + part.nbytes(), w)) return;
    require(own_allowed && p == w + part.nbytes() * static_cast<std::size_t>(rank_),
            "`in` and `out` that overlap, expected ",
            own_allowed ? "separate memory or this rank's own part of the larger one" : "separate memory");
  }

 private:
  const char* op_;
  int rank_, size_;
};

// Tells the launcher that this rank has begun a collective and that it is through. Only where there
// is a page: elsewhere the transport's own Work is handed out.
class PublishedWork final : public Work {
 public:
  PublishedWork(std::shared_ptr<Work> work, std::uint64_t sequence, const char* op, const at::Tensor& whole)
      : work_(std::move(work)),
        sequence_(sequence),
        op_(op),
        dtype_(dtype_text(whole.scalar_type())),
        numel_(whole.numel()) {}

  void wait() override {
    try {
      work_->wait();
    } catch (const CommError& error) {
      observe::status_page().set_error(error.what(), ExitCode::kPeer);
      throw;
    }
    complete();
  }
  bool done() override {
    const bool done = work_->done();
    if (done) complete();
    return done;
  }

 private:
  void complete() {
    if (std::exchange(told_, true)) return;
    observe::status_page().set_collective(sequence_, op_, dtype_, numel_, observe::CollectiveState::After);
  }
  std::shared_ptr<Work> work_;
  std::uint64_t sequence_;
  const char* op_;
  std::string dtype_;
  std::int64_t numel_;
  bool told_ = false;
};

}  // namespace
}  // namespace comm

struct Communicator::State {
  const pid_t pid = ::getpid();
  CommStats stats;
  bool tells = true;  // the launcher of its collectives, which are numbered through the run; not neighbours
  std::uint64_t across_before = 0;  // the transport's count at the last reset
  std::uint64_t sequence = 0;       // of this rank's collectives, exchange included

  // Starts a collective; `whole` is what all ranks hold together.
  template <class Start>
  std::shared_ptr<Work> publish(const char* op, const at::Tensor& whole, Start start) {
    auto& page = observe::status_page();
    const std::uint64_t mine = sequence++;
    if (!page.active() || !tells) return start();
    page.set_collective(mine, op, comm::dtype_text(whole.scalar_type()), whole.numel(),
                        observe::CollectiveState::Inside);
    try {
      return std::make_shared<comm::PublishedWork>(start(), mine, op, whole);
    } catch (const CommError& error) {
      page.set_error(error.what(), ExitCode::kPeer);
      throw;
    }
  }

  // `bytes_whole`: of the tensor that all ranks hold together.
  void count(const char* op, std::uint64_t bytes_whole, int size, std::uint64_t times = 1) {
    const auto n = static_cast<std::uint64_t>(size);
    auto& row = stats.by_op[op];
    ++row.calls;
    row.bytes_sent += times * (n - 1) * bytes_whole / n;
  }
};

Communicator::Communicator(std::unique_ptr<comm::Transport> transport)
    : transport_(std::move(transport)), state_(std::make_unique<State>()) {
  ZERO_CHECK(transport_ != nullptr, "a Communicator without a transport");
}

// A fork of the rank is not the rank: it has none of the transport's threads, and its sockets and memory are its
// parent's.
Communicator::~Communicator() {
  if (::getpid() != state_->pid) (void)transport_.release();
}

std::shared_ptr<Communicator> Communicator::local() { return std::make_shared<Communicator>(comm::make_local()); }

int Communicator::rank() const { return transport_->rank(); }
int Communicator::size() const { return transport_->size(); }
int Communicator::local_rank() const { return transport_->identity().local_rank; }
int Communicator::local_size() const { return transport_->identity().local_size; }
std::string Communicator::transport() const { return transport_->name(); }

std::shared_ptr<Work> Communicator::all_gather(at::Tensor out, const at::Tensor& in, std::string_view of) {
  const comm::Arguments check("all_gather", *transport_);
  check.alike(out, in);
  check.require(out.numel() == in.numel() * size(), "`out` of ", out.numel(), " elements, expected ",
                in.numel() * size(), " (", size(), " ranks x ", in.numel(), " of `in`)");
  check.apart_or_own(out, in, true);
  auto work = state_->publish("all_gather", out, [&] { return transport_->all_gather(out, in, of); });
  state_->count("all_gather", out.nbytes(), size());
  return work;
}

std::shared_ptr<Work> Communicator::reduce_scatter(at::Tensor out, const at::Tensor& in) {
  const comm::Arguments check("reduce_scatter", *transport_);
  check.alike(out, in);
  check.sums(out);
  check.require(in.numel() == out.numel() * size(), "`in` of ", in.numel(), " elements, expected ",
                out.numel() * size(), " (", size(), " ranks x ", out.numel(), " of `out`)");
  check.apart_or_own(in, out, true);
  auto work = state_->publish("reduce_scatter", in, [&] { return transport_->reduce_scatter(out, in); });
  state_->count("reduce_scatter", in.nbytes(), size());
  return work;
}

std::shared_ptr<Work> Communicator::reduce_scatter_quantized(at::Tensor out, const at::Tensor& in, int bits) {
  if (!quantizes()) return reduce_scatter(std::move(out), in);
  const comm::Arguments check("reduce_scatter_quantized", *transport_);
  check.alike(out, in);
  check.sums(out);
  check.require(bits == 8 || bits == 4, bits, " bits, expected 8 or 4");
  check.require(in.numel() == out.numel() * size(), "`in` of ", in.numel(), " elements, expected ",
                out.numel() * size(), " (", size(), " ranks x ", out.numel(), " of `out`)");
  check.apart_or_own(in, out, true);
  auto work =
      state_->publish("reduce_scatter", in, [&] { return transport_->reduce_scatter_quantized(out, in, bits); });
  const auto bytes = static_cast<std::uint64_t>(kernels::quantized_bytes(out.numel(), bits));
  state_->count("reduce_scatter_quantized", bytes * static_cast<std::uint64_t>(size()), size());
  return work;
}

std::shared_ptr<Work> Communicator::all_reduce(at::Tensor inout) {
  const comm::Arguments check("all_reduce", *transport_);
  check.flat("inout", inout);
  check.sums(inout);
  auto work = state_->publish("all_reduce", inout, [&] { return transport_->all_reduce(inout); });
  state_->count("all_reduce", inout.nbytes(), size(), 2);
  return work;
}

std::shared_ptr<Work> Communicator::broadcast(at::Tensor inout, int root) {
  const comm::Arguments check("broadcast", *transport_);
  check.flat("inout", inout);
  check.require(root >= 0 && root < size(), "root ", root, ", expected 0 to ", size() - 1);
  auto work = state_->publish("broadcast", inout, [&] { return transport_->broadcast(inout, root); });
  state_->count("broadcast", inout.nbytes(), size());
  return work;
}

std::shared_ptr<Work> Communicator::all_to_all(at::Tensor out, const at::Tensor& in) {
  const comm::Arguments check("all_to_all", *transport_);
  check.alike(out, in);
  check.require(out.numel() == in.numel(), "`out` of ", out.numel(), " elements, expected ", in.numel(), " as `in`");
  check.require(in.numel() % size() == 0, in.numel(), " elements, expected a multiple of the ", size(), " ranks");
  check.apart_or_own(out, in, false);
  auto work = state_->publish("all_to_all", in, [&] { return transport_->all_to_all(out, in); });
  state_->count("all_to_all", in.nbytes(), size());
  return work;
}

std::vector<std::string> Communicator::exchange(std::string_view mine) {
  auto& page = observe::status_page();
  const std::uint64_t sequence = state_->sequence++;
  std::vector<std::string> messages;
  try {
    if (state_->tells) page.set_collective(sequence, "exchange", "byte", 0, observe::CollectiveState::Inside);
    messages = transport_->exchange(mine);
    if (state_->tells) page.set_collective(sequence, "exchange", "byte", 0, observe::CollectiveState::After);
  } catch (const CommError& error) {
    page.set_error(error.what(), ExitCode::kPeer);
    throw;
  }
  ++state_->stats.control.calls;
  state_->stats.control.bytes_sent += mine.size() * static_cast<std::uint64_t>(size() - 1);
  return messages;
}

void Communicator::barrier() { exchange({}); }

void Communicator::abort(const std::string& reason) noexcept { transport_->abort(reason); }

at::Tensor Communicator::allocate(std::int64_t numel, c10::ScalarType dtype) {
  comm::Arguments("allocate", *transport_).require(numel >= 0, numel, " elements, expected 0 or more");
  return transport_->allocate(numel, dtype);
}

bool Communicator::quantizes() const { return transport_->quantizes(); }

std::shared_ptr<Communicator> Communicator::neighbours(int count) {
  const comm::Arguments check("neighbours", *transport_);
  check.require(has_neighbours(count), count, " neighbours over ", transport_->name(),
                ", expected processes numbered host by host, and a divisor of the ", local_size(),
                " ranks of this host");
  if (count == 1) return local();
  auto some = std::make_shared<Communicator>(transport_->neighbours(count));
  some->state_->tells = false;
  return some;
}

bool Communicator::has_neighbours(int count) const { return transport_->has_neighbours(count); }

void Communicator::stop(const std::string& reason, int rank) noexcept { transport_->stop(reason, rank); }

bool Communicator::reads_in_place() const { return transport_->reads_in_place(); }
bool Communicator::holds(const at::Tensor& tensor) const { return transport_->holds(tensor); }

std::shared_ptr<Work> Communicator::reduce_scattered(comm::ScatteredSum sum) {
  const comm::Arguments check("reduce_scattered", *transport_);
  check.require(!sum.vector.empty(), "no stretches, expected at least one");
  std::int64_t end = 0;
  for (const auto& stretch : sum.vector) {
    check.flat("vector", stretch.data);
    check.sums(stretch.data);
    check.require(stretch.begin >= end, "a stretch at element ", stretch.begin, " behind one up to ", end,
                  ", expected ascending ones");
    end = stretch.begin + stretch.data.numel();
  }
  check.require(end <= sum.shard_numel * size(), "stretches up to element ", end, ", expected at most ",
                sum.shard_numel * size());
  check.require(!sum.out.defined() || (sum.out.numel() == sum.shard_numel && !sum.to_all),
                "`out` for a sum of every rank");
  const auto bytes = static_cast<std::uint64_t>(sum.shard_numel * size()) * sum.vector[0].data.element_size();
  const bool to_all = sum.to_all;
  const auto like = sum.vector[0].data;
  auto work = state_->publish("reduce_scatter", like, [&] { return transport_->reduce_scattered(std::move(sum)); });
  state_->count("reduce_scatter", bytes, size());
  if (to_all) state_->count("all_gather", bytes, size());
  return work;
}

std::shared_ptr<comm::SharedVector> Communicator::share(std::int64_t shard_numel, c10::ScalarType dtype) {
  comm::Arguments("share", *transport_).require(shard_numel >= 0, shard_numel, " elements, expected 0 or more");
  return transport_->share(shard_numel, dtype);
}

void Communicator::gather(comm::SharedVector& vector) {
  const auto& whole = vector.whole();
  // It has no number of its own: ranks may read again without each other.
  const auto tell = [&](observe::CollectiveState state) {
    if (auto& page = observe::status_page(); page.active())
      page.set_collective(state_->sequence, "all_gather", comm::dtype_text(whole.scalar_type()), whole.numel(), state);
  };
  tell(observe::CollectiveState::Inside);
  try {
    vector.wait();
  } catch (const CommError& error) {
    observe::status_page().set_error(error.what(), ExitCode::kPeer);
    throw;
  }
  tell(observe::CollectiveState::Before);  // of the next one, whose number it had
  state_->count("all_gather", whole.nbytes(), size());
}

std::chrono::milliseconds Communicator::timeout() const { return transport_->timeout(); }

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  comm::Arguments("set_timeout", *transport_)
      .require(timeout.count() > 0, timeout.count(), " ms, expected more than 0");
  transport_->set_timeout(timeout);
}

CommStats Communicator::stats() const {
  auto stats = state_->stats;
  stats.bytes_across_hosts = transport_->bytes_across_hosts() - state_->across_before;
  return stats;
}

void Communicator::reset_stats() {
  state_->stats = {};
  state_->across_before = transport_->bytes_across_hosts();
}

}  // namespace zero
