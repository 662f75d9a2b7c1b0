// The "nccl" transport: the plug-in library libzero_nccl.so, and the only file that uses CUDA and NCCL types. NCCL
// moves the data. Sums are computed on the device in fp32 in rank order, as in all transports, because NCCL's results
// depend on its choice of algorithm. Rendezvous and failure detection are the same as for gloo.
#include "comm/nccl/plugin.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "comm/bootstrap/c10d_rendezvous.h"
#include "comm/bootstrap/fault_attribution.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw CommError(
        base::join("[comm::nccl] got '", cudaGetErrorString(status), "' from ", what, ", expected success"));
  }
}

// An event without timing: a point of a stream that the host or another stream can wait for.
class Mark {
 public:
  Mark() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Mark() { cudaEventDestroy(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void hold(cudaStream_t stream) { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
  bool reached() {
    const auto status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check_cuda(status, "cudaEventQuery");
    return true;
  }

 private:
  cudaEvent_t event_{};
};

// One NCCL communicator with its stream. Works may keep it alive after the transport.
class Channel {
 public:
  // Of all ranks of the run.
  Channel(const net::ProcessInfo& identity, milliseconds timeout)
      : Channel(identity, own_device(identity), rendezvous(identity, timeout), timeout) {}
  // Of a group of the run's ranks, with their devices; a failure in one group is seen in all.
  Channel(const Channel& parent, const net::ProcessInfo& identity, milliseconds timeout)
      : Channel(identity, parent.device, parent.watch, timeout) {}
  Channel(const net::ProcessInfo& of, c10::DeviceIndex on, std::shared_ptr<FailureDetector> detector,
          milliseconds timeout)
      : identity(of),
        device(on),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device)),
        watch(std::move(detector)) {
    try {
      start(net::Clock::now() + timeout, timeout);
    } catch (...) {
      if (comm_ != nullptr) ncclCommAbort(comm_);
      throw;
    }
  }

  ~Channel() {
    // Data from a failed peer never arrives; ncclCommAbort is the only call that does not wait for it.
    if (watch->failure()) {
      ncclCommAbort(comm_);
    } else {
      ncclCommFinalize(comm_);
      const auto deadline = net::Clock::now() + std::chrono::seconds(5);
      ncclResult_t status = ncclInProgress;
      while (status == ncclInProgress && net::Clock::now() < deadline) {
        if (ncclCommGetAsyncError(comm_, &status) != ncclSuccess) break;
        std::this_thread::sleep_for(milliseconds(1));
      }
      if (status == ncclSuccess) {
        ncclCommDestroy(comm_);
      } else {
        ncclCommAbort(comm_);
      }
    }
  }

  // Converts the result of an NCCL call to a return or a CommError; waits while it is in progress.
  void settle(ncclResult_t status, const Waiting& waiting, net::Clock::time_point deadline) {
    while (status == ncclInProgress) {
      const auto asked = ncclCommGetAsyncError(comm_, &status);
      if (asked != ncclSuccess) status = asked;
      if (status != ncclInProgress) break;
      if (auto failure = watch->failure()) throw CommError(failure->reason, failure->rank);
      if (net::Clock::now() >= deadline) raise(attribute_timeout(*watch, waiting, -1));
      std::this_thread::yield();
    }
    if (status != ncclSuccess) raise(attribute_disconnect(*watch, waiting, -1, ncclGetErrorString(status)));
  }

  [[noreturn]] static void raise(const PeerFailure& failure) { throw CommError(failure.reason, failure.rank); }

  ncclComm_t comm() const { return comm_; }
  bool is_group() const { return !identity.run_ranks.empty(); }
  // Progress is reported for operations of the run only.
  Waiting waiting(const Call& call, std::uint64_t sequence, milliseconds timeout) const {
    return {call,
            sequence,
            identity.rank_in_run(identity.rank),
            is_group() ? identity.run_size : identity.size,
            timeout,
            is_group() ? &identity.run_ranks : nullptr};
  }

  const net::ProcessInfo identity;
  const c10::DeviceIndex device;
  const c10::cuda::CUDAStream stream;
  const std::shared_ptr<FailureDetector> watch;

 private:
  // One GPU per rank: it becomes the caller's current device.
  static c10::DeviceIndex own_device(const net::ProcessInfo& identity) {
    const auto device = static_cast<c10::DeviceIndex>(identity.local_rank);
    c10::cuda::set_device(device);
    return device;
  }

  void start(net::Clock::time_point deadline, milliseconds timeout) {
    const auto key = "nccl id " + identity.run_id;
    ncclUniqueId id{};
    if (identity.rank == 0) {
      const auto status = ncclGetUniqueId(&id);
      if (status != ncclSuccess)
        throw CommError(base::join("[comm::nccl] got '", ncclGetErrorString(status), "', expected an id"), 0);
      watch->set(key, std::string(id.internal, sizeof id.internal));
    } else {
      const auto text = watch->get(key, deadline);
      std::memcpy(id.internal, text.data(), std::min(text.size(), sizeof id.internal));
    }
    // Non-blocking: otherwise a peer that dies during initialization blocks this rank forever.
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const Call first{"start", at::kByte, 0, -1};
    settle(ncclCommInitRankConfig(&comm_, identity.size, id, identity.rank, &config), waiting(first, 0, timeout),
           deadline);
  }

  ncclComm_t comm_ = nullptr;
};

// One collective on the channel's stream, ordered after the work on the caller's stream at its start.
class NcclWork : public Work {
 public:
  NcclWork(std::shared_ptr<Channel> channel, Call call, std::uint64_t sequence, milliseconds timeout)
      : channel_(std::move(channel)), call_(std::move(call)), sequence_(sequence), timeout_(timeout) {}

