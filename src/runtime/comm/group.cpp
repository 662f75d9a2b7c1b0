// Argument checks, byte counts, the status page, and failures shared by the groups of a run. Moves no data.
#include "comm/group.h"

#include <algorithm>
#include <cstring>

#include "comm/arguments.h"
#include "kernels/quantize.h"
#include "observe/status_page.h"

namespace zero {

std::uint64_t CommStats::bytes_sent() const {
  std::uint64_t sum = 0;
  for (const auto& [op, row] : by_op) sum += row.bytes_sent;
  return sum;
}

namespace comm {

std::string Transport::own_failure(const std::string& reason) const noexcept {
  try {
    return base::join(identity_.name_of(rank()), " failed: ", reason);
  } catch (...) {
    return {};
  }
}

at::Tensor Transport::allocate(std::int64_t numel, c10::ScalarType dtype) { return at::empty({numel}, dtype); }

// A rank's message when a group is split, followed by its split_offer(). `mark` distinguishes it from other messages.
namespace {
struct SplitWord {
  std::uint64_t mark = 0x7a65726f73706c74;  // "zerosplt"
  std::int32_t color = -1, key = 0, unfinished = 0;
};

std::optional<SplitWord> split_word(const std::string& message) {
  SplitWord word, own;
  if (message.size() < sizeof word) return std::nullopt;
  std::memcpy(&word, message.data(), sizeof word);
  return word.mark == own.mark ? std::optional(word) : std::nullopt;
}
}  // namespace

// Counts as unfinished until it has been waited for. Reports a failure to the family, and begin and end of the
// collective to the launcher.
class Group::TrackedWork final : public Work {
 public:
  TrackedWork(const Group& group, std::shared_ptr<Work> work, std::uint64_t sequence, const char* op,
              const at::Tensor& whole, bool on_page)
      : family_(group.family_),
        unfinished_(group.unfinished_),
        work_(std::move(work)),
        sequence_(sequence),
        op_(op),
        dtype_(whole.scalar_type()),
        numel_(whole.numel()),
        on_page_(on_page) {
    ++*unfinished_;
  }
  ~TrackedWork() override { end(); }

  void wait() override {
    try {
      work_->wait();
    } catch (const CommError& error) {
      if (on_page_) observe::status_page().set_error(error.what(), ExitCode::kPeer);
      if (!std::exchange(failed_, true)) family_->stop({error.rank(), error.what()});
      end();
      throw;
    }
    complete();
  }
  bool done() override {
    const bool done = work_->done();
    if (done && !failed_) complete();
    return done;
  }

 private:
  void complete() {
    if (end() && on_page_)
      observe::status_page().set_collective(sequence_, op_, dtype_text(dtype_), numel_,
                                            observe::CollectiveState::After);
  }
  bool end() {
    if (std::exchange(ended_, true)) return false;
    --*unfinished_;
    return true;
  }

