// Records every operation of a run in order, with the time at which it was issued. The observer of schedules.
#pragma once
#include <vector>

#include "step/observer.h"

namespace zero::step {

// Background: during forward and backward of the next step (delayed update).
enum class Phase { Build, Forward, Backward, Step, Background };

struct Event {
  int step = 0, micro = 0;  // micro-batch within the step; 0 in Step and Background
  Phase phase = Phase::Build;
  Op op;
};

// The driver of the program sets step, micro and phase.
class EventList final : public Observer {
 public:
  int step = 0, micro = 0;
  Phase phase = Phase::Build;
  std::vector<Event> events;
  std::unique_ptr<Observed> issued(const Op& op) override {
    events.push_back({step, micro, phase, op});
    return nullptr;
  }
};

}  // namespace zero::step
