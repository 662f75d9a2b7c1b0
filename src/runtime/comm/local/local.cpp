// World size 1: data that is already in place is not touched, all other operations are one copy. Nothing blocks, and
// only the program's own abort fails.
#include "comm/local/local.h"

#include <cstring>
#include <mutex>

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <zero/errors.h>

#include "comm/transport.h"

namespace zero::comm {

void copy_flat(const at::Tensor& out, const at::Tensor& in) {
  if (out.numel() == 0 || out.const_data_ptr() == in.const_data_ptr()) return;
  if (out.is_cpu() && in.is_cpu()) {
    std::memcpy(out.mutable_data_ptr(), in.const_data_ptr(), out.nbytes());
    return;
  }
  at::NoGradGuard no_grad;
  out.detach().copy_(in.detach());
}

namespace {

class LocalTransport final : public Transport {
 public:
  explicit LocalTransport(const net::ProcessInfo& identity)
      : Transport(identity), finished_(std::make_shared<FinishedWork>()) {}

  std::string name() const override { return "local"; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view) override { return copied(out, in); }
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override { return copied(out, in); }
  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts) override { return copied(out, in); }
  std::shared_ptr<Work> all_reduce(at::Tensor) override { return in_place(); }
  std::shared_ptr<Work> broadcast(at::Tensor, int) override { return in_place(); }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    in_place();
    return {std::string(mine)};
  }

  void abort(const std::string& reason) noexcept override { stop(own_failure(reason), rank_in_run()); }
  void stop(const std::string& reason, int rank) noexcept override {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    try {
      failure_ = PeerFailure{rank, reason};
    } catch (...) {
    }
  }
  std::optional<PeerFailure> failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  std::unique_ptr<Transport> split(const Split& split) override { return make_local(split.identity); }

 private:
  std::shared_ptr<Work> copied(const at::Tensor& out, const at::Tensor& in) {
    auto work = in_place();
    copy_flat(out, in);
    return work;
  }

  std::shared_ptr<Work> in_place() {
    if (const auto cause = failure())
      throw CommError(base::join("[Communicator] ", cause->reason, " (", identity().place(), ")"), cause->rank);
    return finished_;
  }

  std::shared_ptr<Work> finished_;
  mutable std::mutex mutex_;
  std::optional<PeerFailure> failure_;
};

}  // namespace

std::unique_ptr<Transport> make_local(const net::ProcessInfo& identity) {
  return std::make_unique<LocalTransport>(identity);
}

}  // namespace zero::comm
