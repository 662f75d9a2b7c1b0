// See grad_storage.h.
//
// [Note: one rounding] Under every sharding policy, a reduced gradient is the fp32 sum over ranks, rounded once to the
// reduce dtype: replicated gradients are sent to other ranks, which must see the same bits.
#include "step/grad_storage.h"

#include <algorithm>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"
#include "kernels/quantize.h"

namespace zero::step {

GradStorage::GradStorage(const Context& context, const GroupFacts& facts, int group)
    : c_(context),
      facts_(facts),
      group_(group),
      active_(static_cast<std::size_t>(facts.num_members()), 1),
      taken_(active_.size()) {
  if (!facts.trainable) return;
  try {
    if (facts.grads != GradStorageKind::Autograd)
      kept_ = rest(facts.grads_on_host ? Tier::Host : Tier::Device, Role::Grads,
                   facts.sharding.grads ? facts.shard() : facts.padded());
    if (facts.grads_copied) copied_ = rest(Tier::Host, Role::Grads, facts.shard());
    if (facts.delayed) pending_ = rest(Tier::Host, Role::PendingGrads, facts.shard());
  } catch (...) {
    give_all();
    throw;
  }
  // Padding stays zero, because in-place results do not write it.
  for (const auto& view : {kept_, copied_, pending_})
    if (view) c_.backend.tensors.fill(view, 0);
}

GradStorage::~GradStorage() { give_all(); }

void GradStorage::give_all() {
  for (auto* view : {&kept_, &copied_, &pending_, &copy_}) c_.memory.give(*view);
}

void GradStorage::save_copy() {
  if (!kept_) return;
  copy_ = rest(facts_.grads_on_host ? Tier::Host : Tier::Device, Role::GradsCopy, kept_.numel);
  c_.backend.tensors.copy(copy_, kept_, Lane::Compute);
}

void GradStorage::drop_copy() { c_.memory.give(copy_); }

void GradStorage::restore_copy() {
  if (copy_) c_.backend.tensors.copy(kept_, copy_, Lane::Compute);
  drop_copy();
}

View GradStorage::rest(Tier tier, Role role, std::int64_t numel) const {
  return c_.memory.rest({.place = c_.place_of(tier),
                         .tier = tier,
                         .purpose = Purpose::Gradients,
                         .role = role,
                         .group = group_,
                         .axis = facts_.axis},
                        numel, precision().grad);
}

void GradStorage::begin_micro_step(bool first, bool boundary) {
  first_ = first;
  boundary_ = boundary;
  std::fill(taken_.begin(), taken_.end(), 0);
  awaited_ = facts_.trainable ? static_cast<int>(std::count(active_.begin(), active_.end(), 1)) : 0;
  if (first && facts_.trainable) c_.backend.tensors.begin_squares(group_);
}

bool GradStorage::accepts(int member) const { return !taken(member) || (!work_ && awaited_ > 0); }

bool GradStorage::take(int member, View arrived, bool peer_readable) {
  if (active_[static_cast<std::size_t>(member)] == 0) {
    c_.backend.model.release_gradient(arrived);
    return false;
  }
  ZERO_CHECK(accepts(member), "a second gradient of group ", facts_.name, " after its reduction");
  const bool again = taken(member);
  keep(member, arrived, peer_readable, again);
  taken_[static_cast<std::size_t>(member)] = 1;  // set last: if the code above throws, the gradient was not taken
  return !again && --awaited_ == 0;
}

std::vector<int> GradStorage::fill_missing() {
  std::vector<int> missing;
  for (int i = 0; awaited_ > 0; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (active_[at] == 0 || std::exchange(taken_[at], 1) != 0) continue;
    missing.push_back(i);
    fill(i);
    --awaited_;
  }
  return missing;
}

void GradStorage::begin_reduce() {
  if (!facts_.trainable || facts_.padded() == 0) return;
  for (int i = 0; i < facts_.num_members(); ++i)
    if (std::exchange(taken_[static_cast<std::size_t>(i)], 1) == 0) fill(i);  // not active
  reduces_ = start_reduce();
}

void GradStorage::finish_reduce() {
  if (!facts_.trainable) return;
  work_.wait();
  if (std::exchange(reduces_, false)) end_reduce();
  if (!boundary_) return;
  if (!std::exchange(squared_, false)) square(kept_);
  if (!copied_) return;
  c_.backend.tensors.read_squared();
  const auto seen = c_.observer.issued({.kind = OpKind::Copy,
                                        .reason = OpReason::Leaves,
                                        .group = group_,
                                        .bytes = copied_.bytes(),
                                        .from = Tier::Device,
                                        .to = Tier::Host});
  copy_to_host();
}

void GradStorage::close_accumulation() {
  boundary_ = true;
  if (!facts_.sharding.grads) begin_reduce();  // sharded gradients were reduced after every micro-batch
  finish_reduce();
}

std::int64_t GradStorage::uncounted() const {
  return std::clamp<std::int64_t>(facts_.counted_begin - shard_begin(), 0, facts_.shard());
}

void GradStorage::square(const View& flat) {
  const auto skipped = uncounted();
  c_.backend.tensors.square(group_, 0, own_part(flat).part(skipped, facts_.shard() - skipped), skipped);
}

void GradStorage::replace(int member, std::int64_t begin, const View& values) {
  if (values.numel == 0) return;
  if (const auto flat = sum())
    begin += facts_.layout.parameter_offset(static_cast<std::size_t>(member)) -
             (flat.numel == facts_.shard() ? shard_begin() : 0);
  const auto target = sum() ? sum() : kept_or_zeros(member);
  c_.backend.tensors.copy(target.part(begin, values.numel), values, Lane::Compute);
  square(sum());
}

void GradStorage::discard(KeptGrads kept) {
  if (!facts_.trainable) return;
  work_.wait();
  reduces_ = squared_ = false;
  awaited_ = 0;
  drop();
  c_.backend.tensors.begin_squares(group_);  // at the boundary all members are squared again
  if (kept == KeptGrads::None) clear();
  if (kept == KeptGrads::Copy) restore_copy();
}

void GradStorage::clear() { c_.backend.model.drop_gradients(group_); }

void GradStorage::hand_over() {
  if (pending_) std::swap(pending_, copied_ ? copied_ : kept_);
}

View GradStorage::own_part(const View& flat) const {
  return flat.numel == facts_.shard() ? flat : flat.part(shard_begin(), facts_.shard());
}

void GradStorage::keep_reduced(View& reduced) {
  if (!reduced) return;
  if (first_)
    c_.backend.tensors.copy(kept_, reduced, Lane::Compute);
  else
    c_.backend.tensors.accumulate(kept_, reduced);
  c_.memory.put(Memory::kReduce, reduced);
}

void GradStorage::observe_reduce(bool to_all) {
  const auto ranks = axis().size, bits = facts_.reduce_bits;
  const auto bytes = facts_.padded() * width(precision().reduce);
  work_.begin(c_.observer.issued({.kind = OpKind::Reduce,
                                  .reason = OpReason::Sum,
                                  .group = group_,
                                  .bytes = bytes,
                                  .sent = bits > 0 ? (ranks - 1) * kernels::quantized_bytes(facts_.shard(), bits)
                                                   : ring_bytes(bytes, ranks) * (to_all ? 2 : 1),
                                  .quantized = bits > 0,
                                  .to_all = to_all}));
}

namespace {

// Gradients are copied into one vector, which a collective reduces.
class FlatGrads final : public GradStorage {
 public:
  FlatGrads(const Context& context, const GroupFacts& facts, int group) : GradStorage(context, facts, group) {}

