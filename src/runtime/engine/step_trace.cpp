// Records the slices of the compute thread and the sums of a step.
#include "engine/step_trace.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/check.h"

namespace zero {

TraceSteps TraceSteps::parse(const std::string& text, const std::string& source) {
  const auto number = [&](std::string_view part, std::int64_t& value) {
    const auto* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, value);
    return error == std::errc() && stop == end && value >= 1;
  };
  const auto colon = text.find(':');
  TraceSteps steps;
  bool good = number(std::string_view(text).substr(0, colon), steps.first);
  if (colon == std::string::npos)
    steps.last = steps.first;
  else if (colon + 1 < text.size())
    good = good && number(std::string_view(text).substr(colon + 1), steps.last);
  if (!good || steps.last < steps.first)
    throw ConfigError("[" + source + "] got \"" + text +
                      "\", expected the first and the last step to trace as A:B, counted from 1");
  return steps;
}

namespace engine {
namespace {

using observe::TraceKind;
constexpr std::size_t kMostRows = 1024;

double median_s(std::vector<std::int64_t> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return static_cast<double>(*middle) * 1e-9;
  return static_cast<double>(*middle + *std::max_element(values.begin(), middle)) * 0.5e-9;
}

}  // namespace

void StepTrace::start(observe::Trace::Setup setup, TraceSteps steps) {
  const std::lock_guard lock(mutex_);
  trace_.start(std::move(setup));
  steps_ = steps;
  done_ = 0;
  in_phase_ = false;
  unit_ = nullptr;
  step_begin_ = 0;
  std::fill(std::begin(counted_), std::end(counted_), -1);
  before_ = sums();
  rows_.clear();
  choose_recording();
}

void StepTrace::choose_recording() { trace_.record(done_ + 1 >= steps_.first && done_ + 1 <= steps_.last); }

bool StepTrace::stop(TraceSummary* summary) {
  const std::lock_guard lock(mutex_);
  end_phase();
  const bool whole = trace_.stop();
  if (summary == nullptr) return whole;
  const auto median_of = [&](std::int64_t Row::*part) {
    std::vector<std::int64_t> values;
    for (const auto& row : rows_) values.push_back(row.*part);
    return median_s(std::move(values));
  };
  summary->steps = static_cast<std::int64_t>(rows_.size());
  summary->step_s = median_of(&Row::step);
  summary->compute_s = median_of(&Row::compute);
  summary->gather_wait_s = median_of(&Row::gather_wait);
  summary->reduce_wait_s = median_of(&Row::reduce_wait);
  summary->optimizer_s = median_of(&Row::optimizer);
  summary->communication_s = median_of(&Row::communication);
  std::int64_t waited = 0, all = 0;
  for (const auto& row : rows_) {
    waited += row.gather_wait + row.reduce_wait;
    all += row.communication;
  }
  summary->hidden = all > 0 ? 1.0 - static_cast<double>(waited) / static_cast<double>(all) : 1.0;
  return whole;
}

void StepTrace::begin_phase_on(TraceKind phase) {
  const std::lock_guard lock(mutex_);
  end_phase_on();
  phase_ = phase;
  in_phase_ = true;
  phase_begin_ = observe::trace_now();
  if (step_begin_ == 0) step_begin_ = phase_begin_;
  waited_before_ = waited();
}

void StepTrace::end_unit() {
  if (unit_ == nullptr) return;
  trace_.slice(phase_ == TraceKind::Backward ? TraceKind::BackwardUnit : TraceKind::ForwardUnit, *unit_, unit_begin_,
               observe::trace_now());
  unit_ = nullptr;
}

void StepTrace::end_phase_on() {
  const std::lock_guard lock(mutex_);
  if (!in_phase_) return;
  end_unit();
  trace_.slice(phase_,
               phase_ == TraceKind::Forward    ? "forward"
               : phase_ == TraceKind::Backward ? "backward"
                                               : "step()",
               phase_begin_, observe::trace_now());
  if (phase_ != TraceKind::Act) waited_in_passes_ += waited() - waited_before_;
  in_phase_ = false;
}

void StepTrace::enter_on(const std::string& unit) {
  const std::lock_guard lock(mutex_);
  if (!in_phase_) return;
  end_unit();
  unit_ = &unit;
  unit_begin_ = observe::trace_now();
}

std::int64_t StepTrace::waited() const {
  return trace_.total(TraceKind::GatherWait) + trace_.total(TraceKind::FetchWait) + trace_.total(TraceKind::ReduceWait);
}

StepTrace::Row StepTrace::sums() const {
  const auto of = [&](TraceKind kind) { return trace_.total(kind); };
  Row row;
  row.step = of(TraceKind::Step);
  row.compute = of(TraceKind::Forward) + of(TraceKind::Backward) - waited_in_passes_;
  row.gather_wait =
      of(TraceKind::GatherWait) + of(TraceKind::PublishWait) + of(TraceKind::FetchWait) + of(TraceKind::StoreWait);
  row.reduce_wait = of(TraceKind::ReduceWait);
  row.optimizer = of(TraceKind::Update);
  row.communication =
      of(TraceKind::Gather) + of(TraceKind::GatherInPlace) + of(TraceKind::Publish) + of(TraceKind::Reduce);
  return row;
}

StepTimes StepTrace::times() const {
  const auto now = sums();
  const auto seconds = [](std::int64_t ns) { return static_cast<double>(ns) * 1e-9; };
  return {seconds(now.compute), seconds(now.gather_wait), seconds(now.reduce_wait), seconds(now.optimizer)};
}

void StepTrace::end_step_started(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  end_phase();
  const auto begin = std::exchange(step_begin_, 0);
  if (!trace_.recording()) {
    before_ = sums();
  } else if (begin != 0) {
    trace_.slice(TraceKind::Step, "step", begin, observe::trace_now(), number);
    const auto now = sums();
    if (rows_.size() < kMostRows)
      rows_.push_back({now.step - before_.step, now.compute - before_.compute, now.gather_wait - before_.gather_wait,
                       now.reduce_wait - before_.reduce_wait, now.optimizer - before_.optimizer,
                       now.communication - before_.communication});
    before_ = now;
    trace_.flush();
  }
  ++done_;
  choose_recording();
}

void StepTrace::count(const step::MemoryLedger& ledger, std::int64_t gathered_bytes) {
  const std::lock_guard lock(mutex_);
  const auto report = ledger.report();
  const auto counter = [&](std::size_t place, const char* name, std::int64_t bytes) {
    if (std::exchange(counted_[place], bytes) != bytes) trace_.counter(name, bytes);
  };
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
    const auto purpose = static_cast<step::Purpose>(p);
    counter(p, MemoryReport::name(purpose), static_cast<std::int64_t>(report.current(step::Tier::Device, purpose)));
  }
  counter(MemoryReport::kPurposes, "gathered parameters", gathered_bytes);
}

}  // namespace engine
}  // namespace zero
