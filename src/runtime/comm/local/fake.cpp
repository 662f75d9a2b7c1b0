// A rank whose peers do not exist; see zero/fake_communicator.h.
#include <zero/fake_communicator.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "comm/group.h"
#include "comm/local/local.h"
#include "comm/transport.h"

namespace zero {
namespace comm {
namespace {

class FakeTransport final : public Transport {
 public:
  using Transport::Transport;

  std::string name() const override { return "fake"; }
  bool takes_gpu_memory() const override { return true; }
  bool shares_gpus() const override { return true; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view) override {
    const auto numel = in.numel();
    for (int r = 0; r < size(); ++r) copy_flat(out.narrow(0, r * numel, numel), in);
    return done();
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    copy_flat(out, in.narrow(0, rank() * out.numel(), out.numel()));
    return done();
  }
  std::shared_ptr<Work> all_reduce(at::Tensor) override { return done(); }
  std::shared_ptr<Work> broadcast(at::Tensor, int) override { return done(); }
  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts) override {
    const auto common = std::min(out.numel(), in.numel());
    copy_flat(out.narrow(0, 0, common), in.narrow(0, 0, common));
    if (common < out.numel()) {
      const at::NoGradGuard no_grad;
      out.narrow(0, common, out.numel() - common).zero_();
    }
    return done();
  }
  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    return std::vector<std::string>(static_cast<std::size_t>(size()), std::string(mine));
  }

  void abort(const std::string&) noexcept override {}  // nobody is told
  std::unique_ptr<Transport> split(const Split& split) override {
    return std::make_unique<FakeTransport>(split.identity);
  }
  bool has_neighbours(int) const override { return false; }

 private:
  static std::shared_ptr<Work> done() { return std::make_shared<FinishedWork>(); }
};

}  // namespace
}  // namespace comm

std::shared_ptr<Communicator> fake_communicator(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    throw ConfigError(
        base::join("[fake_communicator] got rank ", rank, " of ", size, ", expected a rank of [0, size)"));
  net::ProcessInfo identity;
  identity.rank = identity.local_rank = rank;
  identity.size = identity.local_size = size;
  return comm::make_communicator(std::make_unique<comm::FakeTransport>(identity));
}

}  // namespace zero