 private:
  View input() {
    if (!input_) {
      input_ = c_.memory.take(Memory::kReduce, facts_.padded(), precision().reduce);
      zero_gaps(c_, facts_.layout, 0, input_);
    }
    return input_;
  }

  View place_of(int member) {
    return (facts_.sharding.grads ? input() : kept_)
        .part(facts_.layout.parameter_offset(static_cast<std::size_t>(member)), numel_of(member));
  }

  void keep(int member, View arrived, bool /*peer_readable*/, bool again) override {
    const auto place = place_of(member);
    if (again || (!facts_.sharding.grads && !first_))
      c_.backend.tensors.accumulate(place, arrived);
    else
      c_.backend.tensors.copy(place, arrived, Lane::Compute);
    c_.backend.model.release_gradient(arrived);
  }

  void fill(int member) override {
    if (facts_.sharding.grads || first_) c_.backend.tensors.fill(place_of(member), 0);
  }

  bool start_reduce() override {
    if (!facts_.sharding.grads && !boundary_) return false;
    View in, out;
    if (facts_.sharding.grads) {
      in = input();
      out = sums_straight() ? kept_ : output_ = c_.memory.take(Memory::kReduce, facts_.shard(), precision().reduce);
    } else {
      in = kept_;
      if (precision().grad != precision().reduce) {
        in = input_ = c_.memory.take(Memory::kReduce, facts_.padded(), precision().reduce);
        c_.backend.tensors.copy(in, kept_, Lane::Compute);
      }
      out = in.part(shard_begin(), facts_.shard());
    }
    if (c_.facts.predivide != 1) c_.backend.tensors.scale(in, c_.facts.predivide);
    observe_reduce(/*to_all=*/false);
    work_.add(c_.backend.comm.reduce_scatter(group_, out, in, facts_.reduce_bits));
    return true;
  }

