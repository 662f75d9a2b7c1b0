// See rule_update.h.
#include "engine/rule_update.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/check.h"
#include "engine/dtypes.h"
#include "optim/owners.h"

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

optim::ProgramRule describe(const UpdateRule& rule) {
  optim::ProgramRule result{rule.name(), rule.states(), rule.lr()};
  std::string faults;
  const auto add = [&](const auto&... words) { faults += (faults.empty() ? "" : "; ") + base::join(words...); };
  if (result.name.empty()) add("name: got none");
  if (!std::isfinite(result.lr) || result.lr < 0)
    add("lr: got ", result.lr, ", expected a finite number of at least 0");
  if (result.slots.size() > step::kMaxSlots)
    add("states: got ", result.slots.size(), " names, expected up to ", step::kMaxSlots);
  std::set<std::string> seen;
  for (const auto& slot : result.slots)
    if (!is_name(slot) || !seen.insert(slot).second)
      add("states: got \"", slot, "\", expected names that differ, without blanks, not \"master\"");
  if (!faults.empty()) throw ConfigError("[UpdateRule] " + faults);
  return result;
}

RuleUpdate::RuleUpdate(std::shared_ptr<UpdateRule> rule, const optim::ShardedOptimizer& optimizer,
                       const ModelBinding& binding, TorchBuffers& buffers, const step::RunFacts& run)
    : rule_(std::move(rule)), optimizer_(optimizer), buffers_(buffers), run_(run) {
  struct Place {
    std::size_t group, member;
  };
  std::vector<std::vector<Place>> places(run.topology.axes.size());
  std::vector<std::vector<double>> costs(places.size());
  for (std::size_t g = 0; g < binding.groups().size(); ++g) {
    const auto& group = *binding.groups()[g];
    owners_.emplace_back(group.members.size(), kElements);
    for (std::size_t i = 0; i < group.members.size(); ++i) {
      const auto& member = group.members[i];
      if (rule_->scope(member.name, member.part_sizes) == UpdateRule::Scope::Elements) continue;
      check(group.facts, member);
      places[static_cast<std::size_t>(group.facts.axis)].push_back({g, i});
      costs[static_cast<std::size_t>(group.facts.axis)].push_back(rule_->cost(member.name, member.part_sizes));
    }
  }
  for (std::size_t axis = 0; axis < places.size(); ++axis) {
    const auto owners = optim::deal_owners(costs[axis], run.topology.axes[axis].size);
    for (std::size_t i = 0; i < owners.size(); ++i) owners_[places[axis][i].group][places[axis][i].member] = owners[i];
  }
}

void RuleUpdate::check(const step::GroupFacts& facts, const ModelParameter& member) const {
  const auto refuse = [&](const std::string& why, const std::string& hint) {
    throw ConfigError(base::join("[Engine] cannot update ", member.name, " by ", rule_->name(),
                                 ", which needs whole parameters: ", why, ". Hint: ", hint, "."));
  };
  if (member.is_cut()) refuse("tensor parallelism cuts it", "tensor_parallel.autotp_size 1");
  if (run_.delayed) refuse("zero_optimization.delayed_update is on", "leave it out");
  for (const auto& segment : facts.segments)
    if (facts.segments.size() > 1 || segment.tier == step::Tier::File || segment.param_travels)
      refuse("its states are offloaded in parts", "offload_optimizer.device \"cpu\" with ratio 1, or none");
}

void RuleUpdate::begin(float factor) {
  factor_ = factor;
  rule_->begin_step();
}

void RuleUpdate::end() { rule_->end_step(); }

// The range of one call, as tensors.
struct RuleUpdate::Range {
  const ModelBinding::Group& group;
  const UpdateRuns& runs;
  const std::vector<int>& owners;
  std::int64_t owned_begin, begin;  // of the owned range in the flat vector; of this range in the owned one
  at::Tensor master, gradients;     // gradients: undefined: those of the members
  std::vector<at::Tensor> states;
  std::int64_t gradients_begin;  // position of `gradients` in the flat vector
  float factor;

  using Piece = sharding::ShardLayout::Piece;

