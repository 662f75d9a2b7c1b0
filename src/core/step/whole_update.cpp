// See whole_update.h.
#include "step/whole_update.h"

#include <algorithm>

#include "optim/owners.h"

namespace zero::step {

bool has_owners(const GroupFacts& group) {
  return std::any_of(group.owners.begin(), group.owners.end(), [](int owner) { return owner != kDivided; });
}

void set_owners(std::vector<Unit>& units, int axis, int ranks,
                const std::function<std::optional<double>(std::size_t)>& cost) {
  std::vector<std::vector<double>> costs;  // of the parameters that are not divided, by unit
  std::vector<std::vector<int*>> places;
  for (auto& unit : units) {
    if (unit.axis != axis || !unit.by_rule) continue;
    unit.owners.assign(unit.parameters.size(), kDivided);
    costs.emplace_back(), places.emplace_back();
    for (std::size_t i = 0; i < unit.parameters.size(); ++i)
      if (const auto one = cost(unit.parameters[i])) {
        costs.back().push_back(*one);
        places.back().push_back(&unit.owners[i]);
      }
  }
  const auto owners = optim::deal_owners(costs, ranks);
  for (std::size_t u = 0; u < owners.size(); ++u)
    for (std::size_t i = 0; i < owners[u].size(); ++i) *places[u][i] = owners[u][i];
}

WholeUpdate whole_update(const RunFacts& run, const GroupFacts& group) {
  const auto& axis = run.axis_of(group);
  const bool shards = group.sharding.optimizer && axis.size > 1;
  const std::int64_t states = 1 + group.num_slots(), others = axis.size - 1;
  WholeUpdate result;
  result.vectors = shards ? 1 + states : 1;
  std::int64_t all = 0, here = 0, foreign = 0;  // here, foreign: of what this rank holds, its own and other owners'
  for (std::size_t i = 0; i < group.owners.size(); ++i) {
    if (group.owners[i] == kDivided) continue;
    all += group.layout.parameter_numel(i);
    if (group.owners[i] == axis.rank) result.owned += group.layout.parameter_numel(i);
  }
  if (!shards) {
    result.sent_by_owner = others * states * result.owned;
    result.received_from_owners = others > 0 ? states * (all - result.owned) : 0;
    return result;
  }
  for (const auto& piece : group.layout.shard_pieces(axis.rank))
    if (const int owner = group.owners[piece.parameter]; owner != kDivided)
      (owner == axis.rank ? here : foreign) += piece.numel;
  result.sent_to_owners = (1 + states) * foreign;
  result.received_from_holders = (1 + states) * (result.owned - here);
  result.sent_by_owner = states * (result.owned - here);
  result.received_from_owners = states * foreign;
  return result;
}

std::optional<WholeRefusal> refuse_whole(const RunFacts& run, const GroupFacts& group) {
  if (!has_owners(group)) return std::nullopt;
  if (run.delayed) return WholeRefusal{"zero_optimization.delayed_update is on", "leave it out"};
  const bool in_parts = group.segments.size() > 1 ||
                        std::any_of(group.segments.begin(), group.segments.end(), [](const Segment& segment) {
                          return segment.tier == Tier::File || segment.param_travels;
                        });
  if (!in_parts) return std::nullopt;
  return WholeRefusal{"its states are offloaded in parts",
                      run.topology.gpu ? "offload_optimizer.device \"none\""
                                       : "offload_optimizer.device \"cpu\" with ratio 1, or none"};
}

}  // namespace zero::step