  void end_reduce() override {
    if (!facts_.sharding.optimizer && axis().size > 1) {  // the second half of an all-reduce
      const auto whole = input_ ? input_ : kept_;
      work_.begin(c_.observer.issued({.kind = OpKind::AllGatherGrads,
                                      .reason = OpReason::Sum,
                                      .group = group_,
                                      .bytes = whole.bytes(),
                                      .sent = ring_bytes(whole.bytes(), axis().size)}));
      work_.add(c_.backend.comm.all_gather(group_, whole, whole.part(shard_begin(), facts_.shard()), Lane::Reduce));
      work_.wait();
    }
    keep_reduced(output_);
    if (!input_) return;
    if (!facts_.sharding.grads) {
      const bool own = facts_.sharding.optimizer;
      c_.backend.tensors.copy(own ? own_part(kept_) : kept_, own ? own_part(input_) : input_, Lane::Compute);
    }
    c_.memory.put(Memory::kReduce, input_);
  }

  void drop() override {
    if (output_) c_.memory.put(Memory::kReduce, output_);
    if (input_) c_.memory.put(Memory::kReduce, input_);
  }

  void copy_to_host() override { c_.backend.tensors.copy(copied_, own_part(kept_), Lane::Offload); }

  View input_, output_;
};

// Gradients are kept per member in memory that peers can read.
class HeldGrads : public GradStorage {
 protected:
  HeldGrads(const Context& context, const GroupFacts& facts, int group)
      : GradStorage(context, facts, group), held_(static_cast<std::size_t>(facts.num_members())) {}
  ~HeldGrads() override {
    try {
      release_all();
    } catch (const std::exception&) {
      // The error does not matter: the gradients are dropped.
    }
  }

  View new_block(int member) {
    const auto bytes = numel_of(member) * width(precision().reduce);
    return {c_.memory.take_block(bytes), 0, numel_of(member), precision().reduce};
  }

  // The gradient in the reduce dtype, in memory that peers can read.
  View in_block(int member, View arrived, bool peer_readable) {
    if (peer_readable && arrived.dtype == precision().reduce) return arrived;
    const auto block = new_block(member);
    c_.backend.tensors.copy(block, arrived, Lane::Compute);
    c_.backend.model.release_gradient(arrived);
    return block;
  }

  void hold_zeros(int member) {
    if (numel_of(member) == 0) return;
    c_.backend.tensors.fill(held(member) = new_block(member), 0);
  }

  void predivide() {
    for (int i = 0; c_.facts.predivide != 1 && i < facts_.num_members(); ++i)
      if (numel_of(i) > 0) c_.backend.tensors.scale(held(i), c_.facts.predivide);
  }

  PeerReduce all_held() const {
    PeerReduce request{.group = group_, .pieces = {}, .out = {}};
    for (int i = 0; i < facts_.num_members(); ++i) {
      if (numel_of(i) == 0) continue;
      request.pieces.emplace_back(facts_.layout.parameter_offset(static_cast<std::size_t>(i)), held(i));
    }
    return request;
  }

  void release_all() {
    for (auto& view : held_)
      if (view) c_.backend.model.release_gradient(std::exchange(view, View{}));
  }

  View& held(int member) { return held_[static_cast<std::size_t>(member)]; }
  const View& held(int member) const { return held_[static_cast<std::size_t>(member)]; }

