// See rule_update.h.
#include "engine/rule_update.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/check.h"
#include "engine/dtypes.h"
#include "step/whole_update.h"

namespace zero {

UpdateRule::~UpdateRule() = default;
UpdateRule::Scope UpdateRule::scope(const std::string&, const std::vector<std::int64_t>&) const {
  return Scope::Elements;
}
double UpdateRule::cost(const std::string&, const std::vector<std::int64_t>& shape) const {
  double elements = 1;
  for (const auto size : shape) elements *= static_cast<double>(size);
  return elements;
}

namespace engine {
namespace {

// One rounding, as in the built-in rules.
void cast_master(const at::Tensor& parameter, const at::Tensor& master) {
  if (!parameter.is_cpu()) {
    parameter.copy_(master);
    return;
  }
  kernels::convert(parameter.mutable_data_ptr(), dtype_of(parameter.scalar_type()), master.const_data_ptr(),
                   kernels::Dtype::F32, master.numel());
}

bool is_name(const std::string& name) {
  return !name.empty() && name != "master" && name.find_first_of("/\\ \n\t\"") == std::string::npos;
}

}  // namespace

optim::ProgramRule describe(const UpdateRule& rule, std::vector<ModelParameter>& parameters) {
  optim::ProgramRule result{rule.name(), {}, rule.lr()};
  std::string faults;
  const auto add = [&](const auto&... words) { faults += (faults.empty() ? "" : "; ") + base::join(words...); };
  if (result.name.empty()) add("name: got none");
  if (!std::isfinite(result.lr) || result.lr < 0)
    add("lr: got ", result.lr, ", expected a finite number of at least 0");
  std::set<std::vector<std::string>> checked;
  for (auto& parameter : parameters) {
    parameter.states = rule.states(parameter.name, parameter.sizes);
    if (!checked.insert(parameter.states).second) continue;
    if (parameter.states.size() > step::kMaxSlots)
      add("states: got ", parameter.states.size(), " names, expected up to ", step::kMaxSlots);
    std::set<std::string> seen;
    for (const auto& state : parameter.states) {
      if (!is_name(state) || !seen.insert(state).second)
        add("states: got \"", state, "\", expected names that differ, without blanks, not \"master\"");
      if (std::find(result.states.begin(), result.states.end(), state) == result.states.end())
        result.states.push_back(state);
    }
  }
  if (!faults.empty()) throw ConfigError("[UpdateRule] " + faults);
  return result;
}

RuleUpdate::RuleUpdate(std::shared_ptr<UpdateRule> rule, const optim::ShardedOptimizer& optimizer,
                       const ModelBinding& binding, TorchBuffers& buffers, const step::RunFacts& run)
    : rule_(std::move(rule)), optimizer_(optimizer), buffers_(buffers), run_(run) {
  for (const auto& group : binding.groups())
    for (std::size_t i = 0; i < group->facts.owners.size(); ++i)
      if (group->facts.owners[i] != step::kDivided) check(group->facts, group->members[i]);
}

void RuleUpdate::check(const step::GroupFacts& facts, const ModelParameter& member) const {
  const auto refuse = [&](const std::string& why, const std::string& hint) {
    throw ConfigError(base::join("[Engine] cannot update ", member.name, " by ", rule_->name(),
                                 ", which needs whole parameters: ", why, ". Hint: ", hint, "."));
  };
  if (member.is_cut()) refuse("tensor parallelism cuts it", "tensor_parallel.autotp_size 1");
  if (const auto refusal = step::refuse_whole(run_, facts)) refuse(refusal->why, refusal->hint);
}

void RuleUpdate::begin(float factor) {
  factor_ = factor;
  rule_->begin_step();
}

void RuleUpdate::end() { rule_->end_step(); }

// Parts of the buffer of fp32 elements that a call has, one after another.
class RuleUpdate::Scratch {
 public:
  explicit Scratch(at::Tensor whole) : whole_(std::move(whole)) {}
  at::Tensor take(std::int64_t numel) {
    const auto part = whole_.narrow(0, taken_, numel);
    taken_ += numel;
    return part;
  }

 private:
  at::Tensor whole_;
  std::int64_t taken_ = 0;
};

// The range of one call, as tensors.
struct RuleUpdate::Range {
  const ModelBinding::Group& group;
  const UpdateRuns& runs;
  std::int64_t owned_begin, begin;  // of the owned range in the flat vector; of this range in the owned one
  at::Tensor master, gradients;     // gradients: undefined: those of the members
  std::vector<at::Tensor> states;
  std::int64_t gradients_begin;  // position of `gradients` in the flat vector
  float factor;

  using Piece = sharding::ShardLayout::Piece;