  const std::shared_ptr<Family> family_;
  const std::shared_ptr<std::atomic<int>> unfinished_;
  const std::shared_ptr<Work> work_;
  const std::uint64_t sequence_;
  const char* const op_;
  const c10::ScalarType dtype_;
  const std::int64_t numel_;
  const bool on_page_;
  bool ended_ = false, failed_ = false;
};

Group::Group(std::unique_ptr<Transport> transport, std::shared_ptr<Group> parent)
    : parent_(std::move(parent)),
      family_(parent_ ? parent_->family_ : std::make_shared<Family>()),
      transport_(std::move(transport)) {
  ZERO_CHECK(transport_ != nullptr, "a Communicator without a transport");
  family_->join(*transport_);
}

// A forked child has none of the transport's threads, and the sockets and memory belong to the parent.
Group::~Group() {
  family_->leave(*transport_);
  if (::getpid() != pid_) (void)transport_.release();
}

void Group::ended_by(const CommError& error) noexcept {
  if (!parent_) observe::status_page().set_error(error.what(), ExitCode::kPeer);
  try {
    family_->stop({error.rank(), error.what()});
  } catch (...) {  // out of memory: the peers notice the failure themselves
  }
}

template <class Body>
auto Group::guarded(Body body) {
  try {
    return body();
  } catch (const CommError& error) {
    ended_by(error);
    throw;
  }
}

// Starts a collective. `whole`: the total over ranks. Collectives of the run are numbered and reported to the launcher.
template <class Start>
std::shared_ptr<Work> Group::start(const char* op, const at::Tensor& whole, Start start) {
  auto& page = observe::status_page();
  const std::uint64_t mine = sequence_++;
  const bool on_page = page.active() && !parent_;
  if (on_page)
    page.set_collective(mine, op, dtype_text(whole.scalar_type()), whole.numel(), observe::CollectiveState::Inside);
  return guarded([&]() -> std::shared_ptr<Work> {
    return std::make_shared<TrackedWork>(*this, start(), mine, op, whole, on_page);
  });
}

// `bytes_whole`: bytes of the total over ranks.
void Group::count(const char* op, std::uint64_t bytes_whole, std::uint64_t times) {
  const auto n = static_cast<std::uint64_t>(size());
  count_sent(op, times * (n - 1) * bytes_whole / n);
}

void Group::count_sent(const char* op, std::uint64_t bytes) {
  auto& row = stats_.by_op[op];
  ++row.calls;
  row.bytes_sent += bytes;
  if (is_named()) family_->count(base::join(transport_->identity().group, ".", op), bytes);
}

std::shared_ptr<Work> Group::all_gather(at::Tensor out, const at::Tensor& in, std::string_view of) {
  const Arguments check("all_gather", *transport_);
  check.matching(out, in);
  check.require(out.numel() == in.numel() * size(), "`out` of ", out.numel(), " elements, expected ",
                in.numel() * size(), " (", size(), " ranks x ", in.numel(), " of `in`)");
  check.apart_or_own(out, in, true);
  auto work = start("all_gather", out, [&] { return transport_->all_gather(out, in, of); });
  count("all_gather", out.nbytes());
  return work;
}

std::shared_ptr<Work> Group::reduce_scatter(at::Tensor out, const at::Tensor& in) {
  const Arguments check("reduce_scatter", *transport_);
  check.matching(out, in);
  check.sums(out);
  check.require(in.numel() == out.numel() * size(), "`in` of ", in.numel(), " elements, expected ",
                out.numel() * size(), " (", size(), " ranks x ", out.numel(), " of `out`)");
  check.apart_or_own(in, out, true);
  auto work = start("reduce_scatter", in, [&] { return transport_->reduce_scatter(out, in); });
  count("reduce_scatter", in.nbytes());
  return work;
}

std::shared_ptr<Work> Group::reduce_scatter_quantized(at::Tensor out, const at::Tensor& in, int bits) {
  if (!quantizes()) return reduce_scatter(std::move(out), in);
  const Arguments check("reduce_scatter_quantized", *transport_);
  check.matching(out, in);
  check.sums(out);
  check.require(bits == 8 || bits == 4, bits, " bits, expected 8 or 4");
  check.require(in.numel() == out.numel() * size(), "`in` of ", in.numel(), " elements, expected ",
                out.numel() * size(), " (", size(), " ranks x ", out.numel(), " of `out`)");
  check.apart_or_own(in, out, true);
  auto work = start("reduce_scatter", in, [&] { return transport_->reduce_scatter_quantized(out, in, bits); });
  const auto bytes = static_cast<std::uint64_t>(kernels::quantized_bytes(out.numel(), bits));
  count("reduce_scatter_quantized", bytes * static_cast<std::uint64_t>(size()));
  return work;
}

std::shared_ptr<Work> Group::all_reduce(at::Tensor inout) {
  const Arguments check("all_reduce", *transport_);
  check.flat("inout", inout);
  check.sums(inout);
  auto work = start("all_reduce", inout, [&] { return transport_->all_reduce(inout); });
  count("all_reduce", inout.nbytes(), 2);
  return work;
}

std::shared_ptr<Work> Group::broadcast(at::Tensor inout, int root) {
  const Arguments check("broadcast", *transport_);
  check.flat("inout", inout);
  check.require(root >= 0 && root < size(), "root ", root, ", expected 0 to ", size() - 1);
  auto work = start("broadcast", inout, [&] { return transport_->broadcast(inout, root); });
  count("broadcast", inout.nbytes());
  return work;
}

std::shared_ptr<Work> Group::all_to_all(at::Tensor out, const at::Tensor& in) {
  const Arguments check("all_to_all", *transport_);
  check.matching(out, in);
  check.require(out.numel() == in.numel(), "`out` of ", out.numel(), " elements, expected ", in.numel(), " as `in`");
  check.require(in.numel() % size() == 0, in.numel(), " elements, expected a multiple of the ", size(), " ranks");
  const std::vector<std::int64_t> numels(static_cast<std::size_t>(size()), in.numel() / size());
  return exchange(std::move(out), in, {numels, numels, /*equal=*/true});
}

std::shared_ptr<Work> Group::all_to_all(at::Tensor out, const at::Tensor& in,
                                        const std::vector<std::int64_t>& out_numels,
                                        const std::vector<std::int64_t>& in_numels) {
  const Arguments check("all_to_all", *transport_);
  check.matching(out, in);
  check.parts("out", out, out_numels);
  check.parts("in", in, in_numels);
  const auto own = static_cast<std::size_t>(rank());
  check.require(out_numels[own] == in_numels[own], in_numels[own], " elements from this rank to itself in `in_numels`",
                ", expected ", out_numels[own], " as in `out_numels`");
  return exchange(std::move(out), in, {out_numels, in_numels});
}

std::shared_ptr<Work> Group::exchange(at::Tensor out, const at::Tensor& in, Parts parts) {
  Arguments("all_to_all", *transport_).apart_or_own(out, in, false);
  const auto to_others = in.numel() - parts.in[static_cast<std::size_t>(rank())];
  auto work = start("all_to_all", in, [&] { return transport_->all_to_all(out, in, std::move(parts)); });
  count_sent("all_to_all", static_cast<std::uint64_t>(to_others) * in.element_size());
  return work;
}

at::Tensor Group::allocate(std::int64_t numel, c10::ScalarType dtype) {
  Arguments("allocate", *transport_).require(numel >= 0, numel, " elements, expected 0 or more");
  return transport_->allocate(numel, dtype);
}

std::shared_ptr<Work> Group::peer_reduce_scatter(PeerReduce sum) {
  const Arguments check("peer_reduce_scatter", *transport_);
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
  auto work = start("reduce_scatter", like, [&] { return transport_->peer_reduce_scatter(std::move(sum)); });
  count("reduce_scatter", bytes);
  if (to_all) count("all_gather", bytes);
  return work;
}

std::shared_ptr<SymmetricBuffer> Group::share(std::int64_t shard_numel, c10::ScalarType dtype) {
  Arguments("share", *transport_).require(shard_numel >= 0, shard_numel, " elements, expected 0 or more");
  return transport_->share(shard_numel, dtype);
}

void Group::set_timeout(std::chrono::milliseconds timeout) {
  Arguments("set_timeout", *transport_).require(timeout.count() > 0, timeout.count(), " ms, expected more than 0");
  transport_->set_timeout(timeout);
}

void Group::gather(SymmetricBuffer& vector) {
  const auto& whole = vector.whole();
  // It has no sequence number, because ranks may gather repeatedly without each other.
  const auto show = [&](observe::CollectiveState state) {
    if (auto& page = observe::status_page(); page.active() && !parent_)
      page.set_collective(sequence_, "all_gather", dtype_text(whole.scalar_type()), whole.numel(), state);
  };
  show(observe::CollectiveState::Inside);
  guarded([&] { vector.wait(); });
  show(observe::CollectiveState::Before);  // of the next collective, whose number was used
  count("all_gather", whole.nbytes());
}

std::vector<std::string> Group::all_gather_bytes(std::string_view mine) {
  const std::uint64_t sequence = sequence_++;
  const auto show = [&](observe::CollectiveState state) {
    if (!parent_) observe::status_page().set_collective(sequence, "all_gather_bytes", "byte", 0, state);
  };
  show(observe::CollectiveState::Inside);
  auto messages = guarded([&] { return transport_->all_gather_bytes(mine); });
  show(observe::CollectiveState::After);
  const auto bytes = mine.size() * static_cast<std::uint64_t>(size() - 1);
  ++stats_.control.calls;
  stats_.control.bytes_sent += bytes;
  if (is_named()) family_->count_control(bytes);
  return messages;
}

void Group::abort(const std::string& reason) noexcept {
  transport_->abort(reason);
  try {
    const auto& identity = transport_->identity();
    family_->stop({transport_->rank_in_run(), base::join(identity.name_of(rank()), " failed: ", reason)});
  } catch (...) {  // out of memory: the peers of this group know of the failure
  }
}

CommStats Group::stats() const {
  auto stats = stats_;
  if (!parent_) family_->add_named_groups(stats);
  stats.bytes_across_hosts = bytes_across_hosts() - across_before_;
  return stats;
}

std::uint64_t Group::bytes_across_hosts() const {
  return transport_->bytes_across_hosts() + (parent_ ? 0 : family_->named_bytes_across_hosts());
}

void Group::reset_stats() {
  stats_ = {};
  if (!parent_) family_->forget_named_groups();
  across_before_ = bytes_across_hosts();
}

bool Group::has_neighbours(int count) const {
  return transport_->why_no_split().empty() && transport_->has_neighbours(count);
}

std::shared_ptr<Group> Group::neighbours(int count) {
  const Arguments check("neighbours", *transport_);
  check.require(has_neighbours(count), count, " neighbours over ", transport_->name(),
                ", expected processes numbered host by host, and a divisor of the ", local_size(),
                " ranks of this host");
  return split_into(rank() / count, rank(), /*shared_memory=*/true);
}

std::shared_ptr<Group> Group::split(int color, int key, std::string_view name) {
  return split_into(color, key, /*shared_memory=*/false, name);
}

// The ranks of `color`, by key, then by rank. If any rank's call is invalid, all ranks throw.
std::vector<int> Group::members_of(const std::vector<std::string>& messages, int color) {
  std::vector<int> busy, members;
  std::vector<std::int32_t> keys;
  for (int r = 0; r < size(); ++r) {
    const auto word = split_word(messages[static_cast<std::size_t>(r)]);
    if (!word) {
      const auto& identity = transport_->identity();
      const auto text = base::join("got different calls, expected the same on every rank: ", identity.name_of(r),
                                   " calls all_gather_bytes or barrier, ", identity.name_of(rank()), " calls split");
      transport_->stop(text, -1);
      throw CommError(base::join("[Communicator::split] ", text, " (", identity.place(), "). Hint: ", kSameCallsHint),
                      -1);
    }
    if (word->unfinished > 0) busy.push_back(r);
    keys.push_back(word->key);
    if (word->color == color) members.push_back(r);
  }
  Arguments("split", *transport_)
      .require(busy.empty(), "unfinished operations on ", ranks_text(busy),
               ", expected none on any rank. Hint: wait() for them before split");
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return keys[static_cast<std::size_t>(a)] < keys[static_cast<std::size_t>(b)]; });
  return members;
}

