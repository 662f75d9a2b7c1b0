// Records of the steps that `zero explain --live` ran, and their first difference from the schedule. Slices of traces
// and differences of counters are converted to the events of plan/schedule.h. Needs no libtorch.
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "plan/schedule.h"
#include "tools/support/measurement.h"

namespace zero::cli {

// Record of one rank.
struct LiveRecord {
  using Moment = std::tuple<int, int, planning::Phase>;          // step, micro-batch (of Step 0), phase
  std::vector<planning::Event> events;                           // in order of begin; without purpose, tiers and sent
  std::map<Moment, std::map<std::string, planning::Sent>> sent;  // by operation of ZeRO; all of tp, sp, ep
  std::map<std::pair<MemoryReport::Tier, MemoryReport::Purpose>, std::int64_t> resting;  // bytes between steps
};

struct LiveRun {
  std::string transport;
  std::int64_t first_step = 0;
  std::vector<bool> overflowed;  // by step: skipped because gradients were not finite
  std::vector<LiveRecord> ranks;

  // Conversion to and from {"transport", "overflowed", "ranks": [...]}, for ranks that are processes.
  Json json() const;
  static LiveRun from(const Json& json);
};

// Which steps of a traced run have a delayed update; needed to assign background slices to steps.
struct TracedSteps {
  int count = 0;        // steps that are compared; the trace has more
  int first_late = -1;  // first of these with a delayed update; negative: none
};

// The events of one rank in a trace (docs/trace.md).
std::vector<planning::Event> events_of_trace(const Json& trace, int rank, const TracedSteps& steps);

// The order of events within a lane is fixed; the order between lanes may depend on timing.
enum class Lane { Gathers, Reductions, Updates, ReadParameters, ReadStates, WriteParameters, WriteStates, Copies };
inline constexpr std::size_t kLanes = 8;
const char* name(Lane lane);
Lane lane_of(const planning::Event& event);

using Activations = std::map<planning::Phase, std::map<std::string, planning::Sent>>;
// What a run on a mesh should do.
struct LiveExpectation {
  std::vector<planning::Schedule> of_tensor_rank;
  int sequence = 1;
  // Of a micro-batch, by the phases Forward and Backward, which includes recomputation: all of "tp" and of "sp". Of the
  // ranks that are last in both dimensions; others have smaller parts if these are uneven.
  Activations activations;
};

// Describes the first difference between a rank's steps and the schedule; empty: they agree. Compares order and bytes
// of every unit's events by phase and lane, bytes and calls of every operation by phase, and bytes between steps.
std::string first_difference(const LiveExpectation& expected, const LiveRun& run);
std::string first_difference(const planning::Schedule& schedule, const LiveRun& run);

// What is expected to be sent in one phase, by operation. activations: null: those of other ranks, or of no mesh.
std::map<std::string, planning::Sent> expected_of(const std::vector<planning::Event>& events,
                                                  const LiveRecord::Moment& moment, const Activations* activations);

// "build", "forward", ...; with several micro-batches "forward 2".
std::string name_of(const LiveRecord::Moment& moment, std::int64_t accumulation);

}  // namespace zero::cli
