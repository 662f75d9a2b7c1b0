// The transport for processes of one host: collectives over memory that every rank can read, without helper threads or
// messages (rank.h).
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "comm/shm/rank.h"
#include "comm/transport.h"

namespace zero::comm {
namespace {

using shm::Arena;
using shm::Op;
using shm::Operation;
using shm::Rank;

class ShmWork final : public Work {
 public:
  ShmWork(std::weak_ptr<Rank> rank, std::shared_ptr<Operation> operation)
      : rank_(std::move(rank)), operation_(std::move(operation)) {}

  void wait() override {
    if (operation_->phase == Operation::Phase::Complete) return;
    const std::shared_ptr<Rank> rank = owner();
    rank->complete(*operation_);
  }
  bool done() override {
    if (operation_->phase == Operation::Phase::Complete) return true;
    try {
      return owner()->try_complete(*operation_);
    } catch (const Error&) {
      return true;  // wait() will throw the error
    }
  }

 private:
  std::shared_ptr<Rank> owner() const {
    std::shared_ptr<Rank> rank = rank_.lock();
    if (rank == nullptr) throw CommError("[Shm::wait] got an unfinished operation whose communicator was destroyed");
    return rank;
  }

  std::weak_ptr<Rank> rank_;
  std::shared_ptr<Operation> operation_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(const net::ProcessInfo& identity, std::chrono::milliseconds timeout, std::shared_ptr<Rank> rank)
      : Transport(identity), rank_(std::move(rank)) {
    set_timeout(timeout);
  }

  std::string name() const override { return "shm"; }
  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    return begin(Op::AllGather, std::move(out), std::move(in), -1, of);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    return begin(Op::ReduceScatter, std::move(out), std::move(in));
  }
  std::shared_ptr<Work> all_reduce(at::Tensor inout) override { return begin(Op::AllReduce, inout, inout); }
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    return begin(Op::Broadcast, inout, inout, root);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    return std::make_shared<ShmWork>(rank_, rank_->begin(std::move(out), std::move(in), std::move(parts)));
  }
  std::vector<std::string> all_gather_bytes(std::string_view mine) override { return rank_->all_gather_bytes(mine); }
  void abort(const std::string& reason) noexcept override { stop(own_failure(reason), rank_in_run()); }
  void stop(const std::string& reason, int rank) noexcept override { rank_->host()->fail(reason, {}, rank); }
  std::optional<PeerFailure> failure() const override {
    const auto* failure = rank_->host()->failure();
    if (failure == nullptr) return std::nullopt;
    return PeerFailure{failure->rank, std::string(failure->text, ::strnlen(failure->text, shm::kTextBytes))};
  }
  bool advance() override { return rank_->advance(); }
  void on_wait(std::function<bool()> advance_others) override { rank_->on_wait(std::move(advance_others)); }

  std::string split_offer() override {
    const auto place = rank_->host()->offer();
    return {reinterpret_cast<const char*>(&place), sizeof place};
  }
  std::unique_ptr<Transport> split(const Split& split) override {
    std::vector<int> members;
    std::vector<shm::PagePlace> pages;
    for (const auto& member : split.members) {
      members.push_back(rank_->members()[static_cast<std::size_t>(member.rank)]);
      auto& page = pages.emplace_back();
      ZERO_CHECK(member.offer.size() == sizeof page, "an offer of another transport");
      std::memcpy(&page, member.offer.data(), sizeof page);
    }
    return std::make_unique<ShmTransport>(split.identity, timeout_,
                                          std::make_shared<Rank>(split.identity, rank_->host(), members, pages));
  }

  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype) override {
    const auto options = at::TensorOptions().dtype(dtype);
    if (numel == 0) return at::empty({0}, options);
    const std::shared_ptr<Arena>& arena = rank_->host()->arena();
    std::size_t bytes = 0;
    const bool overflow = __builtin_mul_overflow(static_cast<std::size_t>(numel), c10::elementSize(dtype), &bytes);
    std::byte* piece = arena->take(overflow ? SIZE_MAX : bytes);
    return at::from_blob(
        piece, {numel}, [arena](void* data) { arena->give(static_cast<std::byte*>(data)); }, options);
  }

  bool reads_in_place() const override { return true; }
  bool holds(const at::Tensor& tensor) const override {
    return rank_->host()->arena()->holds(tensor.const_data_ptr(), tensor.nbytes());
  }
  std::shared_ptr<Work> peer_reduce_scatter(PeerReduce sum) override {
    return std::make_shared<ShmWork>(rank_, rank_->begin(std::move(sum)));
  }
  std::shared_ptr<SymmetricBuffer> share(std::int64_t shard_numel, c10::ScalarType dtype) override {
    return shm::share(rank_->place(), shard_numel, dtype);
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    Transport::set_timeout(timeout);
    rank_->set_timeout(timeout);
  }

 private:
  std::shared_ptr<Work> begin(Op op, at::Tensor out, at::Tensor in, int root = -1, std::string_view of = {}) {
    return std::make_shared<ShmWork>(rank_, rank_->begin(op, std::move(out), std::move(in), root, of));
  }

  std::shared_ptr<Rank> rank_;
};

}  // namespace

std::unique_ptr<Transport> make_shm(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                    const std::function<void()>& abort_check, shm::Mappings* mappings) {
  const auto host = std::make_shared<shm::Host>(identity, timeout, abort_check, mappings);
  return std::make_unique<ShmTransport>(identity, timeout, std::make_shared<Rank>(identity, host));
}

}  // namespace zero::comm
