// The operations of an Engine in an optimizer step as readable events: which bytes of which unit move, when, how, and
// between which tiers. They are recorded from the step program on the dry backend (step/program.h) and named here.
// `zero explain --live` compares them with the operations of real ranks. Events have no times.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <zero/memory_report.h>

#include "plan/pass.h"
#include "step/event_list.h"
#include "step/placement.h"

namespace zero::planning {

using step::Phase;
enum class What { Parameters, Gradients, OptimizerStates };  // OptimizerStates includes fp32 masters
enum class How {
  AllGather,
  ReduceScatter,
  AllReduce,
  Broadcast,
  InPlace,
  Read,
  Write,
  Copy,
  ToOwners,
  FromOwners,
  Update
};
const char* name(Phase phase);
const char* name(What what);
const char* name(How how);

struct Event {
  int step = 0, micro = 0;  // micro: micro-batch within the step; 0 in the phases Step and Background
  Phase phase = Phase::Forward;
  What what = What::Parameters;
  How how = How::AllGather;
  std::string purpose;  // "before use", "new values", "sum", "arrives", "leaves", "initial values", "update", ...
  std::string unit;
  Tier from = Tier::Device, to = Tier::Device;
  std::int64_t bytes = 0;   // collectives: of the whole vector, in the param or reduce dtype; others: bytes moved
  std::int64_t sent = 0;    // by this rank, as in CommStats; InPlace: what the replaced all-gather would have sent
  bool neighbours = false;  // among the ranks of a secondary shard (hpZ); not in the CommStats of the world
  bool quantized = false;   // sent as integers
};

struct ScheduleInput {
  std::vector<Parameter> parameters;
  Pass pass;
  step::RunTopology topology;
  step::PlacementFreedom freedom;  // which states the budgets in `memory` may move
};

// One state on one tier of one rank.
struct Holding {
  std::string state;  // "parameters", "gradients", "master parameters", "optimizer states", ...
  MemoryReport::Purpose purpose = MemoryReport::Purpose::Parameters;  // as counted by Engine::memory()
  int width = 4;                                                      // bytes per element
  int ranks = 1;                                                      // that share the units: Schedule::world, or
  bool experts = false;                                               // of experts, over fewer ranks
  bool sharded = false;                                               // each has 1/ranks of it, else all of it
  bool passing = false;  // transient: allocated in backward and freed after the step
  Tier tier = Tier::Device;
  std::vector<std::string> units;  // units that have this state here
  std::int64_t bytes = 0;          // files: in whole disk blocks
};

struct Schedule {
  std::vector<Event> events;
  std::vector<Unit> units;
  std::vector<step::MixedPrecisionPolicy> precision;  // by unit
  std::vector<Holding> holdings;
  int stage = 0, world = 1;  // world: the ranks that share the states of all but experts
  std::int64_t accumulation = 1;
  int parameter_width = 4;                  // of units whose parameters do not stay fp32
  std::int64_t padded_numel = 0;            // of all units
  std::int64_t padded_trainable_numel = 0;  // of the units that have gradients
  std::int64_t persistent_numel = 0;        // the part of padded_numel that stage 3 does not shard
};

// Steps first_step .. first_step + num_steps - 1 of a run; the order of use is learned in the first two of them.
// overflowed[i]: the gradients of step first_step + i are not finite; missing entries count as false. Throws
// ConfigError for a configuration that an Engine would refuse, with the code kOutOfMemory if budgets cannot be met.
// Patterns of libzero.keep_fp32 that match nothing are left to check_patterns() (model.h).
Schedule schedule(const ScheduleInput& input, const config::Settings& settings, std::int64_t accumulation,
                  std::int64_t first_step, int num_steps, const std::vector<bool>& overflowed = {});

// Calls and bytes sent by operation, as CommStats::by_op counts these events.
struct Sent {
  std::uint64_t calls = 0, bytes = 0;
  bool operator==(const Sent&) const = default;
};
std::map<std::string, Sent> sent_by_operation(const std::vector<Event>& events);

}  // namespace zero::planning