std::shared_ptr<Group> Group::split_into(int color, int key, bool shared_memory, std::string_view name) {
  const auto why = transport_->why_no_split();
  Arguments("split", *transport_).require(why.empty(), "transport ", transport_->name(), ", ", why);
  const auto hosts = transport_->hosts();
  SplitWord mine;
  mine.color = color;
  mine.key = key;
  mine.unfinished = *unfinished_;
  const auto messages =
      all_gather_bytes(std::string(reinterpret_cast<const char*>(&mine), sizeof mine) + transport_->split_offer());
  const auto members = members_of(messages, color);
  const int number = splits_++;
  if (color < 0) return nullptr;
  Split split;
  const auto place = std::find(members.begin(), members.end(), rank()) - members.begin();
  split.identity = transport_->identity().of_members(members, static_cast<int>(place),
                                                     base::join("split ", number, " color ", color));
  split.identity.group = name;
  split.shared_memory = shared_memory;
  std::map<int, int> ranks_of_host;
  for (const int r : members) {
    const auto member = static_cast<std::size_t>(r);
    split.members.push_back({r, ranks_of_host[hosts[member]]++, 0, messages[member].substr(sizeof mine)});
  }
  for (auto& member : split.members) member.local_size = ranks_of_host[hosts[static_cast<std::size_t>(member.rank)]];
  const auto& own = split.members[static_cast<std::size_t>(place)];
  split.identity.local_rank = own.local_rank;
  split.identity.local_size = own.local_size;
  split.abort_check = [family = family_] {
    if (const auto cause = family->failure()) throw CommError(cause->reason, cause->rank);
  };
  try {
    auto transport = members.size() == 1 ? make_local(split.identity) : transport_->split(split);
    transport->set_timeout(timeout());
    return std::make_shared<Group>(std::move(transport), shared_from_this());
  } catch (const CommError& error) {
    ended_by(error);
    throw;
  } catch (const ConfigError&) {
    throw;  // all members throw it
  } catch (const std::exception& error) {
    abort(error.what());  // the other ranks wait for this one
    throw;
  }
}

}  // namespace comm
}  // namespace zero