  int owner(const Piece& piece) const { return group.facts.owners[piece.parameter]; }
  bool updates(std::size_t member) const { return runs.group_of(member, group.gradients) != UpdateRuns::kFrozen; }
  // Pieces have positions within [begin, ..).
  at::Tensor of(const at::Tensor& flat, const Piece& piece) const {
    return flat.narrow(0, piece.range_begin, piece.numel);
  }
  // A missing gradient counts as zero, as for the built-in rules.
  const at::Tensor& read_gradient(const Piece& piece, const at::Tensor& into) const {
    const auto& kept = group.gradients.kept(piece.parameter);
    if (!gradients.defined() && !kept.defined()) return into.zero_();
    into.copy_(gradients.defined()
                   ? gradients.narrow(0, owned_begin + begin + piece.range_begin - gradients_begin, piece.numel)
                   : kept.view({-1}).narrow(0, piece.parameter_begin, piece.numel));
    return into.mul_(factor);
  }
};

UpdatePiece RuleUpdate::piece_of(const Range& range, std::size_t member) const {
  UpdatePiece made;
  made.parameter = range.group.members[member].name;
  made.shape = range.group.members[member].part_sizes;
  made.group = range.runs.group_of(member, range.group.gradients);
  made.lr = optimizer_.lr(made.group);
  made.count = optimizer_.applied_steps() + 1 - range.runs.missed_steps()[member];
  return made;
}

void RuleUpdate::update(const ModelBinding::Group& group, const UpdateRuns& runs, std::int64_t begin,
                        std::int64_t numel, const step::UpdateTarget& target, step::View grads) {
  const at::NoGradGuard no_grad;
  const auto& facts = group.facts;
  Range range{group,
              runs,
              run_.owned_begin(facts),
              begin,
              buffers_.tensor(target.master),
              grads ? buffers_.tensor(grads) : at::Tensor(),
              {},
              grads.numel == facts.owned() ? run_.owned_begin(facts) : 0,
              factor_};
  for (int k = 0; k < facts.num_slots(); ++k) range.states.push_back(buffers_.tensor(target.slots[k]));
  Scratch scratch(target.scratch ? buffers_.tensor(target.scratch) : at::empty({0}, range.master.options()));
  const auto all = facts.layout.pieces(range.owned_begin + begin, numel);
  std::vector<UpdatePiece> pieces;
  for (const auto& piece : all) {
    if (range.owner(piece) != step::kDivided || !range.updates(piece.parameter)) continue;
    auto& made = pieces.emplace_back(piece_of(range, piece.parameter));
    made.begin = piece.parameter_begin;
    made.master = range.of(range.master, piece);
    made.gradient = range.read_gradient(piece, scratch.take(piece.numel));
    for (const auto& state : range.states) made.states.push_back(range.of(state, piece));
  }
  if (!pieces.empty()) rule_->update(pieces);
  if (step::has_owners(facts)) {
    ZERO_CHECK(begin == 0 && numel == facts.owned(), "[RuleUpdate::update] got ", numel, " elements at ", begin,
               " of group ", facts.name, ", expected all ", facts.owned());
    update_whole(range, scratch);
  }
  if (!target.param) return;
  buffers_.wait_read(target.param.buffer);
  const auto parameter = buffers_.tensor(target.param);
  // A new parameter that is not written in place must be written completely, with frozen elements and padding.
  if (target.param_elsewhere) return cast_master(parameter, range.master);
  for (const auto& piece : all)
    if (range.updates(piece.parameter)) cast_master(range.of(parameter, piece), range.of(range.master, piece));
}

// Vectors for each other rank, one rank after another, and what they have for this one.
class RuleUpdate::Exchange {
 public:
  Exchange(comm::Group& comm, at::Tensor out, at::Tensor in)
      : comm_(comm), out_(out), in_(in), to_send_(std::move(out)), received_(std::move(in)) {}
  // In the order of ranks.
  at::Tensor room_for(int rank, std::int64_t numel) {
    sent_[static_cast<std::size_t>(rank)] += numel;
    return to_send_.take(numel);
  }
  void expect(int rank, std::int64_t numel) { expected_[static_cast<std::size_t>(rank)] += numel; }
  // [collective]
  void run() {
    const auto sum = [](const std::vector<std::int64_t>& of) {
      return std::accumulate(of.begin(), of.end(), std::int64_t{0});
    };
    auto in = in_.narrow(0, 0, sum(expected_));
    comm_.all_to_all(in, out_.narrow(0, 0, sum(sent_)), expected_, sent_)->wait();
  }
  at::Tensor next(std::int64_t numel) { return received_.take(numel); }

