// What ranks really did in the steps that `zero explain --live` ran, and where it first differs from the schedule:
// slices of their traces and differences of their counters, as the events of plan/schedule.h. Runs nothing, needs no
// libtorch.
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cli/support/measurement.h"
#include "plan/schedule.h"

namespace zero::cli {

// One rank's.
struct LiveRecord {
  using Moment = std::tuple<int, int, planning::Phase>;  // step, micro-batch (of Step 0), phase
  std::vector<planning::Event> events;                   // in order of their begin; no purpose, no tiers, nothing sent
  std::map<Moment, std::map<std::string, planning::Sent>> sent;
  std::map<std::pair<MemoryReport::Tier, MemoryReport::Purpose>, std::int64_t> resting;  // bytes between steps
};

struct LiveRun {
  std::string transport;
  std::int64_t first_step = 0;
  std::vector<bool> overflowed;  // by step: skipped for gradients that were not finite
  std::vector<LiveRecord> ranks;

  // {"transport", "overflowed", "ranks": [...]} and back, for ranks that are processes.
  Json json() const;
  static LiveRun from(const Json& json);
};

// Which steps of a traced run are late (delayed update), for slices of the background: by number of the step.
struct TracedSteps {
  int count = 0;        // of steps that are compared; the trace has more
  int first_late = -1;  // of these, negative: none
};

// The events of one rank in a trace (docs/trace.md).
std::vector<planning::Event> events_of_trace(const Json& trace, int rank, const TracedSteps& steps);

// Events of one kind follow each other in one order; which of two kinds comes first may depend on the ranks' pace.
enum class Lane { Gathers, Reductions, Updates, ReadParameters, ReadStates, WriteParameters, WriteStates, Copies };
inline constexpr std::size_t kLanes = 8;
const char* name(Lane lane);
Lane lane_of(const planning::Event& event);

// The first thing in which a rank's steps differ from the schedule's, as a sentence; empty: they agree. Order and bytes
// of every unit's events by phase and kind, bytes and calls of every operation by phase, bytes that rest.
std::string first_difference(const planning::Schedule& schedule, const LiveRun& run);

// "build", "forward", ... or of several micro-batches "forward 2".
std::string name_of(const LiveRecord::Moment& moment, std::int64_t accumulation);

}  // namespace zero::cli
