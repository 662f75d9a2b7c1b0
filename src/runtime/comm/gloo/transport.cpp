// The "gloo" transport: ranks on any hosts, over TCP. Every collective consists of direct messages between ranks
// (messenger.h). gloo's own all-gather copies the whole result, and its reduce-scatter sums bf16 in bf16 at every hop.
// Here the payload is sent once, between final locations, and sums are taken in fp32 in rank order.
#include <algorithm>
#include <cstring>
#include <numeric>

#include <ATen/ops/empty.h>

#include "base/check.h"
#include "comm/gloo/messenger.h"
#include "comm/local/local.h"
#include "comm/quantized_reduce.h"
#include "comm/transport.h"
#include "kernels/elementwise.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

at::Tensor bytes_between(const at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
  return tensor.narrow(0, begin, end - begin).view(at::kByte);
}

// Above this, an all-reduce of two ranks sums half of the elements on each; below it, the wait for a second message
// takes longer than the sum.
constexpr std::size_t kOneExchangeBytes = std::size_t{1} << 20;

// An operation that needs no message.
class Complete : public Work {
 public:
  void wait() override {}
  bool done() override { return true; }
};

class Gloo : public Transport {
 public:
  Gloo(const net::ProcessInfo& identity, milliseconds timeout, std::unique_ptr<Messenger> messenger)
      : Transport(identity), messenger_(std::move(messenger)) {
    timeout_ = timeout;
  }

  std::string name() const override { return "gloo"; }

