// Ranks that share a GPU: every collective copies its tensors to host memory, which another transport moves, and copies
// the result back. Slow, but with that transport's bits and every rank's own streams: for trying and testing sharding
// on one GPU, which NCCL refuses. Host tensors take the same way, so that all of it runs without a GPU too.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/transport.h"

namespace zero::comm {
namespace {

at::Tensor on_host(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor host_like(const at::Tensor& tensor) { return at::empty({tensor.numel()}, tensor.scalar_type()); }

// wait() copies the result on the caller's current stream.
class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<Work> work, at::Tensor out, at::Tensor host)
      : work_(std::move(work)), out_(std::move(out)), host_(std::move(host)) {}

  void wait() override {
    work_->wait();
    if (!out_.defined()) return;
    const at::NoGradGuard no_grad;
    out_.detach().copy_(host_.view_as(out_));  // from pageable memory: has read it on return
    out_ = host_ = at::Tensor();
  }
  bool done() override { return work_->done(); }

 private:
  std::shared_ptr<Work> work_;
  at::Tensor out_, host_;
};

class StagedTransport final : public Transport {
 public:
  explicit StagedTransport(std::unique_ptr<Transport> host) : Transport(host->identity()), host_(std::move(host)) {
    timeout_ = host_->timeout();
  }

  std::string name() const override { return "staged " + host_->name(); }
  bool takes_gpu_memory() const override { return true; }
  bool shares_gpus() const override { return true; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    auto whole = host_like(out);
    return staged(host_->all_gather(whole, on_host(in), of), out, whole);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    auto part = host_like(out);
    return staged(host_->reduce_scatter(part, on_host(in)), out, part);
  }
  std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, at::Tensor in, int bits) override {
    auto part = host_like(out);
    return staged(host_->reduce_scatter_quantized(part, on_host(in), bits), out, part);
  }
  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    auto whole = on_host(inout);
    return staged(host_->all_reduce(whole), inout, whole);
  }
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    auto whole = on_host(inout);
    return staged(host_->broadcast(whole, root), inout, whole);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    auto received = host_like(out);
    return staged(host_->all_to_all(received, on_host(in), std::move(parts)), out, received);
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override { return host_->all_gather_bytes(mine); }
  void abort(const std::string& reason) noexcept override { host_->abort(reason); }
  void stop(const std::string& reason, int rank) noexcept override { host_->stop(reason, rank); }
  bool quantizes() const override { return host_->quantizes(); }
  std::optional<PeerFailure> failure() const override { return host_->failure(); }
  std::vector<int> hosts() const override { return host_->hosts(); }
  std::string split_offer() override { return host_->split_offer(); }
  std::unique_ptr<Transport> split(const Split& split) override {
    return std::make_unique<StagedTransport>(host_->split(split));
  }
  std::string why_no_split() const override { return host_->why_no_split(); }
  bool advance() override { return host_->advance(); }
  void on_wait(std::function<bool()> advance_others) override { host_->on_wait(std::move(advance_others)); }
  bool has_neighbours(int) const override { return false; }  // neighbours read each other's host memory in place
  std::uint64_t bytes_across_hosts() const override { return host_->bytes_across_hosts(); }
  void set_timeout(std::chrono::milliseconds timeout) override {
    Transport::set_timeout(timeout);
    host_->set_timeout(timeout);
  }

 private:
  static std::shared_ptr<Work> staged(std::shared_ptr<Work> work, const at::Tensor& out, const at::Tensor& host) {
    return std::make_shared<StagedWork>(std::move(work), out, host);
  }

  const std::unique_ptr<Transport> host_;
};

}  // namespace

std::unique_ptr<Transport> make_staged(std::unique_ptr<Transport> host) {
  return std::make_unique<StagedTransport>(std::move(host));
}

}  // namespace zero::comm