  bool updates(std::size_t member) const { return runs.group_of(member, group.gradients) != UpdateRuns::kFrozen; }
  // Pieces have positions within [begin, ..).
  at::Tensor of(const at::Tensor& flat, const Piece& piece) const {
    return flat.narrow(0, piece.range_begin, piece.numel);
  }
  // fp32, new. A missing gradient counts as zero, as for the built-in rules.
  at::Tensor gradient(const Piece& piece) const {
    const auto& kept = group.gradients.kept(piece.parameter);
    if (!gradients.defined() && !kept.defined()) return at::zeros_like(of(master, piece));
    const auto own = gradients.defined()
                         ? gradients.narrow(0, owned_begin + begin + piece.range_begin - gradients_begin, piece.numel)
                         : kept.view({-1}).narrow(0, piece.parameter_begin, piece.numel);
    return own.to(master.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(factor);
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

void RuleUpdate::update(const ModelBinding::Group& group, int index, const UpdateRuns& runs, std::int64_t begin,
                        std::int64_t numel, const step::UpdateTarget& target, step::View grads) {
  const at::NoGradGuard no_grad;
  const auto& facts = group.facts;
  Range range{group,
              runs,
              owners_[static_cast<std::size_t>(index)],
              run_.owned_begin(facts),
              begin,
              buffers_.tensor(target.master),
              grads ? buffers_.tensor(grads) : at::Tensor(),
              {},
              grads.numel == facts.owned() ? run_.owned_begin(facts) : 0,
              factor_};
  for (int k = 0; k < run_.num_slots; ++k) range.states.push_back(buffers_.tensor(target.slots[k]));
  const auto all = facts.layout.pieces(range.owned_begin + begin, numel);
  std::vector<UpdatePiece> pieces;
  for (const auto& piece : all) {
    if (range.owners[piece.parameter] != kElements || !range.updates(piece.parameter)) continue;
    auto& made = pieces.emplace_back(piece_of(range, piece.parameter));
    made.begin = piece.parameter_begin;
    made.master = range.of(range.master, piece);
    made.gradient = range.gradient(piece);
    for (const auto& state : range.states) made.states.push_back(range.of(state, piece));
  }
  if (!pieces.empty()) rule_->update(pieces);
  if (std::any_of(range.owners.begin(), range.owners.end(), [](int owner) { return owner != kElements; })) {
    ZERO_CHECK(begin == 0 && numel == facts.owned(), "[RuleUpdate::update] got ", numel, " elements at ", begin,
               " of group ", facts.name, ", expected all ", facts.owned());
    update_whole(range);
  }
  if (!target.param) return;
  buffers_.wait_read(target.param.buffer);
  const auto parameter = buffers_.tensor(target.param);
  // A new parameter that is not written in place must be written completely, with frozen elements and padding.
  if (target.param_elsewhere) return cast_master(parameter, range.master);
  for (const auto& piece : all)
    if (range.updates(piece.parameter)) cast_master(range.of(parameter, piece), range.of(range.master, piece));
}

namespace {

// Flat pieces of several tensors one after another, to be sent to one rank after another.
class Message {
 public:
  explicit Message(int ranks) : numels(static_cast<std::size_t>(ranks), 0) {}
  void add(int rank, const at::Tensor& flat) {
    parts_.push_back(flat);
    numels[static_cast<std::size_t>(rank)] += flat.numel();
  }
  at::Tensor flat(const at::Tensor& like) const { return parts_.empty() ? like.new_empty({0}) : at::cat(parts_); }
  std::vector<std::int64_t> numels;  // by rank

 private:
  std::vector<at::Tensor> parts_;
};

// Reads a received message in the order in which it was written.
class Reader {
 public:
  explicit Reader(at::Tensor flat) : flat_(std::move(flat)) {}
  at::Tensor next(std::int64_t numel) {
    const auto part = flat_.narrow(0, at_, numel);
    at_ += numel;
    return part;
  }

 private:
  at::Tensor flat_;
  std::int64_t at_ = 0;
};

}  // namespace

// Owners get what other ranks hold of their parameters, update them, and send everyone's parts back. Where states are
// not sharded, owners have all and send all. Messages are ordered by rank, then by parameter.
void RuleUpdate::update_whole(const Range& range) {
  const auto& facts = range.group.facts;
  const auto& layout = facts.layout;
  auto& comm = *buffers_.setup().axes[static_cast<std::size_t>(facts.axis)];
  const int ranks = comm.size(), me = comm.rank();
  const bool sharded = facts.sharding.optimizer && ranks > 1;
  const auto num_states = static_cast<std::int64_t>(range.states.size());
  const auto parts_on = [&](int rank) {
    auto parts = sharded ? layout.shard_pieces(rank) : layout.pieces(0, layout.padded_numel());
    std::erase_if(parts, [&](const auto& part) {
      return range.owners[part.parameter] == kElements || !range.updates(part.parameter);
    });
    return parts;
  };
  const auto mine = parts_on(me);
  const auto owner = [&](const Range::Piece& part) { return range.owners[part.parameter]; };
  const auto exchange = [&](const Message& message, const std::vector<std::int64_t>& numels) {
    std::int64_t all = 0;
    for (const auto numel : numels) all += numel;
    const auto in = message.flat(range.master);
    auto out = range.master.new_empty({all});
    comm.all_to_all(out, in, numels, message.numels)->wait();
    return out;
  };

  // Whole tensors of this rank's own parameters, by member.
  std::map<std::size_t, UpdatePiece> own;
  for (std::size_t i = 0; i < range.owners.size(); ++i) {
    if (range.owners[i] != me || !range.updates(i)) continue;
    auto& made = own.emplace(i, piece_of(range, i)).first->second;
    if (!sharded) continue;
    for (auto* whole : {&made.gradient, &made.master}) *whole = range.master.new_empty({layout.parameter_numel(i)});
    for (std::int64_t k = 0; k < num_states; ++k)
      made.states.push_back(range.master.new_empty({layout.parameter_numel(i)}));
  }
  const auto place = [](const at::Tensor& whole, const Range::Piece& part) {
    return whole.narrow(0, part.parameter_begin, part.numel);
  };
  if (sharded) {
    Message message(ranks);
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& part : mine) {
        if (owner(part) != rank) continue;
        if (rank == me) {
          auto& whole = own.at(part.parameter);
          place(whole.gradient, part).copy_(range.gradient(part));
          place(whole.master, part).copy_(range.of(range.master, part));
          for (std::size_t k = 0; k < range.states.size(); ++k)
            place(whole.states[k], part).copy_(range.of(range.states[k], part));
          continue;
        }
        message.add(rank, range.gradient(part));
        message.add(rank, range.of(range.master, part));
        for (const auto& state : range.states) message.add(rank, range.of(state, part));
      }
    std::vector<std::int64_t> numels(static_cast<std::size_t>(ranks), 0);
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& part : parts_on(rank))
        if (rank != me && owner(part) == me) numels[static_cast<std::size_t>(rank)] += part.numel * (2 + num_states);
    Reader reader(exchange(message, numels));
    for (int rank = 0; rank < ranks; ++rank)
      for (const auto& part : parts_on(rank)) {
        if (rank == me || owner(part) != me) continue;
        auto& whole = own.at(part.parameter);
        place(whole.gradient, part).copy_(reader.next(part.numel));
        place(whole.master, part).copy_(reader.next(part.numel));
        for (auto& state : whole.states) place(state, part).copy_(reader.next(part.numel));
      }
  } else {
    for (const auto& part : mine) {
      if (owner(part) != me) continue;
      auto& whole = own.at(part.parameter);
      whole.gradient = range.gradient(part);
      whole.master = range.of(range.master, part);
      for (const auto& state : range.states) whole.states.push_back(range.of(state, part));
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

  Message message(ranks);
  std::vector<std::int64_t> numels(static_cast<std::size_t>(ranks), 0);
  for (int rank = 0; rank < ranks; ++rank)
    for (const auto& part : parts_on(rank)) {
      if (owner(part) != me) continue;
      const auto& whole = own.at(part.parameter);
      if (rank == me) {
        if (!sharded) continue;
        range.of(range.master, part).copy_(place(whole.master, part));
        for (std::size_t k = 0; k < range.states.size(); ++k)
          range.of(range.states[k], part).copy_(place(whole.states[k], part));
        continue;
      }
      message.add(rank, place(whole.master, part));
      for (const auto& state : whole.states) message.add(rank, place(state, part));
    }
  for (const auto& part : mine)
    if (owner(part) != me) numels[static_cast<std::size_t>(owner(part))] += part.numel * (1 + num_states);
  Reader reader(exchange(message, numels));
  for (int rank = 0; rank < ranks; ++rank)
    for (const auto& part : mine) {
      if (owner(part) != rank || rank == me) continue;
      range.of(range.master, part).copy_(reader.next(part.numel));
      for (const auto& state : range.states) range.of(state, part).copy_(reader.next(part.numel));
    }
}

}  // namespace engine
}  // namespace zero
