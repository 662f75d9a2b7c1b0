// Updates of parameters that cannot be divided: who owns them, and what the ranks exchange.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "step/facts.h"

namespace zero::step {

// Deals the parameters of the axis's units that are by_rule to its ranks. cost(i): of the model's parameter i, if it is
// updated whole; none: it is divided.
void set_owners(std::vector<Unit>& units, int axis, int ranks,
                const std::function<std::optional<double>(std::size_t)>& cost);

bool has_owners(const GroupFacts& group);

// What an update of whole parameters needs of this rank, in fp32 elements. Where states are sharded, gradients, masters
// and states go to owners, masters and states come back; otherwise owners send them to everyone.
struct WholeUpdate {
  std::int64_t owned = 0;  // of the parameters that this rank owns
  std::int64_t sent_to_owners = 0, received_from_holders = 0;
  std::int64_t sent_by_owner = 0, received_from_owners = 0;
  std::int64_t vectors = 0;  // of `owned` elements that are gathered: gradients, and with shards masters, states
  // A buffer for the vectors, for what is sent and for what is received.
  std::int64_t buffer() const {
    return vectors * owned + std::max(sent_to_owners, sent_by_owner) +
           std::max(received_from_holders, received_from_owners);
  }
};
WholeUpdate whole_update(const RunFacts& run, const GroupFacts& group);
// Why parameters with owners cannot be updated where they rest, and what can be done.
struct WholeRefusal {
  std::string why, hint;
};
std::optional<WholeRefusal> refuse_whole(const RunFacts& run, const GroupFacts& group);

}  // namespace zero::step
