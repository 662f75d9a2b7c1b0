// What decides how a rank holds and sends its states, as plain values: the facts that an Engine finds when it is built,
// and the place of every unit. One place for both forecasts, of bytes held (rank_memory.h) and of what moves
// (schedule_run.h); the rules themselves are the engine's own (config/stage_rules.h, config/tier_rules.h,
// memory/placement.h). Nothing here walks through steps.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <zero/memory_report.h>

#include "config/settings.h"
#include "memory/placement.h"
#include "memory/prefetcher.h"
#include "plan/units.h"

namespace zero::planning {

using Tier = MemoryReport::Tier;

// Where it runs.
struct Surroundings {
  int world = 1;
  std::string transport = "shm";  // as Communicator::transport(): "local", "thread", "shm", "gloo", "shm+gloo", "nccl"
  bool gpu = false;
  bool deferred = true;  // built by zero::build: rank 0's values need not be sent
};

// The budget `memory` of a tier; unset: none.
inline const std::optional<std::int64_t>& budget_of(const config::MemoryBudget& memory, Tier tier) {
  return tier == Tier::Device ? memory.device : tier == Tier::Host ? memory.host : memory.file;
}
inline constexpr Tier kTiers[] = {Tier::Device, Tier::Host, Tier::File};

// Bytes an element.
constexpr int width_of(config::Precision precision) { return precision == config::Precision::Fp32 ? 4 : 2; }

// "AdamW", as which None is planned, too.
const char* name(config::OptimizerType type);

struct RankRules {
  const config::Settings& settings;
  Surroundings around;
  std::int64_t accumulation = 1;
  memory::Movable movable;  // what the budgets `memory` of the configuration may move: no other key places it
  int parameter_width = 4, gradient_width = 4, wire_width = 4;  // bytes an element
  int num_slots = 2;                                            // moments
  bool in_place = false;                                       // ranks read each other's memory (processes of one host)
  bool reads_gradients = false;                                // and each other's gradients, where backward left them
  bool direct_gradients = false;                               // autograd's own are the kept ones
  bool overlap = false;                                        // a reduction goes on while backward does
  int trainable_bits = 0, frozen_bits = 0, gradient_bits = 0;  // of integers on their way; 0: as they are
  int neighbours = 0;                                          // ranks that keep second shards together; 0: none

  // That one rank sends of a vector of all: bytes.
  std::int64_t share(std::int64_t bytes) const { return (around.world - 1) * bytes / around.world; }
};

// `settings` outlive the result.
RankRules rank_rules(const config::Settings& settings, const Surroundings& around, std::int64_t accumulation,
                     const memory::Movable& movable = {});
// What budgets may move, by what `is_set` says of the configuration's keys (config::Document::is_set).
template <typename IsSet>
memory::Movable movable_by(const config::Settings& settings, bool gpu, const IsSet& is_set) {
  return {.optimizer = settings.zero.stage >= 1 && !is_set("zero_optimization.offload_optimizer.device"),
          .parameters = settings.zero.stage == 3 && !is_set("zero_optimization.offload_param.device"),
          .together = gpu};
}

// Where the states of one unit rest.
struct Place {
  Tier parameters = Tier::Device, optimizer = Tier::Device;
  bool sharded = false;  // parameters: 1/world on each rank
  bool mapped = false;   // and read by the others where it lies
};

struct Arrangement {
  std::vector<Place> places;    // of the units
  bool delayed = false;         // updates run beside the next step
  std::int64_t tile_numel = 1;  // elements of an update's tile through host memory
  std::int64_t tiles = 1;       // of them at once
  // What the budgets `memory` led to; unset: there are none.
  std::optional<memory::Placement> by_budgets;
};
Arrangement arrange(const RankRules& rules, const std::vector<Unit>& units);
// Why an Engine refuses to be built, and the smallest budgets with which it would be; empty: it does not.
std::string refusal_of(const RankRules& rules, const Arrangement& arrangement);

// What ParamGroup is to the engine, without what it does: a unit at its place.
class PlacedUnit : public memory::GatherUnit {
 public:
  PlacedUnit(const RankRules& rules, const Arrangement& arrangement, const Unit& unit, const Place& place);

  const std::string& name() const override { return unit.name; }
  bool root() const override { return unit.root; }
  std::int64_t padded_numel() const override { return unit.padded_numel(); }
  bool rests_sharded() const override { return place.sharded; }
  bool rests_in_file() const override { return place.sharded && place.parameters == Tier::File; }
  bool gathers_in_place() const override { return place.mapped; }
  Residency residency() const override { return now; }

  std::int64_t resting_bytes() const;  // of its parameters on this rank, without whole blocks of files
  std::int64_t gathered_bytes() const { return unit.padded_numel() * rules.parameter_width; }
  std::int64_t owned() const;  // elements whose optimizer states this rank keeps
  bool offloads() const;       // some of those states rest elsewhere than on the device
  bool has_next() const { return arrangement.delayed && offloads(); }  // a late update's new parameters
  // Reduced gradients lie in host memory apart from where they were reduced to; or right there.
  bool copies_gradients() const;
  bool reduces_to_host() const;
  int gather_bits() const { return unit.trainable ? rules.trainable_bits : rules.frozen_bits; }

  // Optimizer states by where they rest: of trainable units.
  struct Segment {
    Tier tier;
    std::int64_t numel;
    bool aliases_master;  // parameters are the masters
  };
  std::vector<Segment> segments() const;
  // The compute copy is not where the update of a segment writes.
  bool travels(const Segment& segment) const;

  const RankRules& rules;
  const Arrangement& arrangement;
  const Unit& unit;
  const Place& place;
  Residency now = Residency::Gathered;
};

// As an Engine at stage 3 makes it.
std::unique_ptr<memory::Prefetcher> make_prefetcher(std::vector<memory::GatherUnit*> units,
                                                    const config::ZeroSettings& zero);

}  // namespace zero::planning
