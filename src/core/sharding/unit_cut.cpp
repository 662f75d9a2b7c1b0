// See unit_cut.h.
#include "sharding/unit_cut.h"

#include <algorithm>
#include <utility>

namespace zero::sharding {

std::vector<Unit> cut_units(const std::vector<UnitMember>& members, const UnitRules& rules) {
  // In order of first appearance, the root (empty path) first.
  std::vector<std::pair<std::string, std::vector<std::size_t>>> by_path{{"", {}}};
  std::vector<std::size_t> persistent;
  std::int64_t persistent_sum = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto numel = members[i].numel;
    if (rules.persistent_numel > 0 && members[i].axis == 0 && numel <= rules.persistent_numel &&
        persistent_sum + numel <= rules.persistent_total) {
      persistent.push_back(i);
      persistent_sum += numel;
      continue;
    }
    const auto& path = members[i].unit;
    // From the end, because adjacent members usually belong to one unit.
    const auto it =
        std::find_if(by_path.rbegin(), by_path.rend(), [&](const auto& entry) { return entry.first == path; });
    (it != by_path.rend() ? *it : by_path.emplace_back(path, std::vector<std::size_t>{})).second.push_back(i);
  }
  // Merge small adjacent units, except the root, which stays unsharded for a whole pass.
  const auto numel_of = [&](const std::vector<std::size_t>& chosen) {
    std::int64_t sum = 0;
    for (const auto i : chosen) sum += members[i].numel;
    return sum;
  };
  const auto axis_of = [&](const std::vector<std::size_t>& chosen) {
    return chosen.empty() ? 0 : members[chosen.front()].axis;
  };
  for (std::size_t k = 2; k < by_path.size();) {
    auto& before = by_path[k - 1];
    if (numel_of(before.second) >= rules.min_numel || axis_of(before.second) != axis_of(by_path[k].second)) {
      ++k;
      continue;
    }
    before.first += "+" + by_path[k].first;
    before.second.insert(before.second.end(), by_path[k].second.begin(), by_path[k].second.end());
    by_path.erase(by_path.begin() + static_cast<std::ptrdiff_t>(k));
  }
  std::vector<Unit> units;
  struct UnitKind {
    bool trainable, fp32;
    std::string update, mark;
  };
  std::vector<std::string> updates{""};  // in order of first appearance
  for (const auto& member : members)
    if (std::find(updates.begin(), updates.end(), member.kind) == updates.end()) updates.push_back(member.kind);
  std::vector<UnitKind> kinds;
  for (const bool trainable : {true, false})
    for (const bool fp32 : {false, true})
      for (const auto& update : updates) {
        std::string mark;
        for (const std::string& word :
             {update, std::string(trainable ? "" : "frozen"), std::string(fp32 ? "fp32" : "")})
          if (!word.empty()) mark += (mark.empty() ? " (" : ", ") + word;
        kinds.push_back({trainable, fp32, update, mark.empty() ? mark : mark + ")"});
      }
  const auto add = [&](const std::string& name, bool root, const std::vector<std::size_t>& chosen) {
    const auto begin = units.size();
    bool split = false;
    for (const auto& kind : kinds) {
      const auto empty = [root, &kind, axis = axis_of(chosen)] {
        Unit unit;
        unit.root = root;
        unit.trainable = kind.trainable;
        unit.fp32 = kind.fp32;
        unit.axis = axis;
        return unit;
      };
      Unit unit = empty();
      int parts = 0;
      const auto close = [&] {
        if (unit.parameters.empty()) return;
        split |= ++parts > 1;
        unit.name = name + (parts > 1 ? "/" + std::to_string(parts) : "") + kind.mark;
        units.push_back(std::exchange(unit, empty()));
      };
      std::int64_t sum = 0;
      for (const auto i : chosen) {
        const auto& member = members[i];
        if (member.trainable != kind.trainable || member.fp32 != kind.fp32 || member.kind != kind.update) continue;
        const auto numel = member.numel;
        if (sum > rules.max_numel - std::min(numel, rules.max_numel)) {
          close();
          sum = 0;
        }
        sum += numel;
        unit.parameters.push_back(i);
      }
      close();
    }
    if (!root && !split && units.size() - begin > 1)
      for (auto k = begin; k < units.size(); ++k) units[k].module = static_cast<int>(begin);
  };
  for (const auto& [path, chosen] : by_path) add(path.empty() ? "root" : path, path.empty(), chosen);
  const auto first = units.size();
  add("persistent", /*root=*/true, persistent);
  for (auto k = first; k < units.size(); ++k) units[k].persistent = true;
  return units;
}

}  // namespace zero::sharding
