// The parameters of one group: how this rank stores them, and how they are unsharded before use and resharded
// afterwards. Three strategies: replicated, sharded, and sharded in memory that all ranks of a host map.
// step/prefetcher.h and the program decide when.
#pragma once
#include <memory>
#include <string>

#include "step/context.h"
#include "step/prefetcher.h"

namespace zero::step {

class ParamStorage : public Unshardable {
 public:
  // `context` and `facts` must outlive the result. Allocates its persistent buffers.
  static std::unique_ptr<ParamStorage> make(const Context& context, const GroupFacts& facts, int group);

  void begin_fetch() override {}
  void cancel_fetch() override {}
  void begin_unshard() override {}
  void unshard_copy() override { finish_unshard(); }
  // The vector that the members alias; none while they are sharded.
  virtual View whole() const = 0;

  // The stored values have changed.
  virtual void mark_updated();
  // The parameters will be gathered in another way (GroupFacts::unshard_bits).
  virtual void forget_secondary() {}
  // All-gathers the updated parts of replicated parameters; no effect for other strategies.
  virtual void begin_all_gather() {}
  virtual void finish_all_gather() {}
  // Sends rank 0's initial values, fp32 and unsharded, to all ranks.
  void broadcast(View values);

  const View& resting() const { return resting_; }
  // The stored elements [begin, begin + numel) of the range whose optimizer states this rank owns.
  View resting_part(std::int64_t begin, std::int64_t numel) const {
    return resting_.part(facts_.sharding.params ? begin : c_.facts.owned_begin(facts_) + begin, numel);
  }

  // For the prefetcher.
  const std::string& name() const final { return facts_.name; }
  bool root() const final { return facts_.root; }
  int module() const final { return facts_.module; }
  std::int64_t padded_numel() const final { return facts_.padded(); }
  std::int64_t whole_bytes() const final { return facts_.padded() * width(facts_.precision.param); }
  bool rests_sharded() const final { return facts_.sharding.params; }
  bool rests_in_file() const final { return facts_.in_file(); }
  bool symmetric() const final { return facts_.symmetric; }
  Residency residency() const final { return residency_; }

 protected:
  ParamStorage(const Context& context, const GroupFacts& facts, int group, Place place);
  const Axis& axis() const { return c_.facts.axis_of(facts_); }
  std::int64_t shard_begin() const { return c_.facts.shard_begin(facts_); }

  const Context& c_;
  const GroupFacts& facts_;
  const int group_;
  View resting_;
  Residency residency_ = Residency::Unsharded;
};

}  // namespace zero::step
