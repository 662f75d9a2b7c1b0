// The "c10d" transport, over a process group of the program. c10d moves bytes with its all-gather, all-to-all and
// broadcast; sums are computed here. Collectives run on one thread, one after another, because a c10d group matches
// operations by their order and all_reduce consists of two.
//
// [Note: who failed] c10d reports that an operation failed, but rarely which rank caused it. A rank that fails or
// detects a failure writes it to a key of the group's store, which waiting ranks read every 100 ms.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <zero/process_group.h>

#include "base/check.h"
#include "comm/bootstrap/c10d_rendezvous.h"
#include "comm/collective_call.h"
#include "comm/collective_thread.h"
#include "comm/group.h"
#include "comm/local/local.h"
#include "comm/transport.h"
#include "kernels/elementwise.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

constexpr milliseconds kStoreLook{100};
// How long a rank with a broken connection waits for the reported cause.
constexpr milliseconds kStoreGrace{500};
// How long the destructor waits for this rank's own collectives, and for the other members of a split group.
constexpr milliseconds kStoreFarewell{2000};
// Bytes of a control message that need no second round, and of the slot that holds the length and the message.
constexpr std::int64_t kInlineBytes = 248, kSlotBytes = kInlineBytes + 8;

at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view(at::kByte); }

// A process group that this rank can make groups from, and the store where its ranks meet; gloo has one of its own.
const c10d::ProcessGroupGloo* as_gloo(const c10d::Backend& backend) {
  return dynamic_cast<const c10d::ProcessGroupGloo*>(&backend);
}
c10::intrusive_ptr<c10d::Store> store_of(const c10d::ProcessGroupGloo& gloo) {
  const auto store = const_cast<c10d::ProcessGroupGloo&>(gloo)._getStore();
  // The type is always this one, but libtorch hides the symbols that dynamic_cast needs.
  return store ? static_cast<c10d::ProcessGroupGloo::GlooStore&>(*store)._getStore() : nullptr;
}

// State shared by this rank's transport and its jobs.
class Link {
 public:
  Link(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store)
      : backend_(std::move(backend)), store_(std::move(store)) {
    identity_.rank = rank();
    identity_.size = size();
  }

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  // `key`: where the run's failure is recorded in the store.
  void use(const net::ProcessInfo& identity, std::string key) {
    identity_ = identity;
    key_ = std::move(key);
  }
  int rank_in_run() const { return identity_.rank_in_run(identity_.rank); }

  bool splits() const { return as_gloo(*backend_) != nullptr && store_of(*as_gloo(*backend_)) != nullptr; }
  // Blocks until all members have connected. Requires splits().
  std::shared_ptr<Link> split(const net::ProcessInfo& identity, milliseconds timeout) {
    one_of_several_ = true;
    const auto& gloo = *as_gloo(*backend_);
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->threads = 1;
    options->devices = const_cast<c10d::ProcessGroupGloo&>(gloo).getOptions()->devices;
    auto place = c10::make_intrusive<c10d::PrefixStore>(base::join(key_, "/", identity.run_id), store_of(gloo));
    try {
      auto link = std::make_shared<Link>(
          c10::make_intrusive<c10d::ProcessGroupGloo>(place, identity.rank, identity.size, options), store_);
      link->use(identity, key_);
      link->place_ = std::move(place);
      link->one_of_several_ = true;
      return link;
    } catch (const std::exception& error) {
      throw CommError(base::join("[Communicator::split] got '", first_line(error), "', expected connections to all ",
                                 identity.size, " ranks (", identity.place(), ")"));
    }
  }

