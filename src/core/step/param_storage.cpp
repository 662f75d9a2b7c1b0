// See param_storage.h.
#include "step/param_storage.h"

#include <utility>

#include "base/check.h"
#include "kernels/quantize.h"
#include "step/tiers.h"

namespace zero::step {

ParamStorage::ParamStorage(const Context& context, const GroupFacts& facts, int group, Place place)
    : c_(context), facts_(facts), group_(group) {
  resting_ = c_.memory.rest({.place = place,
                             .tier = facts.param_tier,
                             .purpose = Purpose::Parameters,
                             .role = Role::Params,
                             .group = group,
                             .axis = facts.axis},
                            facts.resting(), facts.precision.param);
  if (place == Place::Symmetric) resting_.begin = shard_begin();
  if (facts.sharding.params) residency_ = Residency::Sharded;
}

void ParamStorage::mark_updated() { c_.backend.model.values_changed(group_); }

void ParamStorage::broadcast(View values) {
  if (axis().size == 1 || values.numel == 0) return;
  const auto seen = c_.observer.issued({.kind = OpKind::Broadcast,
                                        .reason = OpReason::InitialValues,
                                        .group = group_,
                                        .bytes = values.bytes(),
                                        .sent = ring_bytes(values.bytes(), axis().size)});
  c_.backend.comm.broadcast(group_, values, /*root=*/0)->wait();
}

namespace {

// Replicated on every rank. With a sharded optimizer, the updated parts are all-gathered after the update.
class ReplicatedParams final : public ParamStorage {
 public:
  ReplicatedParams(const Context& context, const GroupFacts& facts, int group)
      : ParamStorage(context, facts, group, Place::Device) {}

  void finish_unshard() override {}
  void reshard() override {}
  View whole() const override { return resting_; }

  void begin_all_gather() override {
    if (!facts_.trainable || !facts_.sharding.optimizer || axis().size == 1 || resting_.numel == 0) return;
    gather_.begin(c_.observer.issued({.kind = OpKind::AllGatherParams,
                                      .reason = OpReason::NewValues,
                                      .group = group_,
                                      .bytes = whole_bytes(),
                                      .sent = ring_bytes(whole_bytes(), axis().size)}));
    gather_.add(
        c_.backend.comm.all_gather(group_, resting_, resting_.part(shard_begin(), facts_.shard()), Lane::Compute));
  }

  void finish_all_gather() override { gather_.wait(); }

 private:
  Pending gather_;
};

// Shards that every rank of the host reads in place, without copies.
class SymmetricParams final : public ParamStorage {
 public:
  SymmetricParams(const Context& context, const GroupFacts& facts, int group)
      : ParamStorage(context, facts, group, Place::Symmetric) {}

  void finish_unshard() override {
    if (residency_ == Residency::Unsharded) return;
    wait_for_peers();
    c_.backend.model.bind(group_, whole());
    residency_ = Residency::Unsharded;
  }

  void unshard_copy() override {
    if (copy_) return;
    wait_for_peers();
    auto copy = c_.memory.take(Memory::kUnshard, facts_.padded(), facts_.precision.param);
    c_.backend.tensors.copy(copy, whole(), Lane::Compute);
    copy_ = copy;
    c_.backend.model.bind(group_, copy_);
    residency_ = Residency::Unsharded;
  }

  void reshard() override {
    if (residency_ == Residency::Sharded) return;
    c_.backend.model.unbind(group_);
    if (copy_) c_.memory.put(Memory::kUnshard, copy_);
    residency_ = Residency::Sharded;
  }

  View whole() const override { return copy_ ? copy_ : View{resting_.buffer, 0, facts_.padded(), resting_.dtype}; }

  void mark_updated() override {
    ParamStorage::mark_updated();
    c_.backend.comm.signal_symmetric(resting_.buffer);
  }

 private:
  void wait_for_peers() {
    const auto seen = c_.observer.issued({.kind = OpKind::UnshardSymmetric,
                                          .reason = OpReason::BeforeUse,
                                          .group = group_,
                                          .bytes = whole_bytes(),
                                          .sent = ring_bytes(whole_bytes(), axis().size),
                                          .from = facts_.param_tier,
                                          .to = facts_.param_tier});
    if (seen) seen->waiting();
    c_.backend.comm.wait_symmetric(group_, resting_.buffer);
  }

  View copy_;
};

// Shards that are all-gathered into a buffer: from the device, host memory or a file; quantized (qwZ); from secondary
// shards of the node (hpZ).
class ShardedParams final : public ParamStorage {
 public:
  ShardedParams(const Context& context, const GroupFacts& facts, int group)
      : ParamStorage(context, facts, group, context.place_of(facts.param_tier)) {
    if (const auto ranks = axis().secondary_ranks; ranks > 0)
      secondary_ = c_.memory.rest({.place = Place::Device,
                                   .tier = Tier::Device,
                                   .purpose = Purpose::Parameters,
                                   .role = Role::SecondaryShard,
                                   .group = group},
                                  facts.padded() / ranks, facts.precision.param);
  }
  ~ShardedParams() override { fetch_.settle(); }

  void begin_fetch() override {
    if (!rests_in_file() || residency_ != Residency::Sharded || fetch_ || resting_.numel == 0) return;
    if (!fetched_) fetched_ = c_.memory.take_io(resting_.numel, resting_.dtype);
    fetch_.begin(c_.observer.issued({.kind = OpKind::Fetch,
                                     .reason = OpReason::Arrives,
                                     .group = group_,
                                     .bytes = step::whole_blocks(resting_.bytes()),
                                     .from = Tier::File,
                                     .to = Tier::Host}));
    fetch_.add(c_.backend.tensors.read(fetched_, resting_));
  }