 private:
  std::vector<View> held_;
};

// Peers sum their shards from the kept gradients after every micro-batch.
class PeerReadGrads final : public HeldGrads {
 public:
  PeerReadGrads(const Context& context, const GroupFacts& facts, int group) : HeldGrads(context, facts, group) {}

 private:
  void keep(int member, View arrived, bool peer_readable, bool) override {
    if (arrived.numel == 0) return c_.backend.model.release_gradient(arrived);
    const auto block = in_block(member, arrived, peer_readable);
    if (!held(member)) {
      held(member) = block;
      return;
    }
    c_.backend.tensors.accumulate(held(member), block);
    c_.backend.model.release_gradient(block);
  }

  void fill(int member) override { hold_zeros(member); }

  bool start_reduce() override {
    predivide();
    auto request = all_held();
    if (!sums_straight()) {
      output_ = c_.memory.take(Memory::kReduce, facts_.shard(), precision().reduce);
      zero_gaps(c_, facts_.layout, shard_begin(), output_);  // the pieces do not cover them
    }
    request.out = output_ ? output_ : kept_;
    request.square = squared_ = boundary_ && sums_straight();
    observe_reduce(/*to_all=*/false);
    work_.add(c_.backend.comm.reduce_pieces(request));
    return true;
  }

  void end_reduce() override {
    keep_reduced(output_);
    release_all();
  }

  void drop() override {
    if (output_) c_.memory.put(Memory::kReduce, output_);
    release_all();
  }

  void copy_to_host() override { c_.backend.tensors.copy(copied_, kept_, Lane::Offload); }

  View output_;
};

// Autograd's own .grad is kept. With peers it is in memory that they read, and reduced at the boundary.
class AutogradGrads final : public HeldGrads {
 public:
  AutogradGrads(const Context& context, const GroupFacts& facts, int group)
      : HeldGrads(context, facts, group),
        booked_(static_cast<std::size_t>(facts.num_members())),
        copies_(booked_.size()),
        restored_(booked_.size()),
        squared_members_(booked_.size()) {}
  ~AutogradGrads() override {
    drop_copy();
    give_restored();
  }

  View kept(int member) const override { return held(member); }
  View kept_or_zeros(int member) override {
    const auto i = static_cast<std::size_t>(member);
    if (!held(member)) {
      restored_[i] = rest(Tier::Device, Role::GradsCopy, numel_of(member));
      c_.backend.tensors.fill(restored_[i], 0);
      c_.backend.model.set_gradient(group_, member, held(member) = restored_[i]);
    }
    squared_members_[i] = 0;
    return held(member);
  }

  void clear() override {
    GradStorage::clear();
    std::fill(squared_members_.begin(), squared_members_.end(), 0);
    // Member by member: a tensor that is about to be freed is booked as an activation again.
    for (int i = 0; i < facts_.num_members(); ++i) {
      auto view = std::exchange(held(i), View{});
      auto& restored = restored_[static_cast<std::size_t>(i)];
      book(-std::exchange(booked_[static_cast<std::size_t>(i)], 0));
      if (view && !restored) c_.backend.model.release_gradient(view);
      c_.memory.give(restored);
    }
  }

  void save_copy() override {
    for (int i = 0; i < facts_.num_members(); ++i) {
      if (!held(i)) continue;
      auto& copy = copies_[static_cast<std::size_t>(i)];
      copy = rest(Tier::Device, Role::GradsCopy, numel_of(i));
      c_.backend.tensors.copy(copy, held(i), Lane::Compute);
    }
  }
  void drop_copy() override {
    for (auto& copy : copies_) c_.memory.give(copy);
  }

 private:
  bool peers() const { return c_.facts.peer_reduces(facts_); }
  // Whether the member is part of this rank's norm.
  bool counts(int member) const {
    return facts_.layout.parameter_offset(static_cast<std::size_t>(member)) >= facts_.counted_begin;
  }

  void give_restored() {
    for (int i = 0; i < facts_.num_members(); ++i)
      if (auto& restored = restored_[static_cast<std::size_t>(i)]) {
        held(i) = {};
        c_.memory.give(restored);
      }
  }

