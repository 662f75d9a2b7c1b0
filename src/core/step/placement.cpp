// See placement.h.
#include "step/placement.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "base/check.h"

namespace zero::step {
namespace {

using config::OffloadDevice;
using Placements = std::vector<Placement>;

// As the offload blocks specify: parameter shards are in host memory up to max_in_cpu elements, then in the file.
Placements configured(const PlacementTask& task) {
  const auto& optimizer = task.settings.zero.offload_optimizer;
  const auto& param = task.settings.zero.offload_param;
  Placements placements;
  std::int64_t in_host = 0;  // elements
  for (const auto& unit : task.units) {
    auto& placement = placements.emplace_back();
    if (task.run.sharding.optimizer && optimizer.device != OffloadDevice::None)
      placement.optimizer = optimizer.device == OffloadDevice::Nvme ? Tier::File : Tier::Host;
    if (!task.run.sharding.params || unit.persistent || param.device == OffloadDevice::None) continue;
    const auto ranks = unit.layout.world();
    const auto shard = (unit.numel() + ranks - 1) / ranks;
    const bool in_file = param.device == OffloadDevice::Nvme && in_host + shard > param.max_in_cpu;
    placement.params = in_file ? Tier::File : Tier::Host;
    if (!in_file) in_host += shard;
  }
  return placements;
}

bool holds(const Need& need, Tier tier, const Budgets& budgets) {
  const auto& budget = budgets.of(tier);
  return !budget || needed(need, tier, budgets) <= *budget;
}

class Search {
 public:
  explicit Search(const PlacementTask& task) : task_(task), first_(configured(task)) {}

  PlacementPlan attempt(const Budgets& budgets) {
    PlacementPlan plan;
    plan.placements = first_;
    relieve(Tier::Device, Tier::Host, budgets, plan.placements);
    if (budgets.file) relieve(Tier::Host, Tier::File, budgets, plan.placements);
    plan.need = need(plan.placements);
    plan.fits =
        std::all_of(std::begin(kTiers), std::end(kTiers), [&](Tier tier) { return holds(*plan.need, tier, budgets); });
    return plan;
  }

  std::optional<std::int64_t> smallest(Tier tier, const Budgets& budgets) {
    if (!budgets.of(tier)) return std::nullopt;
    const auto fits = [&](std::int64_t bytes) {
      auto other = budgets;
      (tier == Tier::Device ? other.device : tier == Tier::Host ? other.host : other.file) = bytes;
      return attempt(other).fits;
    };
    constexpr std::int64_t kMost = std::int64_t{1} << 62;
    if (!fits(kMost)) return std::nullopt;
    auto low = *budgets.of(tier), high = std::max(low, std::int64_t{1});
    while (!fits(high)) high = high > kMost / 2 ? kMost : 2 * high;
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (fits(middle) ? high : low) = middle;
    }
    return high;
  }

 private:
  const Need& need(const Placements& placements) {
    const auto it = needs_.find(placements);
    if (it != needs_.end()) return it->second;
    const auto groups = group_facts(task_.run, task_.settings, task_.units, placements);
    return needs_.emplace(placements, need_of(task_.run, groups)).first->second;
  }

  // Moves as little as possible to the next tier until the budget is met; otherwise everything that may move.
  void relieve(Tier from, Tier to, const Budgets& budgets, Placements& placements) {
    const bool together = task_.freedom.together && from == Tier::Device;
    if (task_.freedom.optimizer) move(&Placement::optimizer, from, to, budgets, together, placements);
    if (task_.freedom.params) move(&Placement::params, from, to, budgets, /*together=*/false, placements);
  }

  void move(Tier Placement::*what, Tier from, Tier to, const Budgets& budgets, bool together, Placements& placements) {
    std::vector<std::size_t> movable;
    for (std::size_t i = task_.units.size(); i-- > 0;) {
      const auto& unit = task_.units[i];
      const bool may = what == &Placement::optimizer ? unit.trainable : !unit.persistent;
      if (may && placements[i].*what == from) movable.push_back(i);
    }
    const auto with = [&](std::size_t count) {
      auto moved = placements;
      for (std::size_t k = 0; k < count; ++k) moved[movable[k]].*what = to;
      return moved;
    };
    const auto enough = [&](std::size_t count) { return holds(need(with(count)), from, budgets); };
    if (movable.empty() || enough(0)) return;
    // The first unit that moves can add buffers (for tiles, for gathers), so moving none was tried separately. Beyond
    // that, moving more frees more.
    std::size_t low = 0, high = together ? movable.size() : 1;
    while (high < movable.size() && !enough(high)) {
      low = high;
      high = std::min(2 * high, movable.size());
    }
    while (!together && high - low > 1 && enough(high)) {
      const auto middle = low + (high - low) / 2;
      if (enough(middle))
        high = middle;
      else
        low = middle;
    }
    placements = with(high);
  }

