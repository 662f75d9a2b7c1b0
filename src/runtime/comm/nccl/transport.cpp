// The "nccl" transport: one GPU per rank. NCCL moves the data. Sums are computed on the device in fp32 in rank order,
// as in all transports, because NCCL's results depend on its choice of algorithm. Rendezvous and failure detection are
// the same as for gloo.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "comm/nccl/channel.h"
#include "comm/nccl/rank_sum.h"

namespace zero::comm {
namespace {

using nccl::Channel;
using std::chrono::milliseconds;

// Of received parts, in elements: the sum reads vectors of 16 bytes.
constexpr std::int64_t kAlignment = 64;

// One collective on the channel's stream, ordered after the work on the caller's stream at its start.
class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<Channel> channel, std::shared_ptr<Channel::Operation> operation)
      : channel_(std::move(channel)), operation_(std::move(operation)) {}

  // For an output in CPU memory: wait() copies the device's result to it.
  void bring_back(at::Tensor host, at::Tensor on_device) { back_.emplace_back(std::move(host), std::move(on_device)); }

  // Orders the current stream after the operation, without blocking the host; blocks it for outputs in CPU memory.
  void wait() override {
    if (channel_->failure() && !operation_->end.query()) channel_->check();
    if (back_.empty()) {
      operation_->end.block(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(channel_->device));
    } else {
      while (!operation_->end.query()) {
        channel_->check();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      for (auto& [host, on_device] : back_) host.copy_(on_device);
      back_.clear();
    }
    channel_->release(*operation_);
    ordered_ = true;
  }

  bool done() override { return ordered_ || operation_->end.query() || channel_->failure(); }

 private:
  const std::shared_ptr<Channel> channel_;
  const std::shared_ptr<Channel::Operation> operation_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
  bool ordered_ = false;  // by wait()
};

class Nccl final : public Transport {
 public:
  Nccl(const net::ProcessInfo& identity, milliseconds timeout, std::shared_ptr<Channel> channel)
      : Transport(identity), channel_(std::move(channel)) {
    timeout_ = timeout;
  }