  // Each blocks until the data has arrived. `call` and `sequence` are for messages.
  void all_gather(at::Tensor out, at::Tensor in, const Call& call, std::uint64_t sequence, milliseconds timeout) {
    if (out.numel() == 0) return;
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    finish([&] { return backend_->_allgather_base(out, in, options); }, call, sequence, timeout);
  }
  void all_to_all(at::Tensor out, at::Tensor in, const Call& call, std::uint64_t sequence, milliseconds timeout) {
    if (out.numel() > 0) all_to_all(out, in, {}, {}, call, sequence, timeout);
  }
  // Sizes of the parts in bytes; empty: equal.
  void all_to_all(at::Tensor out, at::Tensor in, std::vector<std::int64_t> out_bytes,
                  std::vector<std::int64_t> in_bytes, const Call& call, std::uint64_t sequence, milliseconds timeout) {
    c10d::AllToAllOptions options;
    options.timeout = timeout;
    finish([&] { return backend_->alltoall_base(out, in, out_bytes, in_bytes, options); }, call, sequence, timeout);
  }
  void broadcast(at::Tensor inout, int root, const Call& call, std::uint64_t sequence, milliseconds timeout) {
    if (inout.numel() == 0) return;
    Tensors tensors{std::move(inout)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout;
    finish([&] { return backend_->broadcast(tensors, options); }, call, sequence, timeout);
  }

  // Of a split group: waits a limited time until all members leave. Closing a connection loses what the peer has not
  // read, and a peer may still be connecting.
  void leave() noexcept {
    if (!place_ || failure()) return;
    try {
      const auto until = Clock::now() + kStoreFarewell;
      for (auto left = place_->add("left", 1); left < size() && Clock::now() < until; left = place_->add("left", 0))
        std::this_thread::sleep_for(milliseconds(1));
    } catch (const std::exception&) {  // the rank that hosts the store has ended
    }
  }

  // The first failure counts, here and in the store.
  void fail(int rank, const std::string& reason) noexcept {
    try {
      {
        std::lock_guard lock(mutex_);
        if (failure_) return;
        failure_ = PeerFailure{rank, reason};
      }
      const auto text = base::join(rank, " ", reason);
      if (has_store() && !store_->check({key_})) store_->set(key_, std::vector<std::uint8_t>(text.begin(), text.end()));
    } catch (...) {  // no store or no memory: the peers notice the end of this rank
    }
  }
  std::optional<PeerFailure> failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  void check(const Call& call, std::uint64_t sequence) const {
    if (const auto cause = failure()) raise(*cause, call, sequence);
  }

 private:
  [[noreturn]] void raise(const PeerFailure& cause, const Call& call, std::uint64_t sequence) const {
    if (cause.reason.starts_with("[")) throw CommError(cause.reason, cause.rank);
    throw CommError(at_call(call.op, cause.reason, rank_in_run(), run_size(), sequence), cause.rank);
  }

  // Adopts a failure that a peer has recorded.
  void read_store() {
    if (!has_store()) return;
    try {
      if (!store_->check({key_})) return;
      const auto bytes = store_->get(key_);
      const std::string text(bytes.begin(), bytes.end());
      std::lock_guard lock(mutex_);
      if (!failure_) failure_ = PeerFailure{std::atoi(text.c_str()), text.substr(text.find(' ') + 1)};
    } catch (const std::exception&) {  // the rank that hosts the store has ended
      store_gone_ = true;
    }
  }

  template <class Start>
  void finish(Start start, const Call& call, std::uint64_t sequence, milliseconds timeout) {
    const auto begin = Clock::now();
    const auto look = [&](Clock::time_point now) {
      if (now >= next_look_) {
        next_look_ = now + kStoreLook;
        read_store();
      }
      check(call, sequence);
    };
    if (one_of_several_) {
      look(begin);
    } else {
      next_look_ = begin + kStoreLook;
      check(call, sequence);
    }
    try {
      const c10::intrusive_ptr<c10d::Work> work = start();
      for (int spins = 0; !work->isCompleted(); ++spins) {
        if (spins < 50) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(spins < 500 ? 20 : 200));
        }
        const auto now = Clock::now();
        look(now);
        if (now - begin >= timeout) throw std::runtime_error("its end is late");
      }
      work->wait();
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      // If c10d's own timeout is first, its message differs between backends.
      const bool late = Clock::now() - begin >= timeout;
      give_reason(late ? "no end within " + duration_text(timeout) : first_line(error), call, sequence);
    }
  }

  // Throws c10d's error, or the failure that a peer has recorded meanwhile.
  [[noreturn]] void give_reason(const std::string& error, const Call& call, std::uint64_t sequence) {
    const auto until = Clock::now() + kStoreGrace;
    while (has_store() && !failure() && Clock::now() < until) {
      read_store();
      if (!failure()) std::this_thread::sleep_for(milliseconds(20));
    }
    check(call, sequence);
    fail(-1, at_call(call.op, base::join("got '", error, "', expected ", call.text(), " from all ", size(), " ranks"),
                     rank_in_run(), run_size(), sequence, "the output of the other ranks says who failed"));
    check(call, sequence);
    throw CommError(error);
  }

  bool has_store() const { return store_ && !key_.empty() && !store_gone_; }
  int run_size() const { return identity_.run_size > 0 ? identity_.run_size : size(); }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<bool> store_gone_ = false;
  std::atomic<bool> one_of_several_ = false;  // the run has groups, which fail together
  c10::intrusive_ptr<c10d::Store> place_;     // of a split group
  net::ProcessInfo identity_;
  Clock::time_point next_look_{};  // at the store
  std::string key_;
  mutable std::mutex mutex_;
  std::optional<PeerFailure> failure_;
};