  // On a CPU the allocation observer has booked the tensor as an activation.
  void book(std::int64_t bytes) {
    auto& ledger = c_.memory.ledger();
    if (bytes == 0) return;
    if (c_.facts.topology.gpu)
      ledger.book(Tier::Device, Purpose::Gradients, bytes);
    else if (bytes > 0)
      ledger.rebook(Tier::Device, Purpose::Activations, Purpose::Gradients, bytes);
    else
      ledger.rebook(Tier::Device, Purpose::Gradients, Purpose::Activations, -bytes);
  }

  void keep(int member, View arrived, bool peer_readable, bool) override {
    if (!held(member)) {
      if (!peers()) {  // blocks are booked when allocated
        book(arrived.bytes());
        booked_[static_cast<std::size_t>(member)] = arrived.bytes();
      }
      held(member) = peers() && arrived.numel > 0 ? in_block(member, arrived, peer_readable) : arrived;
      c_.backend.model.set_gradient(group_, member, held(member));
    } else if (arrived.buffer != held(member).buffer) {  // otherwise autograd has accumulated in place
      c_.backend.model.release_gradient(arrived);
    }
    auto& squared = squared_members_[static_cast<std::size_t>(member)];
    squared = boundary_ && !peers() && !c_.facts.topology.gpu && counts(member);
    if (squared) c_.backend.tensors.square(group_, member, held(member), 0);  // while it is in the cache
  }

  void fill(int member) override {
    if (!peers() || held(member)) return;
    hold_zeros(member);
    if (held(member)) c_.backend.model.set_gradient(group_, member, held(member));
  }

  bool start_reduce() override {
    if (!peers() || !boundary_) return false;
    predivide();
    auto request = all_held();
    request.to_all = !facts_.sharding.optimizer;
    request.square = squared_ = true;
    observe_reduce(request.to_all);
    work_.add(c_.backend.comm.reduce_pieces(request));
    return true;
  }

  // The copy becomes the kept gradient; peers need it in a block.
  void restore_copy() override {
    clear();
    for (int i = 0; i < facts_.num_members(); ++i) {
      auto& copy = copies_[static_cast<std::size_t>(i)];
      if (!copy) continue;
      if (peers() && copy.numel > 0)
        c_.backend.tensors.copy(held(i) = new_block(i), copy, Lane::Compute);
      else
        held(i) = restored_[static_cast<std::size_t>(i)] = std::exchange(copy, View{});
      c_.backend.model.set_gradient(group_, i, held(i));
    }
    drop_copy();
  }

  // Of the members: those that were not squared on arrival, because step() declared the boundary or a member had no
  // gradient.
  void square(const View& flat) override {
    if (peers()) return flat ? GradStorage::square(flat) : c_.backend.comm.square_pieces(all_held());
    for (int i = 0; i < facts_.num_members(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto values = flat ? flat.part(facts_.layout.parameter_offset(at), numel_of(i)) : held(i);
      if (values && !squared_members_[at] && counts(i)) c_.backend.tensors.square(group_, i, values, 0);
    }
  }

  // Frees the device memory.
  void copy_to_host() override {
    zero_gaps(c_, facts_.layout, shard_begin(), copied_);
    for (const auto& piece : facts_.layout.pieces(shard_begin(), facts_.shard())) {
      const auto to = copied_.part(piece.range_begin, piece.numel);
      if (const auto& kept = held(static_cast<int>(piece.parameter)))
        c_.backend.tensors.copy(to, kept.part(piece.parameter_begin, piece.numel), Lane::Offload);
      else
        c_.backend.tensors.fill(to, 0);
    }
    clear();
  }

  std::vector<std::int64_t> booked_;     // bytes, by member
  std::vector<View> copies_, restored_;  // by member
  std::vector<char> squared_members_;    // squared on arrival, by member
};

}  // namespace

std::unique_ptr<GradStorage> GradStorage::make(const Context& context, const GroupFacts& facts, int group) {
  switch (facts.grads) {
    case GradStorageKind::Autograd:
      return std::make_unique<AutogradGrads>(context, facts, group);
    case GradStorageKind::PeerRead:
      return std::make_unique<PeerReadGrads>(context, facts, group);
    case GradStorageKind::Flat:
      break;
  }
  return std::make_unique<FlatGrads>(context, facts, group);
}

}  // namespace zero::step