  std::string name() const override { return "nccl"; }
  bool takes_gpu_memory() const override { return true; }

  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype) override {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(channel_->device));
  }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    return begin({"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)}, {out, in}, [&](Running& running) {
      const auto part = running.input(in), whole = running.output(out);
      if (in.nbytes() == 0) return;
      running.call([&] {
        return library().all_gather(communicator(), part.const_data_ptr(), whole.mutable_data_ptr(), part.nbytes(),
                                    stream());
      });
    });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    return begin({"reduce_scatter", in.scalar_type(), in.numel(), -1}, {out, in}, [&](Running& running) {
      const auto whole = running.input(in), part = running.output(out);
      scatter_sums(running, whole, part.numel(), part);
    });
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    return begin({"all_reduce", inout.scalar_type(), inout.numel(), -1}, {inout}, [&](Running& running) {
      const auto whole = running.inout(inout);
      // The last parts are shorter if the number of elements is not divisible.
      const auto part = (whole.numel() + size() - 1) / size();
      const auto parts = [&, part](int r) {
        const auto begin = std::min(whole.numel(), part * r), end = std::min(whole.numel(), part * (r + 1));
        return whole.narrow(0, begin, end - begin);
      };
      scatter_sums(running, whole, part, parts(rank()));
      exchange(
          running, [&](int peer) { return receive(parts(peer), peer); },
          [&](int peer) { return send(parts(rank()), peer); });
    });
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    return begin({"broadcast", inout.scalar_type(), inout.numel(), root}, {inout}, [&](Running& running) {
      const auto whole = running.inout(inout);
      if (whole.nbytes() == 0) return;
      running.call([&] {
        return library().broadcast(communicator(), whole.mutable_data_ptr(), whole.nbytes(), root, stream());
      });
    });
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    return begin(parts.call(in), {out, in}, [&](Running& running) {
      const auto from = running.input(in), to = running.output(out);
      const auto received = to.split_with_sizes(parts.out), sent = from.split_with_sizes(parts.in);
      const auto of = [](int peer) { return static_cast<std::size_t>(peer); };
      received[of(rank())].copy_(sent[of(rank())]);
      exchange(
          running, [&](int peer) { return receive(received[of(peer)], peer); },
          [&](int peer) { return send(sent[of(peer)], peer); });
    });
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    auto lengths = at::empty({size()}, at::kLong),
         own_length = at::full({1}, static_cast<std::int64_t>(mine.size()), at::kLong);
    all_gather(lengths, own_length, {})->wait();
    const auto* length = lengths.const_data_ptr<std::int64_t>();
    const auto longest = *std::max_element(length, length + size());
    auto own = at::zeros({longest}, at::kByte), all = at::empty({longest * size()}, at::kByte);
    if (!mine.empty()) std::memcpy(own.mutable_data_ptr(), mine.data(), mine.size());
    if (longest > 0) all_gather(all, own, {})->wait();
    std::vector<std::string> messages;
    for (int r = 0; r < size(); ++r) {
      messages.emplace_back(static_cast<const char*>(all.const_data_ptr()) + longest * r,
                            static_cast<std::size_t>(length[r]));
    }
    return messages;
  }

  void abort(const std::string& reason) noexcept override { channel_->detector().abort(rank_in_run(), reason); }
  std::optional<PeerFailure> failure() const override { return channel_->failure(); }
  // The members meet by a new id: ncclCommSplit would need the ranks of no group, too.
  std::unique_ptr<Transport> split(const Split& split) override {
    return std::make_unique<Nccl>(split.identity, timeout_,
                                  std::make_shared<Channel>(*channel_, split.identity, timeout_));
  }

 private:
  // An operation while it is enqueued. The channel's stream is current, so what it allocates is used and freed there.
  struct Running {
    Channel& channel;
    Channel::Operation& operation;
    NcclWork& work;

    at::Tensor input(const at::Tensor& tensor) { return keep(tensor.to(channel.device)); }
    at::Tensor output(const at::Tensor& tensor) {
      if (tensor.is_cuda()) return tensor;
      const auto made = keep(at::empty(tensor.sizes(), tensor.options().device(channel.device)));
      work.bring_back(tensor, made);
      return made;
    }
    at::Tensor inout(const at::Tensor& tensor) {
      auto made = output(tensor);
      if (!tensor.is_cuda()) made.copy_(tensor);
      return made;
    }
    at::Tensor keep(at::Tensor tensor) { return operation.kept.emplace_back(std::move(tensor)); }
    template <class F>
    void call(const F& body) {
      channel.call(operation, body);
    }
  };

  const nccl::Library& library() const { return channel_->library; }
  void* communicator() const { return channel_->communicator(); }
  void* stream() const { return channel_->stream.native_handle(); }

  template <class F>
  std::shared_ptr<Work> begin(Call call, std::vector<at::Tensor> kept, const F& body) {
    channel_->check();
    auto operation = std::make_shared<Channel::Operation>();
    operation->call = std::move(call);
    operation->sequence = ++sequence_;
    operation->timeout = timeout_;
    operation->deadline = net::Clock::now() + timeout_;
    operation->kept = std::move(kept);
    channel_->detector().began({channel_->identity.group_id(), sequence_}, operation->call.text());
    auto work = std::make_shared<NcclWork>(channel_, operation);
    // Messages of host tensors wait for no work of the GPU: a rank whose GPU is stuck can still be told why.
    if (std::any_of(operation->kept.begin(), operation->kept.end(), [](const auto& each) { return each.is_cuda(); })) {
      c10::Event before(c10::kCUDA);
      before.record(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(channel_->device));
      before.block(channel_->stream);
    }
    try {
      const c10::StreamGuard on_channel(channel_->stream);
      Running running{*channel_, *operation, *work};
      body(running);
      operation->end.record(channel_->stream);
    } catch (const CommError&) {
      channel_->check();  // aborts
      throw;
    }
    channel_->watch_operation(std::move(operation));
    return work;
  }

  int send(const at::Tensor& part, int peer) const {
    if (part.nbytes() == 0) return nccl::kSuccess;
    return library().send(communicator(), part.const_data_ptr(), part.nbytes(), peer, stream());
  }
  int receive(const at::Tensor& part, int peer) const {
    if (part.nbytes() == 0) return nccl::kSuccess;
    return library().receive(communicator(), part.mutable_data_ptr(), part.nbytes(), peer, stream());
  }

  // Messages with all peers at once.
  template <class R, class S>
  void exchange(Running& running, const R& receive_from, const S& send_to) const {
    running.call([&] {
      int result = library().group_begin();
      const auto note = [&](int next) {
        if (result == nccl::kSuccess || result == nccl::kInProgress) result = next == nccl::kSuccess ? result : next;
      };
      for (int i = 1; i < size(); ++i) {
        note(receive_from((rank() + i) % size()));
        note(send_to((rank() + i) % size()));
      }
      note(library().group_end());
      return result;
    });
  }

  // Every rank receives its part of `whole` from all peers and sums in rank order. Part p begins at element p * `part`.
  void scatter_sums(Running& running, const at::Tensor& whole, std::int64_t part, const at::Tensor& out) const {
    const auto numel = out.numel();
    const auto apart = (numel + kAlignment - 1) / kAlignment * kAlignment;
    const auto slots = running.keep(at::empty({apart * (size() - 1)}, whole.options()));
    const auto slot = [&](int peer) { return slots.narrow(0, apart * (peer < rank() ? peer : peer - 1), numel); };
    exchange(
        running, [&](int peer) { return receive(slot(peer), peer); },
        [&](int peer) {
          const auto begin = std::min(whole.numel(), part * peer), end = std::min(whole.numel(), part * (peer + 1));
          return send(whole.narrow(0, begin, end - begin), peer);
        });
    if (numel == 0) return;
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size(); ++r) parts.push_back(r == rank() ? whole.narrow(0, part * r, numel) : slot(r));
    nccl::sum_in_order(out, parts);
  }

  const std::shared_ptr<Channel> channel_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_nccl(const net::ProcessInfo& identity, milliseconds timeout) {
  return std::make_unique<Nccl>(identity, timeout, std::make_shared<Channel>(identity, timeout));
}

}  // namespace zero::comm