// One slot per rank: the length, and the message if it fits. Otherwise a second round has slots for the longest
// message.
std::vector<std::string> all_gather_bytes_over(Link& link, std::string_view mine, std::uint64_t sequence,
                                               milliseconds timeout) {
  const Call call{"all_gather_bytes"};
  const std::int64_t size = link.size(), length = static_cast<std::int64_t>(mine.size());
  auto slots = at::zeros({size * kSlotBytes}, at::kByte), slot = at::zeros({kSlotBytes}, at::kByte);
  auto* const bytes = static_cast<char*>(slot.mutable_data_ptr());
  std::memcpy(bytes, &length, sizeof length);
  mine.copy(bytes + sizeof length, static_cast<std::size_t>(kInlineBytes));
  link.all_gather(slots, slot, call, sequence, timeout);
  std::vector<std::int64_t> lengths;
  const auto* const of = static_cast<const char*>(slots.const_data_ptr());
  for (std::int64_t r = 0; r < size; ++r) std::memcpy(&lengths.emplace_back(), of + r * kSlotBytes, sizeof length);
  const auto longest = *std::max_element(lengths.begin(), lengths.end());
  at::Tensor rest;
  if (longest > kInlineBytes) {
    rest = at::empty({size * longest}, at::kByte);
    auto own = at::zeros({longest}, at::kByte);
    if (!mine.empty()) std::memcpy(own.mutable_data_ptr(), mine.data(), mine.size());
    link.all_gather(rest, own, call, sequence, timeout);
  }
  std::vector<std::string> messages;
  for (std::int64_t r = 0; r < size; ++r) {
    const char* const from = rest.defined() ? static_cast<const char*>(rest.const_data_ptr()) + r * longest
                                            : of + r * kSlotBytes + static_cast<std::int64_t>(sizeof length);
    messages.emplace_back(from, static_cast<std::size_t>(lengths[static_cast<std::size_t>(r)]));
  }
  return messages;
}

class C10d final : public Transport {
 public:
  // hosts[r]: the number of rank r's host.
  C10d(const net::ProcessInfo& identity, std::shared_ptr<Link> link, std::vector<int> hosts)
      : Transport(identity), link_(std::move(link)), hosts_(std::move(hosts)) {}
  ~C10d() override {
    if (!thread_.idle_within(kStoreFarewell)) link_->fail(rank_in_run(), "the communicator ended in a collective");
    link_->leave();
  }