  const PlacementTask& task_;
  const Placements first_;
  std::map<Placements, Need> needs_;
};

// "blocks.0 to blocks.3, blocks.7": the units on a tier.
std::string units_on(Tier tier, Tier Placement::*what, const PlacementTask& task, const Placements& placements) {
  std::string text;
  const auto there = [&](std::size_t i) {
    return placements[i].*what == tier && (what != &Placement::optimizer || task.units[i].trainable);
  };
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (!there(i)) continue;
    auto last = i;
    while (last + 1 < placements.size() && there(last + 1)) ++last;
    text += (text.empty() ? "" : ", ") + task.units[i].name + (last > i ? " to " + task.units[last].name : "");
    i = last;
  }
  return text;
}

}  // namespace

std::int64_t needed(const Need& need, Tier tier, const Budgets& budgets) {
  return need.total(tier) + (tier == Tier::Device ? budgets.activations : 0);
}

Budgets Budgets::of(const config::MemoryBudget& memory) {
  return {
      .device = memory.device, .host = memory.host, .file = memory.file, .activations = memory.activations.value_or(0)};
}

PlacementPlan place(const PlacementTask& task) {
  const auto budgets = Budgets::of(task.settings.memory);
  if (!budgets.any()) return {.placements = configured(task), .need = std::nullopt, .fits = true};
  return Search(task).attempt(budgets);
}

std::optional<std::int64_t> smallest_budget(const PlacementTask& task, Tier tier) {
  return Search(task).smallest(tier, Budgets::of(task.settings.memory));
}

std::string refusal(const PlacementTask& task, const PlacementPlan& plan, const std::string& who) {
  const auto budgets = Budgets::of(task.settings.memory);
  Search search(task);
  std::string over, helps;
  const auto help = [&](const std::string& text) { helps += (helps.empty() ? "" : ", or ") + text; };
  for (const auto tier : kTiers) {
    const auto name = base::join("memory.", MemoryReport::name(tier));
    if (!holds(*plan.need, tier, budgets))
      over += base::join(over.empty() ? "" : "; ", name, ": got ", *budgets.of(tier), " bytes, expected at least ",
                         needed(*plan.need, tier, budgets), " with everything moved off it that may move");
    if (const auto smallest = search.smallest(tier, budgets)) help(base::join(name, " = ", *smallest));
  }
  if (budgets.host && !budgets.file && task.run.sharding.optimizer)
    help("memory.file with memory.nvme_path, so that states can move to a file");
  if (!task.run.sharding.params) help("a higher stage");
  if (2 * budgets.activations > plan.need->total(Tier::Device))
    help(base::join("fewer activations, ", budgets.activations,
                    " bytes of the device's (a smaller micro-batch, activation_checkpointing)"));
  return base::join(over, who.empty() ? "" : base::join(" (", who, ")"), ". Hint: the smallest budget that works is ",
                    helps.empty() ? "larger in more than one tier" : helps, ".");
}

std::string describe(const PlacementTask& task, const PlacementPlan& plan) {
  const auto budgets = Budgets::of(task.settings.memory);
  std::string text = "placement of each rank's states, in bytes";
  char line[160];
  for (const auto tier : kTiers) {
    const auto row = [&](const char* label, std::int64_t bytes) {
      std::snprintf(line, sizeof line, "\n    %-18s %18lld", label, static_cast<long long>(bytes));
      text += line;
    };
    const auto bytes = needed(*plan.need, tier, budgets);
    if (bytes == 0 && !budgets.of(tier)) continue;
    std::snprintf(line, sizeof line, "\n  %-20s %18lld", MemoryReport::name(tier), static_cast<long long>(bytes));
    text += line;
    if (const auto& limit = budgets.of(tier)) {
      std::snprintf(line, sizeof line, " of %lld", static_cast<long long>(*limit));
      text += line;
    }
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (const auto of = plan.need->of(tier, static_cast<Purpose>(p)))
        row(MemoryReport::name(static_cast<Purpose>(p)), of);
    if (tier == Tier::Device && budgets.activations > 0) row("activations", budgets.activations);
  }
  for (const auto tier : {Tier::Host, Tier::File}) {
    const auto on = [&](Tier Placement::*what, const char* states) {
      const auto list = units_on(tier, what, task, plan.placements);
      if (!list.empty())
        text += std::string("\n  ") + states + (tier == Tier::Host ? " in host memory: " : " in a file: ") + list;
    };
    on(&Placement::optimizer, "optimizer states");
    on(&Placement::params, "parameters");
  }
  return text;
}

}  // namespace zero::step
