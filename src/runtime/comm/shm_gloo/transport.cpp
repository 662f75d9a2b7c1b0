// The transport for several hosts with several ranks each: shared memory inside a host, TCP messages between hosts. An
// all-gather sends each shard once to every other host, to the rank with the same local rank; the ranks of a host then
// read it from each other. A reduction sends every rank's part to its owner, which sums in fp32 in rank order,
// bit-identical to all other transports.
//
// [Note: column] A column is the ranks with the same local rank on all hosts. Messages are sent within a column only.
//
// [Note: one thread for all] A thread of this rank executes the collectives one after another, in the order of calls,
// which is the same on all ranks. No rank waits for a peer that has not reached that call, and the program computes
// meanwhile. Messages that do not depend on other ranks of the host are sent at the call.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include <ATen/ops/empty.h>

#include "base/check.h"
#include "base/log.h"
#include "comm/collective_thread.h"
#include "comm/gloo/messenger.h"
#include "comm/quantized_reduce.h"
#include "comm/transport.h"
#include "kernels/elementwise.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// Up to this size, every rank computes the whole sum of an all_reduce: one network wait instead of two.
constexpr std::size_t kOnePhaseHostBytes = 16 << 10;
// Added to timeouts inside a host, so that late ranks are first detected between hosts, where all ranks can be queried.
constexpr milliseconds kLonger{10000};
// A report of a death and the break of a connection arrive independently.
constexpr milliseconds kHostsGrace{3000};
// How long the destructor waits for this rank's own collectives.
constexpr milliseconds kHostsFarewell{2000};

at::Tensor bytes_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t numel) {
  return tensor.narrow(0, begin, numel).view(at::kByte);
}

void copy_data(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() > 0 && to.const_data_ptr() != from.const_data_ptr())
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
}

// Whether there are several hosts with the same number of ranks, greater than one.
bool joins_hosts(const net::ProcessInfo& identity, const Messenger& messenger) {
  return messenger.hosts().even() && messenger.hosts().count() > 1 && identity.local_size > 1;
}

class ShmGloo final : public Transport {
 public:
  // `parent`, if any, is what this group was split from.
  ShmGloo(const net::ProcessInfo& identity, milliseconds timeout, std::unique_ptr<Messenger> messenger,
          std::pair<ShmGloo*, const Split*> parent = {})
      : Transport(identity),
        messenger_(std::move(messenger)),
        host_(messenger_->hosts().host_of(rank())),
        hosts_(messenger_->hosts().count()),
        place_(identity.local_rank),
        ranks_(identity.local_size),
        inside_(parent.first ? parent.first->split_inside(of_own_host(identity), *parent.second)
                             : make_shm(of_own_host(identity), timeout + kLonger, [this, connected = connected_] {
                                 if (*connected) return;  // on_failure() tells of later ones
                                 if (const auto cause = messenger_->watch().failure())
                                   throw CommError(cause->reason, cause->rank);
                               })) {
    set_timeout(timeout);
    for (int host = 0; host < hosts_; ++host) column_.push_back(host * ranks_ + place_);
    messenger_->on_failure([this](const PeerFailure& cause) { inside_->stop(cause.reason, cause.rank); });
    *connected_ = true;
  }

  ~ShmGloo() override {
    if (!thread_.idle_within(kHostsFarewell)) {
      // Some rank never called this collective: only an abort cancels its messages.
      const auto text = base::join("[comm::shm+gloo] the communicator of rank ", rank(), " ended in a collective");
      messenger_->abort(rank_in_run(), text);
    }
    thread_.idle_within(kHostsFarewell);
    messenger_->on_failure(nullptr);
  }

  std::string name() const override { return "shm+gloo"; }