  // Runs `body` with the channel's device and stream as current; `kept` lives until the end.
  template <class F>
  void begin(std::vector<at::Tensor> kept, F&& body) {
    kept_ = std::move(kept);
    const c10::cuda::CUDAGuard device(channel_->device);
    Mark before;
    before.record(c10::cuda::getCurrentCUDAStream(channel_->device).stream());
    before.hold(channel_->stream.stream());
    const c10::cuda::CUDAStreamGuard stream(channel_->stream);
    body();
    end_.record(channel_->stream.stream());
  }

  // For an output in CPU memory: copies the device result back at the end.
  void bring_back(at::Tensor host, at::Tensor on_device) { back_.emplace_back(std::move(host), std::move(on_device)); }
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

  template <class F>
  void nccl(F&& call) {
    channel_->settle(call(), waiting(), net::Clock::now() + timeout_);
  }

  // Blocks the host, so that the caller may read with any stream and failures are thrown here.
  void wait() override {
    if (error_) std::rethrow_exception(error_);
    if (finished_) return;
    try {
      const auto deadline = net::Clock::now() + timeout_;
      for (int spins = 0; !end_.reached(); ++spins) {
        ncclResult_t status = ncclSuccess;
        ncclCommGetAsyncError(channel_->comm(), &status);
        if (status != ncclSuccess && status != ncclInProgress) {
          Channel::raise(attribute_disconnect(*channel_->watch, waiting(), -1, ncclGetErrorString(status)));
        }
        if (auto failure = channel_->watch->failure()) Channel::raise(*failure);
        if (net::Clock::now() >= deadline) Channel::raise(attribute_timeout(*channel_->watch, waiting(), -1));
        if (spins > 1000) std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      for (auto& [host, on_device] : back_) host.copy_(on_device);
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
    finished_ = true;
    if (!channel_->is_group()) channel_->watch->ended(sequence_);
    kept_.clear();
    back_.clear();
  }

  bool done() override { return finished_ || error_ || channel_->watch->failure() || end_.reached(); }

 private:
  Waiting waiting() const { return channel_->waiting(call_, sequence_, timeout_); }

  const std::shared_ptr<Channel> channel_;
  const Call call_;
  const std::uint64_t sequence_;
  const milliseconds timeout_;
  Mark end_;
  std::vector<at::Tensor> kept_;
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;
  bool finished_ = false;
  std::exception_ptr error_;
};

class Nccl : public Transport {
 public:
  Nccl(const net::ProcessInfo& identity, milliseconds timeout, std::shared_ptr<Channel> channel)
      : Transport(identity), channel_(std::move(channel)) {
    timeout_ = timeout;
  }

  std::string name() const override { return "nccl"; }
  bool takes_gpu_memory() const override { return true; }

  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype) override {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(device()));
  }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    auto work = make({"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)});
    auto whole = on_device_output(*work, out), part = in.to(device());
    work->begin({whole, part}, [&] {
      if (in.nbytes() == 0) return;
      work->nccl([&] {
        return ncclAllGather(part.const_data_ptr(), whole.mutable_data_ptr(), part.nbytes(), ncclUint8,
                             channel_->comm(), stream());
      });
    });
    return work;
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    auto work = make({"reduce_scatter", in.scalar_type(), in.numel(), -1});
    auto part = on_device_output(*work, out), whole = in.to(device());
    work->begin({part, whole}, [&] { scatter_sums(*work, whole, part.numel(), part); });
    return work;
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    auto work = make({"all_reduce", inout.scalar_type(), inout.numel(), -1});
    auto whole = on_device_inout(*work, inout);
    // The last parts are shorter if the number of elements is not divisible.
    const auto part = (whole.numel() + size() - 1) / size();
    const auto parts = [&, part](int r) {
      const auto begin = std::min(whole.numel(), part * r), end = std::min(whole.numel(), part * (r + 1));
      return whole.narrow(0, begin, end - begin);
    };
    work->begin({whole}, [&] {
      scatter_sums(*work, whole, part, parts(rank()));
      group(
          *work, [&](int peer) { receive(parts(peer), peer); }, [&](int peer) { send(parts(rank()), peer); });
    });
    return work;
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    auto work = make({"broadcast", inout.scalar_type(), inout.numel(), root});
    auto whole = on_device_inout(*work, inout);
    work->begin({whole}, [&] {
      if (whole.nbytes() == 0) return;
      work->nccl([&] {
        return ncclBroadcast(whole.const_data_ptr(), whole.mutable_data_ptr(), whole.nbytes(), ncclUint8, root,
                             channel_->comm(), stream());
      });
    });
    return work;
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    auto work = make(parts.call(in));
    auto to = on_device_output(*work, out), from = in.to(device());
    const auto received = to.split_with_sizes(parts.out), sent = from.split_with_sizes(parts.in);
    const auto of = [](int peer) { return static_cast<std::size_t>(peer); };
    work->begin({to, from}, [&] {
      received[of(rank())].copy_(sent[of(rank())]);
      group(
          *work, [&](int peer) { receive(received[of(peer)], peer); }, [&](int peer) { send(sent[of(peer)], peer); });
    });
    return work;
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

  void abort(const std::string& reason) noexcept override { channel_->watch->abort(rank_in_run(), reason); }
  // The members meet by a new id: ncclCommSplit would need the ranks of no group, too.
  std::unique_ptr<Transport> split(const Split& split) override {
    return std::make_unique<Nccl>(split.identity, timeout_,
                                  std::make_shared<Channel>(*channel_, split.identity, timeout_));
  }

 private:
  at::Device device() const { return at::Device(at::kCUDA, channel_->device); }
  cudaStream_t stream() const { return channel_->stream.stream(); }

  std::shared_ptr<NcclWork> make(Call call) {
    if (auto failure = channel_->watch->failure()) Channel::raise(*failure);
    ++sequence_;
    if (!channel_->is_group()) channel_->watch->began(sequence_, call.text());
    const c10::cuda::CUDAGuard guard(channel_->device);
    return std::make_shared<NcclWork>(channel_, std::move(call), sequence_, timeout_);
  }

  // Device memory for an output, and for one that is also read.
  at::Tensor on_device_output(NcclWork& work, const at::Tensor& tensor) const {
    if (tensor.is_cuda()) return tensor;
    auto copy = at::empty(tensor.sizes(), tensor.options().device(device()));
    work.bring_back(tensor, copy);
    return copy;
  }
  at::Tensor on_device_inout(NcclWork& work, const at::Tensor& tensor) const {
    auto copy = on_device_output(work, tensor);
    if (!tensor.is_cuda()) copy.copy_(tensor);
    return copy;
  }

  void send(const at::Tensor& part, int peer) const {
    if (part.nbytes() != 0)
      started(ncclSend(part.const_data_ptr(), part.nbytes(), ncclUint8, peer, channel_->comm(), stream()));
  }
  void receive(const at::Tensor& part, int peer) const {
    if (part.nbytes() != 0)
      started(ncclRecv(part.mutable_data_ptr(), part.nbytes(), ncclUint8, peer, channel_->comm(), stream()));
  }
  static void started(ncclResult_t status) {
    if (status != ncclSuccess && status != ncclInProgress) {
      throw CommError(base::join("[comm::nccl] got '", ncclGetErrorString(status), "', expected a message to start"));
    }
  }

  template <class R, class S>
  void group(NcclWork& work, R&& receive_from, S&& send_to) const {
    ncclGroupStart();
    for (int i = 1; i < size(); ++i) {
      receive_from((rank() + i) % size());
      send_to((rank() + i) % size());
    }
    work.nccl([] { return ncclGroupEnd(); });
  }

  // Every rank receives its part of all ranks' `whole` and sums them in rank order into `out`.
  void scatter_sums(NcclWork& work, const at::Tensor& whole, std::int64_t part, const at::Tensor& out) const {
    const auto numel = out.numel();
    const auto received = at::empty({numel * (size() - 1)}, whole.options());
    work.keep(received);
    const auto slot = [&](int peer) { return received.narrow(0, numel * (peer < rank() ? peer : peer - 1), numel); };
    group(
        work, [&](int peer) { receive(slot(peer), peer); },
        [&](int peer) {
          const auto begin = std::min(whole.numel(), part * peer), end = std::min(whole.numel(), part * (peer + 1));
          send(whole.narrow(0, begin, end - begin), peer);
        });
    if (numel == 0) return;
    const auto of = [&](int r) { return r == rank() ? whole.narrow(0, part * r, numel) : slot(r); };
    auto sum = of(0).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (int r = 1; r < size(); ++r) sum.add_(of(r));
    auto result = out;
    result.copy_(sum);
    work.keep(sum);
  }

  std::shared_ptr<Channel> channel_;
  std::uint64_t sequence_ = 0;
};

}  // namespace
}  // namespace zero::comm

extern "C" __attribute__((visibility("default"))) zero::comm::Transport* zero_make_nccl(
    const zero::net::ProcessInfo* identity, std::int64_t timeout_ms) {
  const std::chrono::milliseconds timeout(timeout_ms);
  return new zero::comm::Nccl(*identity, timeout, std::make_shared<zero::comm::Channel>(*identity, timeout));
}
