// See placement.h.
#include "memory/placement.h"

#include <algorithm>
#include <cstdio>

namespace zero::memory {
namespace {

struct Problem {
  const FootprintRules& rules;
  const std::vector<GroupSize>& groups;
  const std::vector<GroupPlace>& first;
  const Movable& movable;
};

std::int64_t needed(const Footprint& need, Tier tier, const Budgets& budgets) {
  return need.total(tier) + (tier == Tier::Device ? budgets.activations : 0);
}

bool holds(const Footprint& need, Tier tier, const Budgets& budgets) {
  const auto& budget = budgets.of(tier);
  return !budget || needed(need, tier, budgets) <= *budget;
}

// Moves one thing after the other from a tier to the next until the tier keeps to its budget.
void relieve(const Problem& p, Tier from, Tier to, const Budgets& budgets, std::vector<GroupPlace>& places,
             Footprint& need) {
  const auto move = [&](Tier GroupPlace::*what) {
    for (std::size_t i = places.size(); i-- > 0 && !holds(need, from, budgets);) {
      const auto& group = p.groups[i];
      if (places[i].*what != from || (what == &GroupPlace::optimizer && !group.trainable)) continue;
      if (what == &GroupPlace::parameters && group.persistent) continue;
      places[i].*what = to;
      need = footprint(p.rules, p.groups, places);
    }
  };
  if (p.movable.optimizer && p.movable.together && from == Tier::Device) {
    if (!holds(need, from, budgets))
      for (auto& place : places) place.optimizer = std::max(place.optimizer, to);
    need = footprint(p.rules, p.groups, places);
  } else if (p.movable.optimizer) {
    move(&GroupPlace::optimizer);
  }
  if (p.movable.parameters) move(&GroupPlace::parameters);
}

Placement attempt(const Problem& p, const Budgets& budgets) {
  Placement result;
  result.places = p.first;
  result.need = footprint(p.rules, p.groups, p.first);
  relieve(p, Tier::Device, Tier::Host, budgets, result.places, result.need);
  if (budgets.file) relieve(p, Tier::Host, Tier::File, budgets, result.places, result.need);
  result.fits = holds(result.need, Tier::Device, budgets) && holds(result.need, Tier::Host, budgets) &&
                holds(result.need, Tier::File, budgets);
  return result;
}

// "blocks.0 to blocks.3, blocks.7" of the groups that rest on a tier.
std::string groups_on(Tier tier, Tier GroupPlace::*what, bool trainable_only, const Placement& placement,
                      const std::vector<GroupSize>& groups, const std::vector<std::string>& names) {
  std::string text;
  const auto there = [&](std::size_t g) {
    return placement.places[g].*what == tier && (!trainable_only || groups[g].trainable);
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!there(g)) continue;
    auto last = g;
    while (last + 1 < groups.size() && there(last + 1)) ++last;
    text += (text.empty() ? "" : ", ") + names[g] + (last > g ? " to " + names[last] : "");
    g = last;
  }
  return text;
}

Budgets with(Budgets budgets, Tier tier, std::int64_t bytes) {
  (tier == Tier::Device ? budgets.device : tier == Tier::Host ? budgets.host : budgets.file) = bytes;
  return budgets;
}

}  // namespace

std::string describe(const Placement& placement, const Budgets& budgets, const std::vector<GroupSize>& groups,
                     const std::vector<std::string>& names) {
  std::string text = "placement of each rank's states, in bytes";
  char line[160];
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File}) {
    const auto t = MemoryReport::index(tier);
    const auto row = [&](const char* label, std::int64_t bytes) {
      std::snprintf(line, sizeof line, "\n    %-18s %18lld", label, static_cast<long long>(bytes));
      text += line;
    };
    const auto need = needed(placement.need, tier, budgets);
    if (need == 0 && !budgets.of(tier)) continue;
    std::snprintf(line, sizeof line, "\n  %-20s %18lld", MemoryReport::name(tier), static_cast<long long>(need));
    text += line;
    if (const auto& limit = budgets.of(tier)) {
      std::snprintf(line, sizeof line, " of %lld", static_cast<long long>(*limit));
      text += line;
    }
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
      if (const auto bytes = placement.need.resting[t][p] + placement.need.passing[t][p])
        row(MemoryReport::name(static_cast<Purpose>(p)), bytes);
    if (tier == Tier::Device && budgets.activations > 0) row("activations", budgets.activations);
  }
  for (const auto tier : {Tier::Host, Tier::File}) {
    const auto on = [&](Tier GroupPlace::*what, bool trainable_only, const char* states) {
      const auto list = groups_on(tier, what, trainable_only, placement, groups, names);
      if (!list.empty())
        text += std::string("\n  ") + states + (tier == Tier::Host ? " in host memory: " : " in a file: ") + list;
    };
    on(&GroupPlace::optimizer, true, "optimizer states");
    on(&GroupPlace::parameters, false, "parameters");
  }
  return text;
}

Placement place(const FootprintRules& rules, const std::vector<GroupSize>& groups, std::vector<GroupPlace> places,
                const Movable& movable, const Budgets& budgets) {
  const Problem problem{rules, groups, places, movable};
  auto result = attempt(problem, budgets);
  if (result.fits) return result;
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File}) {
    if (!budgets.of(tier)) continue;
    // Enough for everything at once is the most that can help.
    auto high = std::max(*budgets.of(tier), std::int64_t{1});
    for (int doublings = 0; doublings < 62 && !attempt(problem, with(budgets, tier, high)).fits; ++doublings) {
      if (high > (std::int64_t{1} << 61)) break;
      high *= 2;
    }
    if (!attempt(problem, with(budgets, tier, high)).fits) continue;
    auto low = *budgets.of(tier);
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      (attempt(problem, with(budgets, tier, middle)).fits ? high : low) = middle;
    }
    result.smallest[MemoryReport::index(tier)] = high;
  }
  return result;
}

}  // namespace zero::memory