  std::string name() const override { return "c10d"; }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    on_cpu(out);
    // This rank's part of `out` may be read while it is written.
    const bool inside = in.storage().is_alias_of(out.storage());
    return start({"all_gather", out.scalar_type(), out.numel(), -1, std::string(of)},
                 [out, in = inside ? in.clone() : in](Step& step) { step.all_gather(as_bytes(out), as_bytes(in)); });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    on_cpu(out);
    return start({"reduce_scatter", in.scalar_type(), in.numel()}, [out, in](Step& step) { sum_own(step, out, in); });
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    on_cpu(inout);
    return start({"all_reduce", inout.scalar_type(), inout.numel()}, [inout, size = size(), rank = rank()](Step& step) {
      const auto part = (inout.numel() + size - 1) / size;
      auto whole = inout;
      if (part * size != inout.numel()) {
        whole = at::zeros({part * size}, inout.options());
        copy_flat(whole.narrow(0, 0, inout.numel()), inout);
      }
      auto own = at::empty({part}, inout.options());
      sum_own(step, own, whole);
      step.all_gather(as_bytes(whole), as_bytes(own));
      copy_flat(inout, whole.narrow(0, 0, inout.numel()));
    });
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    on_cpu(inout);
    return start({"broadcast", inout.scalar_type(), inout.numel(), root},
                 [inout, root](Step& step) { step.broadcast(as_bytes(inout), root); });
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in, Parts parts) override {
    on_cpu(out);
    auto call = parts.call(in);
    return start(std::move(call), [this, out, in, parts = std::move(parts)](Step& step) {
      if (parts.equal) {
        step.all_to_all(as_bytes(out), as_bytes(in));
      } else {
        exchange_given_parts(step, out, in, parts);
      }
    });
  }

  std::vector<std::string> all_gather_bytes(std::string_view mine) override {
    std::vector<std::string> messages;
    start({"all_gather_bytes"}, [&](Step& step) {
      messages = all_gather_bytes_over(*step.link, mine, step.sequence, step.timeout);
    })->wait();
    return messages;
  }

  void abort(const std::string& reason) noexcept override { link_->fail(rank_in_run(), own_failure(reason)); }
  void stop(const std::string& reason, int rank) noexcept override { link_->fail(rank, reason); }
  std::optional<PeerFailure> failure() const override { return link_->failure(); }

  bool has_neighbours(int) const override { return false; }
  std::vector<int> hosts() const override { return hosts_; }
  std::string why_no_split() const override {
    if (link_->splits()) return "";
    return "which cannot be split unless the process group is gloo's and has a store. Hint: make a process group of "
           "those ranks (new_group), and a Communicator from it";
  }
  std::unique_ptr<Transport> split(const Split& split) override {
    std::vector<int> hosts;
    for (const auto& member : split.members) hosts.push_back(hosts_[static_cast<std::size_t>(member.rank)]);
    return std::make_unique<C10d>(split.identity, link_->split(split.identity, timeout_), std::move(hosts));
  }

 private:
  // One collective, executed on the thread.
  struct Step {
    Link* link;
    const Call& call;
    std::uint64_t sequence;
    milliseconds timeout;
    void all_gather(at::Tensor out, at::Tensor in) { link->all_gather(out, in, call, sequence, timeout); }
    void all_to_all(at::Tensor out, at::Tensor in) { link->all_to_all(out, in, call, sequence, timeout); }
    void broadcast(at::Tensor inout, int root) { link->broadcast(inout, root, call, sequence, timeout); }
  };

  // Ranks first tell each other the sizes of the parts.
  void exchange_given_parts(Step& step, const at::Tensor& out, const at::Tensor& in, const Parts& parts) const {
    const auto ranks = static_cast<std::int64_t>(parts.in.size());
    auto told = at::empty({ranks}, at::kLong), mine = at::empty({ranks}, at::kLong);
    std::copy(parts.in.begin(), parts.in.end(), mine.mutable_data_ptr<std::int64_t>());
    step.all_to_all(as_bytes(told), as_bytes(mine));
    const auto* const sent = told.const_data_ptr<std::int64_t>();
    for (int r = 0; r < size(); ++r) {
      const auto expected = parts.out[static_cast<std::size_t>(r)];
      if (sent[r] == expected) continue;
      step.link->fail(-1, parts_differ(identity().name_of(r), sent[r], identity().name_of(rank()), expected));
      step.link->check(step.call, step.sequence);
    }
    const auto in_bytes = [&](std::vector<std::int64_t> numels) {
      for (auto& numel : numels) numel *= static_cast<std::int64_t>(in.element_size());
      return numels;
    };
    step.link->all_to_all(as_bytes(out), as_bytes(in), in_bytes(parts.out), in_bytes(parts.in), step.call,
                          step.sequence, step.timeout);
  }

  static void on_cpu(const at::Tensor& tensor) {
    if (!tensor.is_cpu())
      throw ConfigError("[Communicator] got a tensor on " + tensor.device().str() +
                        ", expected CPU memory over a process group");
  }

  // out = the sum of all ranks' parts of `in` for this rank; may be this rank's own part of `in`.
  static void sum_own(Step& step, const at::Tensor& out, const at::Tensor& in) {
    if (out.numel() == 0) return;
    auto parts = at::empty({in.numel()}, in.options());
    step.all_to_all(as_bytes(parts), as_bytes(in));
    std::vector<const void*> each;
    for (int r = 0; r < step.link->size(); ++r)
      each.push_back(static_cast<const char*>(parts.const_data_ptr()) + r * static_cast<std::int64_t>(out.nbytes()));
    const auto dtype = sum_dtype(out.scalar_type());
    kernels::sum_parts(out.mutable_data_ptr(), dtype, each.data(), static_cast<int>(each.size()), dtype, out.numel());
  }

  std::shared_ptr<Work> start(Call call, std::function<void(Step&)> job) {
    const auto sequence = sequence_++;
    link_->check(call, sequence);
    return thread_.add([link = link_, call = std::move(call), sequence, timeout = timeout_, job = std::move(job)] {
      Step step{link.get(), call, sequence, timeout};
      link->check(call, sequence);
      job(step);
    });
  }

  const std::shared_ptr<Link> link_;
  const std::vector<int> hosts_;
  std::uint64_t sequence_ = 0;
  CollectiveThread thread_;  // destroyed first
};