  void cancel_fetch() override {
    if (residency_ != Residency::Sharded) return;
    fetch_.wait();
    c_.memory.give(fetched_);
  }

  void begin_unshard() override { begin(/*exact=*/false); }

  void finish_unshard() override {
    if (residency_ == Residency::Unsharded) return;
    if (residency_ == Residency::Sharded) begin(/*exact=*/false);
    end();
    c_.backend.model.bind(group_, whole_);
    residency_ = Residency::Unsharded;
  }

  void unshard_copy() override {
    if (facts_.unshard_bits > 0) {  // other ranks use rounded values, but this copy is read or written by the program
      reshard();
      begin(/*exact=*/true);
    }
    finish_unshard();
  }

  void reshard() override {
    if (residency_ != Residency::Sharded) {
      if (residency_ == Residency::Unsharding) end();
      c_.backend.model.unbind(group_);
    }
    // Also called after a failed unshard.
    for (auto* view : {&whole_, &integers_})
      if (*view) c_.memory.put(Memory::kUnshard, *view);
    residency_ = Residency::Sharded;
  }

  View whole() const override { return residency_ == Residency::Unsharded ? whole_ : View{}; }

  void mark_updated() override {
    ParamStorage::mark_updated();
    forget_secondary();
  }
  void forget_secondary() override { secondary_valid_ = false; }

 private:
  // This rank's shard in memory that a collective can read. Call after `whole_` was allocated.
  View shard_to_gather(View fetched) {
    if (resting_.numel == 0) return whole_.part(shard_begin(), 0);
    const auto shard = rests_in_file() ? fetched : resting_;
    if (!c_.facts.topology.gpu || facts_.param_tier == Tier::Device) return shard;
    const auto own = whole_.part(shard_begin(), facts_.shard());
    const auto seen = c_.observer.issued({.kind = OpKind::Copy,
                                          .reason = OpReason::Arrives,
                                          .group = group_,
                                          .bytes = resting_.bytes(),
                                          .from = Tier::Host,
                                          .to = Tier::Device});
    c_.backend.tensors.copy(own, shard, Lane::Unshard);
    return own;
  }

  void begin(bool exact) {
    ZERO_CHECK(residency_ == Residency::Sharded, "group ", name(), " is unsharded twice");
    begin_fetch();
    fetch_.wait();
    if (!whole_) whole_ = c_.memory.take(Memory::kUnshard, facts_.padded(), resting_.dtype);
    const auto shard = shard_to_gather(fetched_);
    Op op{.kind = OpKind::Unshard, .reason = OpReason::BeforeUse, .group = group_, .bytes = whole_bytes()};
    if (secondary_valid_ && !exact) {
      op.node = true;
      op.sent = ring_bytes(op.bytes, axis().secondary_ranks);
      gather_.begin(c_.observer.issued(op));
      gather_.add(c_.backend.comm.all_gather_node(group_, whole_, secondary_, Lane::Unshard));
    } else if (facts_.unshard_bits > 0 && !exact) {
      const auto bytes = kernels::quantized_bytes(resting_.numel, facts_.unshard_bits);
      op.quantized = true;
      op.sent = (axis().size - 1) * bytes;
      gather_.begin(c_.observer.issued(op));
      if (!integers_) integers_ = c_.memory.take(Memory::kUnshard, bytes * axis().size, Dtype::U8);
      const auto mine = integers_.part(axis().rank * bytes, bytes);
      c_.backend.tensors.quantize(mine, shard, facts_.unshard_bits);
      gather_.add(c_.backend.comm.all_gather(group_, integers_, mine, Lane::Unshard));
    } else {
      op.sent = ring_bytes(op.bytes, axis().size);
      gather_.begin(c_.observer.issued(op));
      gather_.add(c_.backend.comm.all_gather(group_, whole_, shard, Lane::Unshard));
    }
    residency_ = Residency::Unsharding;
    exact_ = exact;
  }

  void end() {
    gather_.wait();
    c_.memory.give(fetched_);
    if (integers_) {
      // This rank's part is dequantized as well, so that all ranks use the same parameters.
      const auto bytes = integers_.numel / axis().size;
      for (int rank = 0; rank < axis().size; ++rank)
        c_.backend.tensors.dequantize(whole_.part(rank * facts_.shard(), facts_.shard()),
                                      integers_.part(rank * bytes, bytes), facts_.unshard_bits);
      c_.memory.put(Memory::kUnshard, integers_);
    }
    if (secondary_ && !exact_ && !std::exchange(secondary_valid_, true)) {
      const auto node_rank = axis().rank % axis().secondary_ranks;
      c_.backend.tensors.copy(secondary_, whole_.part(node_rank * secondary_.numel, secondary_.numel), Lane::Unshard);
    }
  }

  View secondary_, fetched_, whole_, integers_;
  bool secondary_valid_ = false, exact_ = false;
  Pending fetch_, gather_;
};

}  // namespace

std::unique_ptr<ParamStorage> ParamStorage::make(const Context& context, const GroupFacts& facts, int group) {
  if (!facts.sharding.params) return std::make_unique<ReplicatedParams>(context, facts, group);
  if (facts.symmetric) return std::make_unique<SymmetricParams>(context, facts, group);
  return std::make_unique<ShardedParams>(context, facts, group);
}

}  // namespace zero::step
