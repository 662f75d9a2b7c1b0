// What an Engine does in an optimizer step, as events for people: which bytes of which unit move, when, how, and
// between which tiers. They come from the step program itself on the dry backend (step/program.h); here they get their
// names. `zero explain --live` compares them with what ranks do. Times are not known here.
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
enum class What { Parameters, Gradients, OptimizerStates };  // masters are among the last
enum class How { AllGather, ReduceScatter, AllReduce, Broadcast, InPlace, Read, Write, Copy, Update };
const char* name(Phase phase);
const char* name(What what);
const char* name(How how);

struct Event {
  int step = 0, micro = 0;  // micro-batch within the step; of Step and Beside 0
  Phase phase = Phase::Forward;
  What what = What::Parameters;
  How how = How::AllGather;
  std::string purpose;  // "before use", "new values", "sum", "arrives", "leaves", "initial values", "update", ...
  std::string unit;
  Tier from = Tier::Device, to = Tier::Device;
  std::int64_t bytes = 0;  // of collectives the whole vector's, in the parameters' or the wire's dtype; else what moves
  std::int64_t sent = 0;   // that this rank sends, as CommStats counts; of InPlace what the all-gather would have sent
  bool neighbours = false;  // among the ranks of a second shard (hpZ), which CommStats of the world does not count
  bool quantized = false;   // sent as integers
};

struct ScheduleInput {
  std::vector<Parameter> parameters;
  Pass pass;
  step::RunTopology topology;
  step::PlacementFreedom freedom;  // of the budgets `memory` of the configuration
};

// One state on one tier of one rank.
struct Holding {
  std::string state;  // "parameters", "gradients", "master parameters", "optimizer states", ...
  MemoryReport::Purpose purpose = MemoryReport::Purpose::Parameters;  // under which Engine::memory() counts it
  int width = 4;                                                      // bytes an element
  bool sharded = false;                                               // 1/world of it on each rank, else all of it
  bool passing = false;  // made in backward and gone after the step; else there between steps, too
  Tier tier = Tier::Device;
  std::vector<std::string> units;  // of which
  std::int64_t bytes = 0;          // with whole blocks of files
};

struct Schedule {
  std::vector<Event> events;
  std::vector<Unit> units;
  std::vector<Holding> holdings;
  int stage = 0, world = 1;
  std::int64_t accumulation = 1;
  int parameter_width = 4, gradient_width = 4, wire_width = 4, num_slots = 2;
  std::int64_t padded_numel = 0;            // of all units
  std::int64_t padded_trainable_numel = 0;  // of those that have gradients
  std::int64_t persistent_numel = 0;        // of padded_numel: whole on every rank at stage 3, too
};

// Steps first_step .. first_step + num_steps - 1 of a run; the order of use is learned in the first two of them.
// overflowed: of these steps, those whose gradients were not finite; missing ones were. Throws ConfigError for what an
// Engine would refuse: budgets that cannot be kept have the code kOutOfMemory.
Schedule schedule(const ScheduleInput& input, const config::Settings& settings, std::int64_t accumulation,
                  std::int64_t first_step, int num_steps, const std::vector<bool>& overflowed = {});

// Bytes sent by operation as CommStats::by_op counts those events.
struct Sent {
  std::uint64_t calls = 0, bytes = 0;
  bool operator==(const Sent&) const = default;
};
std::map<std::string, Sent> sent_by_operation(const std::vector<Event>& events);

}  // namespace zero::planning