// Identifies processes that share memory and devices.
std::string host_name() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return boot + " " + name;
}

// gloo's write to a dead peer's socket raises SIGPIPE in a thread of the group, which ends a process that does not
// ignore or handle it. Only the disposition of the whole process reaches threads that already run.
void ignore_broken_pipes() {
  struct sigaction now = {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL)
    signal(SIGPIPE, SIG_IGN);
}

}  // namespace

std::shared_ptr<Communicator> over_backend(c10::intrusive_ptr<c10d::Backend> backend,
                                           c10::intrusive_ptr<c10d::Store> store) {
  if (!backend) throw ConfigError("[Communicator::from_process_group] got no process group");
  if (backend->getBackendName() == "nccl")
    throw ConfigError(
        "[Communicator::from_process_group] got a process group of nccl alone, expected one that moves CPU tensors. "
        "Hint: init_process_group(\"cpu:gloo,cuda:nccl\"), or Communicator::from_env with ZERO_TRANSPORT=nccl");
  if (const auto* gloo = as_gloo(*backend); gloo != nullptr && !store) store = store_of(*gloo);
  ignore_broken_pipes();
  const milliseconds timeout = std::chrono::minutes(30);
  net::ProcessInfo identity;
  identity.rank = backend->getRank();
  identity.size = backend->getSize();
  identity.source = "a process group";
  auto link = std::make_shared<Link>(std::move(backend), std::move(store));
  // Gathers the location of every rank, and a unique key for this Communicator in the group's store.
  std::random_device random;
  const auto key = base::join("zero/failure/", random(), "-", random());
  const auto hosts = all_gather_bytes_over(*link, key + "\n" + host_name(), 0, timeout);
  std::vector<int> numbers;
  std::map<std::string, int> known;
  for (const auto& text : hosts)
    numbers.push_back(known.try_emplace(text.substr(text.find('\n')), static_cast<int>(known.size())).first->second);
  identity.local_rank = identity.local_size = 0;
  for (int r = 0; r < identity.size; ++r) {
    if (numbers[static_cast<std::size_t>(r)] != numbers[static_cast<std::size_t>(identity.rank)]) continue;
    ++identity.local_size;
    if (r < identity.rank) ++identity.local_rank;
  }
  link->use(identity, hosts[0].substr(0, hosts[0].find('\n')));
  return make_communicator(std::make_unique<C10d>(identity, std::move(link), std::move(numbers)));
}

std::shared_ptr<Communicator> over_process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!group) throw ConfigError("[Communicator::from_process_group] got no process group");
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& error) {
    throw ConfigError(base::join("[Communicator::from_process_group] got '", first_line(error),
                                 "', expected a process group that moves CPU tensors. Hint: "
                                 "init_process_group(\"cpu:gloo,cuda:nccl\")"));
  }
  return over_backend(std::move(backend), group->getStore());
}

}  // namespace zero::comm