 private:
  comm::Group& comm_;
  at::Tensor out_, in_;
  Scratch to_send_, received_;
  std::vector<std::int64_t> sent_ = std::vector<std::int64_t>(static_cast<std::size_t>(comm_.size()), 0),
                            expected_ = sent_;
};

// Owners get what other ranks hold of their parameters, update them, and send everyone's parts back. Where states are
// not sharded, owners have all and send all. Vectors are ordered by rank, then by parameter.
void RuleUpdate::update_whole(const Range& range, Scratch& scratch) {
  const auto& facts = range.group.facts;
  const auto& layout = facts.layout;
  auto& comm = *buffers_.setup().axes[static_cast<std::size_t>(facts.axis)];
  const int ranks = comm.size(), me = comm.rank();
  const bool sharded = facts.sharding.optimizer && ranks > 1;
  const auto vectors = 1 + static_cast<std::int64_t>(range.states.size());  // besides the gradient
  const auto held_by = [&](int rank) {
    auto pieces = sharded ? layout.shard_pieces(rank) : layout.pieces(0, layout.padded_numel());
    std::erase_if(pieces, [&](const auto& piece) {
      return range.owner(piece) == step::kDivided || !range.updates(piece.parameter);
    });
    return pieces;
  };
  const auto mine = held_by(me);

  std::map<std::size_t, UpdatePiece> own;  // by member
  for (std::size_t i = 0; i < facts.owners.size(); ++i) {
    if (facts.owners[i] != me || !range.updates(i)) continue;
    auto& made = own.emplace(i, piece_of(range, i)).first->second;
    const auto numel = layout.parameter_numel(i);
    made.gradient = scratch.take(numel);
    if (!sharded) continue;
    made.master = scratch.take(numel);
    for (std::size_t k = 0; k < range.states.size(); ++k) made.states.push_back(scratch.take(numel));
  }
  const auto most = step::whole_update(run_, facts);
  const auto out = scratch.take(std::max(most.sent_to_owners, most.sent_by_owner));
  const auto in = scratch.take(std::max(most.received_from_holders, most.received_from_owners));

  // Master and states of a piece.
  const auto of_range = [&](const Range::Piece& piece) {
    std::vector<at::Tensor> parts{range.of(range.master, piece)};
    for (const auto& state : range.states) parts.push_back(range.of(state, piece));
    return parts;
  };
  const auto of_own = [&](const Range::Piece& piece) {
    const auto& whole = own.at(piece.parameter);
    std::vector<at::Tensor> parts{whole.master.narrow(0, piece.parameter_begin, piece.numel)};
    for (const auto& state : whole.states) parts.push_back(state.narrow(0, piece.parameter_begin, piece.numel));
    return parts;
  };
  const auto copy = [](const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  };
  const auto gradient_of = [&](const Range::Piece& piece) {
    return own.at(piece.parameter).gradient.narrow(0, piece.parameter_begin, piece.numel);
  };

  for (const auto& piece : mine) {
    if (range.owner(piece) != me) continue;
    range.read_gradient(piece, gradient_of(piece));
    auto& whole = own.at(piece.parameter);
    if (sharded) {
      copy(of_own(piece), of_range(piece));
    } else {
      whole.master = range.of(range.master, piece);
      for (const auto& state : range.states) whole.states.push_back(range.of(state, piece));
    }
  }
  if (sharded) {
    Exchange to_owners(comm, out, in);
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& piece : mine) {
        if (rank == me || range.owner(piece) != rank) continue;
        range.read_gradient(piece, to_owners.room_for(rank, piece.numel));
        for (const auto& part : of_range(piece)) to_owners.room_for(rank, piece.numel).copy_(part);
      }
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& piece : held_by(rank))
        if (rank != me && range.owner(piece) == me) to_owners.expect(rank, (1 + vectors) * piece.numel);
    to_owners.run();
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& piece : held_by(rank)) {
        if (rank == me || range.owner(piece) != me) continue;
        gradient_of(piece).copy_(to_owners.next(piece.numel));
        for (auto& part : of_own(piece)) part.copy_(to_owners.next(piece.numel));
      }
  }

  std::vector<UpdatePiece> pieces;
  for (auto& [member, whole] : own) {
    auto& made = pieces.emplace_back(whole);
    for (auto* tensor : {&made.gradient, &made.master}) *tensor = tensor->view(made.shape);
    for (auto& state : made.states) state = state.view(made.shape);
  }
  if (!pieces.empty()) rule_->update(pieces);
  if (ranks == 1) return;

  Exchange from_owners(comm, out, in);
  for (int rank = 0; rank < ranks; ++rank)
    for (const auto& piece : held_by(rank)) {
      if (range.owner(piece) != me) continue;
      if (rank != me)
        for (const auto& part : of_own(piece)) from_owners.room_for(rank, piece.numel).copy_(part);
      else if (sharded)
        copy(of_range(piece), of_own(piece));
    }
  for (const auto& piece : mine)
    if (range.owner(piece) != me) from_owners.expect(range.owner(piece), vectors * piece.numel);
  from_owners.run();
  for (int rank = 0; rank < ranks; ++rank)
    for (const auto& piece : mine) {
      if (rank == me || range.owner(piece) != rank) continue;
      for (auto& part : of_range(piece)) part.copy_(from_owners.next(piece.numel));
    }
}

}  // namespace engine
}  // namespace zero
