// See budget.h.
#include "step/budget.h"

#include <algorithm>
#include <set>

#include "step/dry_backend.h"
#include "step/program.h"
#include "step/tiers.h"

namespace zero::step {
namespace {

class Unobserved final : public Observer {
  std::unique_ptr<Observed> issued(const Op&) override { return nullptr; }
};

// Simulates training steps, unit by unit. Gradients arrive as from autograd, in blocks where blocks are served.
class Walk {
 public:
  Walk(const RunFacts& run, const std::vector<GroupFacts>& groups)
      : groups_(groups),
        memory_(backend_, ledger_, run.checksums),
        scaler_(config::Settings()),
        program_(run, groups, backend_.ops(), memory_, scaler_, observer_) {
    backend_.released = [this](int buffer) {
      if (others_memory_.erase(buffer) == 0) memory_.give_block(buffer);
    };
    for (int g = 0; g < static_cast<int>(groups.size()); ++g) (spread(g) ? spread_ : others_).push_back(g);
  }

  void micro_batch() {
    for (const auto* part : {&spread_, &others_, &spread_})
      for (const int g : *part) use(g);
    program_.begin_backward();
    for (const int g : spread_) {
      use(g);
      for (int i = groups_[static_cast<std::size_t>(g)].num_members(); i-- > 1;) gradient(g, i);
    }
    for (auto g = others_.rbegin(); g != others_.rend(); ++g) {
      use(*g);
      for (int i = groups_[static_cast<std::size_t>(*g)].num_members(); i-- > 0;) gradient(*g, i);
    }
    // The group that is reduced first arrives last, so that all others wait.
    const auto order = reduce_order(groups_);
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      const auto g = static_cast<int>(*it);
      if (!spread(g)) continue;
      use(g);
      if (groups_[*it].num_members() > 0) gradient(g, 0);
    }
    program_.end_backward();
  }

  void step() { program_.step(); }
  MemoryReport report() const { return ledger_.report(); }

 private:
  // Whether a group has members in the whole model, at both ends of backward: embeddings and head, small parameters of
  // all layers.
  bool spread(int group) const {
    const auto& facts = groups_[static_cast<std::size_t>(group)];
    return facts.root || facts.persistent;
  }
  void use(int group) { program_.use({&group, 1}, /*training=*/true); }

  void gradient(int group, int member) {
    const auto& facts = groups_[static_cast<std::size_t>(group)];
    if (!facts.trainable) return;
    const auto numel = facts.layout.parameter_numel(static_cast<std::size_t>(member));
    const auto dtype = facts.precision.param;
    const auto bytes = numel * width(dtype) + step::kReadableOverhead;
    const bool in_block = memory_.serves(bytes);
    const int buffer = in_block ? memory_.take_block(bytes) : memory_.register_foreign();
    if (!in_block) others_memory_.insert(buffer);
    program_.gradient(group, member, {buffer, 0, numel, dtype}, in_block);
  }

  const std::vector<GroupFacts>& groups_;
  std::vector<int> spread_, others_;
  std::set<int> others_memory_;  // gradients that are not in blocks
  step::MemoryLedger ledger_;
  DryBackend backend_;
  Memory memory_;
  optim::LossScaler scaler_;
  Unobserved observer_;
  StepProgram program_;
};

}  // namespace

std::int64_t Need::total(Tier tier) const {
  std::int64_t sum = 0;
  for (const auto of_purpose : bytes[MemoryReport::index(tier)]) sum += of_purpose;
  return sum;
}

Need need_of(const RunFacts& run, const std::vector<GroupFacts>& groups) {
  // Micro-batches between the first and the last are equivalent. The first step learns the order of use; the second
  // needs as much memory as any later one.
  constexpr std::int64_t kMicroBatches = 2;
  constexpr int kSteps = 2;
  auto facts = run;
  facts.accumulation = run.boundary_by_count ? std::min(run.accumulation, kMicroBatches) : kMicroBatches;
  facts.whole_segments = true;
  Walk walk(facts, groups);
  for (int step = 0; step < kSteps; ++step) {
    for (std::int64_t micro = 0; micro < facts.accumulation; ++micro) walk.micro_batch();
    walk.step();
  }
  const auto report = walk.report();
  Need need;
  for (const auto tier : kTiers)
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (const auto purpose = static_cast<Purpose>(p); purpose != Purpose::Activations)
        need.bytes[MemoryReport::index(tier)][p] = static_cast<std::int64_t>(report.peak(tier, purpose));
  return need;
}

}  // namespace zero::step
