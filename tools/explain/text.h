// Formats a schedule (plan/schedule.h) as tables and as JSON: where states are stored, what is transferred, and totals
// compared with the papers' volumes.
#pragma once
#include <string>
#include <vector>

#include "plan/mesh_parts.h"
#include "plan/schedule.h"
#include "tools/explain/live_record.h"
#include "tools/support/measurement.h"

namespace zero::cli {

// Texts and figures that describe the explained configuration.
struct Explained {
  std::string title;      // "ZeRO stage 3 with optimizer states in files"
  std::string recipe;     // "bf16"
  std::string optimizer;  // "AdamW"
  std::string model;      // "GPT of 124k parameters, 4 layers, hidden 64"
  std::string transport;
  std::string mesh;                              // "2 dp x 1 sp x 2 tp", empty: all ranks are data-parallel
  int ranks = 1;                                 // of the run; ZeRO shards over Schedule::world of them
  std::vector<planning::SplitProduct> products;  // of the first unit that has some
  std::vector<planning::Exchange> exchanges;     // of activations between ranks of the mesh, in a micro-batch
  PlanExperts experts;                           // of `expert_layers` layers
  std::int64_t expert_layers = 0;
  bool data_before_experts = false;
  std::int64_t parameters = 0;  // elements that a rank holds before ZeRO shards them, without padding
  bool gpu = false;
  bool delayed = false;
  int shown = 2;  // the step that is shown; the order of use is known by then
};

std::string explain_text(const planning::Schedule& schedule, const Explained& what, std::size_t columns);
// The schedule and the run side by side; `difference` is empty if they agree.
std::string live_text(const planning::Schedule& schedule, const Activations& activations, const LiveRun& run,
                      const std::string& difference, std::size_t columns);

Json explain_json(const planning::Schedule& schedule, const Explained& what);
Json live_json(const planning::Schedule& schedule, const LiveRun& run, const std::string& difference);

// Bytes that each rank sends in the step that is shown, and the papers' figure for it: 2 or 3 times P bytes of
// parameters without padding, of which a rank of N sends (N-1)/N.
struct VolumeLine {
  std::int64_t sent = 0;
  double paper = 0, padded = 0;  // the formula for the parameters without and with the units' padding
  double times = 0;              // sent, in units of (N-1)/N of the parameters' bytes; 0 for one rank
};
VolumeLine volume_of(const planning::Schedule& schedule, const Explained& what);

}  // namespace zero::cli