  void set_timeout(milliseconds timeout) override {
    timeout_ = timeout;
    messenger_->set_timeout(timeout);
    inside_->set_timeout(timeout + kLonger);
  }

  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype) override { return inside_->allocate(numel, dtype); }
  std::uint64_t bytes_across_hosts() const override { return messenger_->bytes_across_hosts(); }
  void abort(const std::string& reason) noexcept override { messenger_->abort(rank_in_run(), reason); }
  void stop(const std::string& reason, int failed) noexcept override { messenger_->abort(failed, reason); }
  std::optional<PeerFailure> failure() const override { return messenger_->watch().failure(); }
  bool has_neighbours(int count) const override { return messenger_->hosts().divisible_by(count); }
  std::vector<int> hosts() const override { return hosts_of(*messenger_, identity()); }
  void on_wait(std::function<bool()> advance_others) override { thread_.on_wait(std::move(advance_others)); }
  std::string split_offer() override { return messenger_->split_offer() + inside_->split_offer(); }
  std::unique_ptr<Transport> split(const Split& split) override {
    if (split.identity.one_host()) return split_inside(split.identity, split);
    auto messenger = messenger_->split(split);
    if (!joins_hosts(split.identity, *messenger)) return make_gloo(split.identity, timeout_, std::move(messenger));
    return std::make_unique<ShmGloo>(split.identity, timeout_, std::move(messenger), std::pair(this, &split));
  }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    copy_data(out.narrow(0, in.numel() * rank(), in.numel()), in);
    auto work = messenger_->begin({"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)});
    gather_across(*work, out);
    return start([this, work, out, of = std::string(of)] { gather_inside(*work, out, of); });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    auto work = messenger_->begin({"reduce_scatter", in.scalar_type(), in.numel(), -1});
    return start([this, work, out, in] { sum_own_part(*work, out, in); });
  }

  bool quantizes() const override { return true; }
  std::shared_ptr<Work> reduce_scatter_quantized(at::Tensor out, at::Tensor in, int bits) override {
    auto work = messenger_->begin(
        {base::join("reduce_scatter_quantized to ", bits, " bits"), in.scalar_type(), in.numel(), -1});
    return start([this, work, out, in, bits] { sum_quantized(*work, out, in, bits); });
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    const Call call{"all_reduce", inout.scalar_type(), inout.numel(), -1};
    auto work = messenger_->begin(call);
    if (inout.nbytes() <= kOnePhaseHostBytes) return start([this, work, inout] { sum_all(*work, inout); });
    auto second = messenger_->begin(call);
    return start([this, work, second, inout] {
      const auto part = (inout.numel() + size() - 1) / size();
      auto whole = inout;
      if (part * size() != inout.numel()) {
        whole = at::empty({part * size()}, inout.options());
        whole.narrow(0, inout.numel(), part * size() - inout.numel()).zero_();
        copy_data(whole.narrow(0, 0, inout.numel()), inout);
      }
      sum_own_part(*work, whole.narrow(0, part * rank(), part), whole);
      gather_across(*second, whole);
      gather_inside(*second, whole);
      copy_data(inout, whole.narrow(0, 0, inout.numel()));
    });
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    auto work = messenger_->begin({"broadcast", inout.scalar_type(), inout.numel(), root});
    return start([this, work, inout, root] {
      const auto bytes = bytes_of(inout, 0, inout.numel());
      if (rank() == root) {
        others([&](int host) { work->send(column_[host], bytes); });
      } else if (root % ranks_ == place_) {
        work->receive(root, bytes);
      }
      work->wait();
      inside_->broadcast(inout, root % ranks_)->wait();
    });
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    auto work = messenger_->begin(parts.call(in));
    return start([this, work, out, in, parts = std::move(parts)] {
      if (parts.equal) {
        exchange_parts(*work, out, in);
      } else {
        exchange_given_parts(*work, out, in, parts);
      }
    });
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    auto work = messenger_->begin_all_gather_bytes();
    std::vector<std::string> messages;
    start([&] {
      std::string packed;
      for (const auto& message : inside_->all_gather_bytes(mine)) {
        const std::uint64_t bytes = message.size();
        packed.append(reinterpret_cast<const char*>(&bytes), sizeof bytes).append(message);
      }
      for (const auto& host : comm::all_gather_bytes(*work, column_, static_cast<std::size_t>(host_), packed)) {
        for (std::size_t at = 0; at < host.size();) {
          std::uint64_t bytes;
          std::memcpy(&bytes, host.data() + at, sizeof bytes);
          messages.push_back(host.substr(at + sizeof bytes, bytes));
          at += sizeof bytes + bytes;
        }
      }
    })->wait();
    ZERO_CHECK(static_cast<int>(messages.size()) == size(), "exchange of ", messages.size(), " messages");
    return messages;
  }

 private:
  // The members on this host as a group over shared memory.
  std::unique_ptr<Transport> split_inside(const net::ProcessInfo& identity, const Split& split) {
    Split inside{identity, {}, split.shared_memory, split.abort_check};
    for (auto member : split.members) {
      if (member.rank / ranks_ != host_) continue;
      member.rank %= ranks_;
      member.offer = member.offer.substr(messenger_->split_offer().size());
      inside.members.push_back(std::move(member));
    }
    return inside_->split(inside);
  }

  // Requires ranks numbered host by host.
  static net::ProcessInfo of_own_host(const net::ProcessInfo& identity) {
    std::vector<int> ranks(static_cast<std::size_t>(identity.local_size));
    std::iota(ranks.begin(), ranks.end(), identity.rank - identity.local_rank);
    return identity.of_members(ranks, identity.local_rank, base::join("host of ", ranks.front()));
  }

  std::shared_ptr<Work> start(std::function<void()> job) {
    return thread_.add([this, job = std::move(job)] {
      try {
        job();
      } catch (const CommError& error) {
        // The first failure that any rank detected is reported by all.
        auto cause = messenger_->watch().cause(kHostsGrace);
        if (!cause) {
          messenger_->abort(error.rank(), error.what());
          cause = PeerFailure{error.rank(), error.what()};
        }
        throw CommError(cause->reason, cause->rank);
      } catch (const std::exception& error) {
        messenger_->abort(rank_in_run(), error.what());
        throw;
      }
    });
  }

  // Calls f for every other host, starting with the next one.
  template <class F>
  void others(F&& body) const {
    for (int i = 1; i < hosts_; ++i) body((host_ + i) % hosts_);
  }

  // Posts the messages that gather this column's parts of `out`; this rank's part is already there.
  void gather_across(MessageWork& work, const at::Tensor& out) const {
    const auto part = out.numel() / size();
    others([&](int host) { work.receive(column_[host], bytes_of(out, column_[host] * part, part)); });
    others([&](int host) { work.send(column_[host], bytes_of(out, rank() * part, part)); });
  }

  // Waits for them; then the ranks of the host read from each other what each has received.
  void gather_inside(MessageWork& work, const at::Tensor& out, std::string_view of = {}) const {
    work.wait();
    const auto part = out.numel() / size();
    std::vector<std::shared_ptr<Work>> parts;
    for (int host = 0; host < hosts_; ++host)
      parts.push_back(inside_->all_gather(out.narrow(0, host * ranks_ * part, ranks_ * part),
                                          out.narrow(0, column_[host] * part, part), of));
    for (const auto& one : parts) one->wait();
  }

  // of_host[h]: the data of this host's ranks for the ranks of host h in this column, part by part.
  void take_column_inside(const std::vector<at::Tensor>& of_host, const at::Tensor& in) const {
    const auto numel = in.numel() / hosts_;
    const std::vector<std::int64_t> numels(static_cast<std::size_t>(ranks_), numel / ranks_);
    const Parts each{numels, numels, /*equal=*/true};
    std::vector<std::shared_ptr<Work>> parts;
    for (int host = 0; host < hosts_; ++host)
      parts.push_back(inside_->all_to_all(of_host[host], in.narrow(0, host * numel, numel), each));
    for (const auto& one : parts) one->wait();
  }

  // out: the data of every rank for this one, in rank order. First exchanges data by column inside the host, then
  // between hosts.
  void exchange_parts(MessageWork& work, const at::Tensor& out, const at::Tensor& in) const {
    const auto of_host = in.numel() / hosts_;
    auto column = at::empty({in.numel()}, in.options());
    std::vector<at::Tensor> parts;
    for (int host = 0; host < hosts_; ++host)
      parts.push_back((host == host_ ? out : column).narrow(0, host * of_host, of_host));
    take_column_inside(parts, in);
    others([&](int host) { work.receive(column_[host], bytes_of(out, host * of_host, of_host)); });
    others([&](int host) { work.send(column_[host], bytes_of(column, host * of_host, of_host)); });
    work.wait();
  }

  // Parts of other hosts are messages between the two ranks, those of this host go through shared memory.
  void exchange_given_parts(MessageWork& work, const at::Tensor& out, const at::Tensor& in, const Parts& parts) const {
    std::vector<int> peers;
    others([&](int host) {
      for (int i = 0; i < ranks_; ++i) peers.push_back(host * ranks_ + (place_ + i) % ranks_);
    });
    post_parts(work, identity(), peers, out.split_with_sizes(parts.out), in.split_with_sizes(parts.in), parts.equal);
    const auto of_host = [&](const std::vector<std::int64_t>& numels) {
      const auto first = numels.begin() + host_ * ranks_;
      return std::vector<std::int64_t>(first, first + ranks_);
    };
    const auto stretch = [&](const at::Tensor& whole, const std::vector<std::int64_t>& numels) {
      const auto first = numels.begin() + host_ * ranks_;
      return whole.narrow(0, std::accumulate(numels.begin(), first, std::int64_t{0}),
                          std::accumulate(first, first + ranks_, std::int64_t{0}));
    };
    inside_->all_to_all(stretch(out, parts.out), stretch(in, parts.in), {of_host(parts.out), of_host(parts.in)})
        ->wait();
    work.wait();
  }

  // out = the sum of all ranks' parts of `in` for this rank; may be this rank's own part of `in`.
  void sum_own_part(MessageWork& work, const at::Tensor& out, const at::Tensor& in) const {
    auto parts = at::empty({in.numel()}, in.options());
    exchange_parts(work, parts, in);
    std::vector<const void*> each;
    for (int r = 0; r < size(); ++r)
      each.push_back(static_cast<const char*>(parts.const_data_ptr()) + r * static_cast<std::int64_t>(out.nbytes()));
    sum(out, each);
  }

  // The ranks of a host first compute exact sums for each rank of the column, so that each host sends one quantized
  // sum.
  void sum_quantized(MessageWork& work, const at::Tensor& out, const at::Tensor& in, int bits) const {
    const auto numel = out.numel(), of_host = numel * ranks_;
    const auto dtype = sum_dtype(in.scalar_type());
    auto column = at::empty({in.numel()}, in.options()), sums = at::empty({hosts_ * numel}, at::kFloat);
    std::vector<at::Tensor> parts;
    for (int host = 0; host < hosts_; ++host) parts.push_back(column.narrow(0, host * of_host, of_host));
    take_column_inside(parts, in);
    std::vector<const void*> of_hosts;
    for (int host = 0; host < hosts_; ++host) {
      std::vector<const void*> each;
      for (int r = 0; r < ranks_; ++r) each.push_back(parts[host].narrow(0, r * numel, numel).const_data_ptr());
      auto to = sums.narrow(0, host * numel, numel);
      if (numel > 0) kernels::sum_parts(to.mutable_data_ptr(), kernels::Dtype::F32, each.data(), ranks_, dtype, numel);
      of_hosts.push_back(to.const_data_ptr());
    }
    QuantizedSum sum(column_, static_cast<std::size_t>(host_), numel, bits);
    sum.post(work, of_hosts, kernels::Dtype::F32);
    work.wait();
    sum.finish(out.mutable_data_ptr(), dtype, of_hosts[static_cast<std::size_t>(host_)], kernels::Dtype::F32);
  }

  void sum_all(MessageWork& work, const at::Tensor& inout) const {
    const auto numel = inout.numel();
    auto column = at::empty({hosts_ * numel}, inout.options());
    copy_data(column.narrow(0, host_ * numel, numel), inout);
    others([&](int host) { work.receive(column_[host], bytes_of(column, host * numel, numel)); });
    others([&](int host) { work.send(column_[host], bytes_of(column, host_ * numel, numel)); });
    work.wait();
    auto all = at::empty({size() * numel}, inout.options());
    inside_->all_gather(all, column)->wait();
    std::vector<const void*> each;
    for (int r = 0; r < size(); ++r)
      each.push_back(static_cast<const char*>(all.const_data_ptr()) +
                     (r % ranks_ * hosts_ + r / ranks_) * static_cast<std::int64_t>(inout.nbytes()));
    sum(inout, each);
  }

  static void sum(const at::Tensor& out, const std::vector<const void*>& parts) {
    if (out.numel() == 0) return;
    const auto dtype = sum_dtype(out.scalar_type());
    kernels::sum_parts(out.mutable_data_ptr(), dtype, parts.data(), static_cast<int>(parts.size()), dtype, out.numel());
  }

  std::unique_ptr<Messenger> messenger_;
  const int host_, hosts_, place_, ranks_;  // place_: index among the host's ranks_
  std::vector<int> column_;
  // Other groups may use the memory of inside_ for longer than this transport lives.
  const std::shared_ptr<std::atomic<bool>> connected_ = std::make_shared<std::atomic<bool>>(false);
  std::unique_ptr<Transport> inside_;
  CollectiveThread thread_;  // destroyed first
};

}  // namespace

std::unique_ptr<Transport> make_shm_gloo(const net::ProcessInfo& identity, milliseconds timeout, bool asked) {
  auto messenger = std::make_unique<Messenger>(identity, timeout);
  const net::NodeTopology& hosts = messenger->hosts();
  if (joins_hosts(identity, *messenger)) return std::make_unique<ShmGloo>(identity, timeout, std::move(messenger));
  if (asked)
    throw ConfigError(
        base::join("[Communicator::from_env] got ZERO_TRANSPORT=shm+gloo, expected several ranks, equally many, on "
                   "each of several hosts, numbered host by host (",
                   identity.place(), "). Hint: ZERO_TRANSPORT=auto"));
  if (identity.rank == 0 && hosts.count() != identity.size)
    base::log(LogLevel::Info,
              "all ranks over TCP: hosts have different numbers of ranks, or ranks are not numbered host by host");
  return make_gloo(identity, timeout, std::move(messenger));
}

}  // namespace zero::comm
