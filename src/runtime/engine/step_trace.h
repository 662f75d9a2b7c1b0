// Records training steps in an observe::Trace: the step, phase and unit of the compute thread, which steps are
// recorded, and per-step sums. All-gathers, reductions and updates are recorded by TraceObserver. When tracing is off,
// every call is one relaxed load. No communication.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <zero/trace.h>

#include "observe/trace.h"
#include "step/memory_ledger.h"

namespace zero::engine {

class StepTrace {
 public:
  // Throws as observe::Trace::start().
  void start(observe::Trace::Setup setup, TraceSteps steps);
  bool started() const { return trace_.started(); }
  // Ends open slices. The caller fills `file` and `joined` of the summary. Returns whether this rank's part is
  // complete.
  bool stop(TraceSummary* summary);

  observe::Trace& trace() { return trace_; }
  bool on() const { return trace_.on(); }
  bool recording() const { return trace_.recording(); }
  // Seconds since the Engine was constructed; all 0 before observe::Trace::count_always().
  StepTimes times() const;

  // --- called by the compute thread and other threads that run forwards; names must live until stop() ---
  void begin_phase(observe::TraceKind phase) {
    if (on()) begin_phase_on(phase);
  }
  void end_phase() {
    if (on()) end_phase_on();
  }
  // The phase now executes this unit.
  void enter(const std::string& unit) {
    if (on()) enter_on(unit);
  }
  // Ends an optimizer step.
  void end_step(std::int64_t number) {
    if (started()) end_step_started(number);
  }
  // Records byte counts that changed since the last call.
  void count(const step::MemoryLedger& ledger, std::int64_t gathered_bytes);

 private:
  // Nanoseconds of one step, computed as differences of running totals.
  struct Row {
    std::int64_t step = 0, compute = 0, gather_wait = 0, reduce_wait = 0, optimizer = 0, communication = 0;
  };
  void begin_phase_on(observe::TraceKind phase);
  void end_phase_on();
  void end_unit();
  void enter_on(const std::string& unit);
  void end_step_started(std::int64_t number);
  void choose_recording();
  std::int64_t waited() const;
  Row sums() const;

  observe::Trace trace_;
  std::recursive_mutex mutex_;  // guards the members below
  TraceSteps steps_;
  std::int64_t done_ = 0;  // steps since start()
  bool in_phase_ = false;
  observe::TraceKind phase_{};
  const std::string* unit_ = nullptr;
  std::int64_t step_begin_ = 0, phase_begin_ = 0, unit_begin_ = 0;  // 0: none open
  std::int64_t counted_[MemoryReport::kPurposes + 1] = {};
  std::int64_t waited_before_ = 0;     // this phase
  std::int64_t waited_in_passes_ = 0;  // all forwards and backwards
  Row before_;                         // sums() at the end of the step before
  std::vector<Row> rows_;
};

}  // namespace zero::engine