  void set_timeout(milliseconds timeout) override {
    timeout_ = timeout;
    if (messenger_) messenger_->set_timeout(timeout);
  }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    const auto part = in.numel();
    auto own = out.narrow(0, part * rank(), part);
    if (part != 0 && own.const_data_ptr() != in.const_data_ptr()) {
      std::memcpy(own.mutable_data_ptr(), in.const_data_ptr(), in.nbytes());
    }
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)});
    gather_parts(*op, out, part);
    return op;
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    if (size() == 1) {
      sum(out, {in.const_data_ptr()});
      return std::make_shared<Complete>();
    }
    auto op = begin({"reduce_scatter", in.scalar_type(), in.numel(), -1});
    op->then(scatter_sums(*op, in, out.numel(), out));
    return op;
  }

  bool quantizes() const override { return size() > 1; }
  std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, at::Tensor in, int bits) override {
    if (size() == 1) return reduce_scatter(out, in);
    auto op = begin({base::join("reduce_scatter_quantized to ", bits, " bits"), in.scalar_type(), in.numel(), -1});
    const auto own = static_cast<std::size_t>(rank());
    const auto dtype = sum_dtype(in.scalar_type());
    std::vector<const void*> parts;
    for (int r = 0; r < size(); ++r) parts.push_back(in.narrow(0, out.numel() * r, out.numel()).const_data_ptr());
    auto sum = std::make_shared<QuantizedSum>(all_ranks(), own, out.numel(), bits);
    sum->post(*op, parts, dtype);
    op->then([out, in, sum, dtype, mine = parts[own]] { sum->finish(out.mutable_data_ptr(), dtype, mine, dtype); });
    return op;
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"all_reduce", inout.scalar_type(), inout.numel(), -1});
    if (size() == 2 && inout.nbytes() <= kOneExchangeBytes) {
      exchange_and_sum(*op, inout);
      return op;
    }
    // The last parts are shorter if the number of elements is not divisible.
    const auto part = (inout.numel() + size() - 1) / size();
    const auto [first, last] = range(inout, part, rank());
    auto sum_own = scatter_sums(*op, inout, part, inout.narrow(0, first, last - first));
    op->then_post([this_rank = rank(), ranks = size(), op = op.get(), inout, part, sum_own] {
      sum_own();
      gather_parts(*op, inout, part, this_rank, ranks);
    });
    return op;
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"broadcast", inout.scalar_type(), inout.numel(), root});
    const auto bytes = bytes_between(inout, 0, inout.numel());
    if (rank() != root) {
      op->receive(root, bytes);
    } else {
      for_peers([&](int peer) { op->send(peer, bytes); });
    }
    return op;
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    const auto to = in.split_with_sizes(parts.in), from = out.split_with_sizes(parts.out);
    const auto own = static_cast<std::size_t>(rank());
    copy_flat(from[own], to[own]);
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin(parts.call(in));
    std::vector<int> peers;
    for_peers([&](int peer) { peers.push_back(peer); });
    post_parts(*op, identity(), peers, from, to, parts.equal);
    return op;
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    if (size() == 1) return {std::string(mine)};
    return comm::all_gather_bytes(*messenger_->begin_all_gather_bytes(), all_ranks(), static_cast<std::size_t>(rank()),
                                  mine);
  }

  void abort(const std::string& reason) noexcept override {
    if (messenger_) messenger_->abort(rank_in_run(), reason);
  }

  void stop(const std::string& reason, int failed) noexcept override {
    if (messenger_) messenger_->abort(failed, reason);
  }
  std::optional<PeerFailure> failure() const override {
    return messenger_ ? messenger_->watch().failure() : std::nullopt;
  }
  std::vector<int> hosts() const override {
    return messenger_ ? hosts_of(*messenger_, identity()) : Transport::hosts();
  }
  bool advance() override {
    if (messenger_) messenger_->advance();
    return false;
  }
  void on_wait(std::function<bool()> advance_others) override {
    if (messenger_) messenger_->on_wait(std::move(advance_others));
  }
  std::string split_offer() override { return messenger_ ? messenger_->split_offer() : std::string(); }
  std::unique_ptr<Transport> split(const Split& split) override {
    if (split.shared_memory && split.identity.one_host()) return make_shm(split.identity, timeout_, split.abort_check);
    return make_gloo(split.identity, timeout_, messenger_->split(split));
  }
  bool has_neighbours(int count) const override {
    return messenger_ && !identity().one_host() ? messenger_->hosts().divisible_by(count)
                                                : Transport::has_neighbours(count);
  }

  std::uint64_t bytes_across_hosts() const override { return messenger_ ? messenger_->bytes_across_hosts() : 0; }

 private:
  std::vector<int> all_ranks() const {
    std::vector<int> ranks(static_cast<std::size_t>(size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  std::shared_ptr<MessageWork> begin(Call call) { return messenger_->begin(std::move(call)); }

  // Starts with the next rank, so that not all ranks send to rank 0 first.
  template <class F>
  static void for_peers(int rank, int size, F&& body) {
    for (int i = 1; i < size; ++i) body((rank + i) % size);
  }
  template <class F>
  void for_peers(F&& body) const {
    for_peers(rank(), size(), body);
  }

  static std::pair<std::int64_t, std::int64_t> range(const at::Tensor& whole, std::int64_t part, int owner) {
    return {std::min(whole.numel(), part * owner), std::min(whole.numel(), part * (owner + 1))};
  }

  static void gather_parts(MessageWork& op, const at::Tensor& whole, std::int64_t part, int rank, int size) {
    for_peers(rank, size, [&](int peer) {
      const auto [begin, end] = range(whole, part, peer);
      op.receive(peer, bytes_between(whole, begin, end));
    });
    const auto [begin, end] = range(whole, part, rank);
    for_peers(rank, size, [&, begin = begin, end = end](int peer) { op.send(peer, bytes_between(whole, begin, end)); });
  }
  void gather_parts(MessageWork& op, const at::Tensor& whole, std::int64_t part) const {
    gather_parts(op, whole, part, rank(), size());
  }

  static void sum(const at::Tensor& out, const std::vector<const void*>& parts) {
    if (out.numel() == 0) return;
    const auto dtype = sum_dtype(out.scalar_type());
    kernels::sum_parts(out.mutable_data_ptr(), dtype, parts.data(), static_cast<int>(parts.size()), dtype, out.numel());
  }

  // Of two ranks: the same bytes as a reduce-scatter and an all-gather, in one exchange instead of two.
  void exchange_and_sum(MessageWork& op, const at::Tensor& inout) const {
    const int peer = 1 - rank();
    auto received = at::empty({inout.numel()}, inout.options());
    op.receive(peer, bytes_between(received, 0, received.numel()));
    op.send(peer, bytes_between(inout, 0, inout.numel()));
    op.then([inout, received, first = rank() == 0] {
      const void *own = inout.const_data_ptr(), *theirs = received.const_data_ptr();
      sum(inout, first ? std::vector{own, theirs} : std::vector{theirs, own});
    });
  }

  // Sends every rank its part of `in` and receives the peers' data for this rank's part. The returned function sums
  // them into `out`, which may be that part.
  std::function<void()> scatter_sums(MessageWork& op, const at::Tensor& in, std::int64_t part,
                                     const at::Tensor& out) const {
    const auto numel = out.numel();
    auto received = at::empty({numel * (size() - 1)}, in.options());
    std::vector<const void*> parts(size());
    std::int64_t slot = 0;
    for (int r = 0; r < size(); ++r) {
      if (numel == 0) break;
      if (r == rank()) {
        parts[r] = in.narrow(0, part * r, numel).const_data_ptr();
        continue;
      }
      parts[r] = static_cast<const char*>(received.const_data_ptr()) + slot * static_cast<std::int64_t>(in.itemsize());
      op.receive(r, bytes_between(received, slot, slot + numel));
      slot += numel;
    }
    for_peers([&](int peer) {
      const auto [begin, end] = range(in, part, peer);
      op.send(peer, bytes_between(in, begin, end));
    });
    return [out, in, received, parts] { sum(out, parts); };
  }

  std::unique_ptr<Messenger> messenger_;  // null for world size 1
};

}  // namespace

std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, milliseconds timeout) {
  return make_gloo(identity, timeout, identity.size > 1 ? std::make_unique<Messenger>(identity, timeout) : nullptr);
}

std::unique_ptr<Transport> make_gloo(const net::ProcessInfo& identity, milliseconds timeout,
                                     std::unique_ptr<Messenger> messenger) {
  return std::make_unique<Gloo>(identity, timeout, std::move(messenger));
}

}  // namespace zero::comm
