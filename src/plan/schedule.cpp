// The facts of a run, as an Engine would find them, and the walk through its steps. See schedule.h.
#include "plan/schedule.h"

#include <algorithm>

#include <zero/errors.h>

#include "base/check.h"
#include "plan/schedule_run.h"

namespace zero::planning {
const char* name(Phase phase) {
  constexpr const char* kNames[] = {"build", "forward", "backward", "step", "beside"};
  return kNames[static_cast<int>(phase)];
}

const char* name(What what) {
  constexpr const char* kNames[] = {"parameters", "gradients", "optimizer states"};
  return kNames[static_cast<int>(what)];
}

const char* name(How how) {
  constexpr const char* kNames[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "mapped in place",
                                    "file read",  "file write",     "copy",       "update"};
  return kNames[static_cast<int>(how)];
}

Schedule schedule(const ScheduleInput& input, const config::Settings& settings, std::int64_t accumulation,
                  std::int64_t first_step, int num_steps, const std::vector<bool>& overflowed) {
  const auto rules = rank_rules(settings, input.around, accumulation, input.movable);
  Schedule result;
  result.stage = settings.zero.stage;
  result.world = input.around.world;
  result.accumulation = accumulation;
  result.parameter_width = rules.parameter_width;
  result.gradient_width = rules.gradient_width;
  result.wire_width = rules.wire_width;
  result.num_slots = rules.num_slots;
  result.units = cut_into_units(input.parameters, settings, input.around.world,
                                rules.parameter_width, input.around.gpu);
  for (const auto& unit : result.units) {
    result.padded_numel += unit.padded_numel();
    if (unit.trainable) result.padded_trainable_numel += unit.padded_numel();
    if (unit.persistent) result.persistent_numel += unit.padded_numel();
  }
  Run run(rules, result.units, input.pass);
  run.build();
  for (int k = 0; k < num_steps; ++k)
    run.step(first_step + k, static_cast<std::size_t>(k) < overflowed.size() && overflowed[static_cast<std::size_t>(k)]);
  result.events = run.take_events();
  result.holdings = run.holdings();
  return result;
}

std::map<std::string, Sent> sent_by_operation(const std::vector<Event>& events) {
  std::map<std::string, Sent> all;
  const auto count = [&](const char* operation, std::int64_t bytes) {
    auto& row = all[operation];
    ++row.calls;
    row.bytes += static_cast<std::uint64_t>(bytes);
  };
  for (const auto& event : events) {
    if (event.neighbours) continue;
    switch (event.how) {
      case How::AllGather:
      case How::InPlace: count("all_gather", event.sent); break;
      case How::ReduceScatter: count(event.quantized ? "reduce_scatter_quantized" : "reduce_scatter", event.sent); break;
      case How::AllReduce:  // as the sum of parts and their gathering
        count("reduce_scatter", event.sent / 2);
        count("all_gather", event.sent / 2);
        break;
      case How::Broadcast: count("broadcast", event.sent); break;
      case How::Read:
      case How::Write:
      case How::Copy:
      case How::Update: break;
    }
  }
  return all;
}

}  // namespace zero::planning
