// See live_record.h.
#include "tools/explain/live_record.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::cli {
namespace {

using planning::Event;
using planning::How;
using planning::Phase;
using planning::Schedule;
using planning::Sent;
using planning::What;

std::int64_t ns_of(const Json& us) { return std::llround(us.get<double>() * 1e3); }

struct Slice {
  std::string name, category;
  std::int64_t begin, end, bytes;
};

// The meaning of a category of slices; the prefix precedes the unit in a slice's name.
struct Kind {
  const char* category;
  const char* prefix;
  What what;
  How how;
};
constexpr Kind kKinds[] = {
    {"gather", "", What::Parameters, How::AllGather},
    {"gather,in-place", "", What::Parameters, How::InPlace},
    {"publish", "publish ", What::Parameters, How::AllGather},
    {"reduce", "", What::Gradients, How::ReduceScatter},
    {"update", "", What::OptimizerStates, How::Update},
    {"fetch", "fetch ", What::Parameters, How::Read},
    {"fetch,states", "fetch ", What::OptimizerStates, How::Read},
    {"store", "store ", What::Parameters, How::Write},
    {"store,states", "store ", What::OptimizerStates, How::Write},
    {"copy", "copy ", What::Parameters, How::Copy},
};

std::vector<Slice> slices_of(const Json& trace, int rank) {
  std::vector<Slice> all;
  for (const auto& event : trace) {
    if (event.at("ph") != "X" || event.at("pid") != rank) continue;
    const auto begin = ns_of(event.at("ts"));
    const auto bytes =
        event.contains("args") && event["args"].contains("bytes") ? event["args"]["bytes"].get<std::int64_t>() : -1;
    all.push_back({event.at("name"), event.at("cat"), begin, begin + ns_of(event.at("dur")), bytes});
  }
  std::stable_sort(all.begin(), all.end(), [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
  return all;
}

// A forward, backward or step() of the trace.
struct Span {
  int step, micro;
  Phase phase;
  std::int64_t begin, end;
};

std::vector<Span> spans_of(const std::vector<Slice>& slices) {
  std::vector<Span> spans;
  int step = 0, micro = 0;
  for (const auto& slice : slices) {
    if (slice.category != "phase") continue;
    const auto phase = slice.name == "forward"    ? Phase::Forward
                       : slice.name == "backward" ? Phase::Backward
                                                  : Phase::Step;
    spans.push_back({step, phase == Phase::Step ? 0 : micro, phase, slice.begin, slice.end});
    if (phase == Phase::Backward) ++micro;
    if (phase != Phase::Step) continue;
    ++step;
    micro = 0;
  }
  return spans;
}

using Line = std::pair<std::string, std::int64_t>;  // unit, bytes
using Lines = std::map<std::pair<LiveRecord::Moment, Lane>, std::vector<Line>>;

Lines lines_of(const std::vector<Event>& events) {
  Lines lines;
  for (const auto& event : events)
    if (event.phase != Phase::Build)
      lines[{{event.step, event.micro, event.phase}, lane_of(event)}].emplace_back(event.unit, event.bytes);
  return lines;
}

std::string text_of(const Line* line) {
  return line == nullptr ? "nothing" : base::join(line->first, " of ", line->second, " bytes");
}

std::string moment_text(const LiveRecord::Moment& moment) {
  const auto& [step, micro, phase] = moment;
  if (phase == Phase::Build) return "building";
  const bool whole = phase == Phase::Step || phase == Phase::Background;
  return base::join("step ", step + 1, whole ? "" : base::join(", micro-batch ", micro + 1), ", ",
                    planning::name(phase));
}

std::string event_difference(const std::vector<Event>& scheduled, const std::vector<Event>& seen) {
  auto expected = lines_of(scheduled), got = lines_of(seen);
  for (const auto& [key, lines] : got) expected[key];
  for (const auto& [key, want] : expected) {
    const auto& have = got[key];
    for (std::size_t i = 0; i < std::max(want.size(), have.size()); ++i) {
      const auto* a = i < want.size() ? &want[i] : nullptr;
      const auto* b = i < have.size() ? &have[i] : nullptr;
      if (a != nullptr && b != nullptr && *a == *b) continue;
      return base::join(moment_text(key.first), ", ", name(key.second), ", number ", i + 1, ": the schedule has ",
                        text_of(a), ", the rank did ", text_of(b));
    }
  }
  return "";
}

// activations: null: not compared. first: of the data-parallel ranks, whose schedule it is.
std::string sent_difference(const Schedule& schedule, const LiveRecord& record, const Activations* activations,
                            bool first) {
  std::map<LiveRecord::Moment, std::vector<Event>> by_moment;
  for (const auto& event : schedule.events) by_moment[{event.step, event.micro, event.phase}].push_back(event);
  for (const auto& [moment, counted] : record.sent) {
    auto sent = counted;
    if (activations == nullptr) sent.erase("tp"), sent.erase("sp"), sent.erase("ep");
    const auto expected = expected_of(by_moment[moment], moment, activations);
    auto all = expected;
    for (const auto& [operation, row] : sent) all[operation];
    for (const auto& [operation, row] : all) {
      const auto want = expected.count(operation) != 0 ? expected.at(operation) : Sent{};
      const auto have = sent.count(operation) != 0 ? sent.at(operation) : Sent{};
      if (want == have) continue;
      // How many rows go to experts of other ranks depends on the tokens.
      if (operation == "ep" && want.calls == have.calls) continue;
      // Another rank owns other parameters.
      if (operation == "all_to_all" && !first && want.calls == have.calls) continue;
      return base::join(moment_text(moment), ", ", operation, ": the schedule has ", want.calls, " calls that send ",
                        want.bytes, " bytes, the communicator counted ", have.calls, " and ", have.bytes);
    }
  }
  return "";
}

std::string resting_difference(const Schedule& schedule, const LiveRecord& record) {
  std::map<std::pair<MemoryReport::Tier, MemoryReport::Purpose>, std::int64_t> expected;
  for (const auto& holding : schedule.holdings)
    if (!holding.passing) expected[{holding.tier, holding.purpose}] += holding.bytes;
  for (const auto& [key, bytes] : record.resting) expected[key];
  for (const auto& [key, want] : expected) {
    const auto it = record.resting.find(key);
    const auto have = it == record.resting.end() ? 0 : it->second;
    if (want != have)
      return base::join("between steps, ", MemoryReport::name(key.second), " on tier ", MemoryReport::name(key.first),
                        ": the schedule has ", want, " bytes, the rank held ", have);
  }
  return "";
}

}  // namespace

const char* name(Lane lane) {
  constexpr const char* kNames[kLanes] = {"gathers",
                                          "reductions",
                                          "updates",
                                          "reads of parameters",
                                          "reads of optimizer states",
                                          "writes of parameters",
                                          "writes of optimizer states",
                                          "copies"};
  return kNames[static_cast<std::size_t>(lane)];
}

Lane lane_of(const Event& event) {
  const bool states = event.what == What::OptimizerStates;
  switch (event.how) {
    case How::Read:
      return states ? Lane::ReadStates : Lane::ReadParameters;
    case How::Write:
      return states ? Lane::WriteStates : Lane::WriteParameters;
    case How::Copy:
      return Lane::Copies;
    case How::Update:
      return Lane::Updates;
    case How::AllGather:
    case How::ReduceScatter:
    case How::AllReduce:
    case How::Broadcast:
    case How::InPlace:
      break;
  }
  return event.what == What::Gradients ? Lane::Reductions : Lane::Gathers;
}

std::vector<Event> events_of_trace(const Json& trace, int rank, const TracedSteps& steps) {
  const auto slices = slices_of(trace, rank);
  const auto spans = spans_of(slices);
  // A delayed update lasts until the next step() has waited for it.
  std::vector<std::int64_t> background_ends;  // by step: before this time, slices belong to the previous step
  std::vector<std::int64_t> acts;
  for (const auto& span : spans) {
    if (span.phase != Phase::Step) continue;
    acts.push_back(span.begin);
    background_ends.push_back(span.begin);
    for (const auto& slice : slices)
      if (slice.category == "wait" && slice.name == "update delayed" && slice.begin >= span.begin &&
          slice.begin < span.end)
        background_ends.back() = slice.end;
  }
  const auto is_late = [&](int step) { return steps.first_late >= 0 && step >= steps.first_late; };
  std::vector<Event> events;
  for (const auto& slice : slices) {
    const auto* kind =
        std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return slice.category == k.category; });
    if (kind == std::end(kKinds)) continue;
    const std::string_view prefix = kind->prefix;
    if (slice.name.compare(0, prefix.size(), prefix) != 0)
      throw InternalError(
          base::join("[zero explain] got a slice \"", slice.name, "\" of category ", slice.category, " in a trace"));
    Event event;
    event.what = kind->what;
    event.how = kind->how;
    event.unit = slice.name.substr(prefix.size());
    event.bytes = slice.bytes;
    const auto lane = lane_of(event);
    std::optional<int> late;
    if (lane == Lane::Updates || lane == Lane::ReadStates || lane == Lane::WriteStates)
      for (int step = 0; step < static_cast<int>(acts.size()); ++step)
        if (is_late(step) && slice.begin >= background_ends[static_cast<std::size_t>(step)]) late = step;
    if (late) {
      event.step = *late;
      event.phase = Phase::Background;
    } else {
      const auto in = std::find_if(spans.begin(), spans.end(),
                                   [&](const Span& s) { return slice.begin >= s.begin && slice.begin <= s.end; });
      if (in == spans.end())
        throw InternalError(
            base::join("[zero explain] got a slice \"", slice.name, "\" outside of every phase in a trace"));
      event.step = in->step;
      event.micro = in->micro;
      event.phase = in->phase;
    }
    if (event.step < steps.count) events.push_back(std::move(event));
  }
  return events;
}

std::map<std::string, Sent> expected_of(const std::vector<Event>& events, const LiveRecord::Moment& moment,
                                        const Activations* activations) {
  auto all = planning::sent_by_operation(events);
  if (activations == nullptr) return all;
  if (const auto found = activations->find(std::get<2>(moment)); found != activations->end())
    all.insert(found->second.begin(), found->second.end());
  return all;
}

std::string first_difference(const LiveExpectation& expected, const LiveRun& run) {
  const auto tensor = expected.of_tensor_rank.size();
  const auto world = static_cast<std::size_t>(expected.of_tensor_rank.front().world) * tensor;
  if (run.ranks.size() != world) return base::join("the schedule is for ", world, " ranks, ", run.ranks.size(), " ran");
  for (std::size_t rank = 0; rank < run.ranks.size(); ++rank) {
    const auto j = rank % tensor, sequence = static_cast<std::size_t>(expected.sequence);
    const bool last = j + 1 == tensor && rank / tensor % sequence + 1 == sequence;
    const auto& schedule = expected.of_tensor_rank[j];
    const auto& record = run.ranks[rank];
    auto text = event_difference(schedule.events, record.events);
    if (text.empty()) text = sent_difference(schedule, record, last ? &expected.activations : nullptr, rank < tensor);
    if (text.empty()) text = resting_difference(schedule, record);
    if (!text.empty()) return base::join("rank ", rank, "/", run.ranks.size(), ", ", text);
  }
  return "";
}

std::string first_difference(const Schedule& schedule, const LiveRun& run) {
  return first_difference(LiveExpectation{.of_tensor_rank = {schedule}, .sequence = 1, .activations = {}}, run);
}

std::string name_of(const LiveRecord::Moment& moment, std::int64_t accumulation) {
  const auto& [step, micro, phase] = moment;
  (void)step;
  const bool passes = phase == Phase::Forward || phase == Phase::Backward;
  return base::join(planning::name(phase), passes && accumulation > 1 ? base::join(" ", micro + 1) : "");
}

Json LiveRun::json() const {
  Json all = Json::array();
  for (const auto& rank : ranks) {
    Json events = Json::array(), sent = Json::array(), resting = Json::array();
    for (const auto& e : rank.events)
      events.push_back({e.step, e.micro, static_cast<int>(e.phase), static_cast<int>(e.what), static_cast<int>(e.how),
                        e.unit, e.bytes});
    for (const auto& [moment, rows] : rank.sent) {
      Json by_operation = Json::object();
      for (const auto& [operation, row] : rows) by_operation[operation] = {row.calls, row.bytes};
      sent.push_back({std::get<0>(moment), std::get<1>(moment), static_cast<int>(std::get<2>(moment)), by_operation});
    }
    for (const auto& [key, bytes] : rank.resting)
      resting.push_back({static_cast<int>(key.first), static_cast<int>(key.second), bytes});
    all.push_back({{"events", events}, {"sent", sent}, {"resting", resting}});
  }
  return {{"transport", transport}, {"first_step", first_step}, {"overflowed", overflowed}, {"ranks", all}};
}

LiveRun LiveRun::from(const Json& json) {
  LiveRun run;
  json.at("transport").get_to(run.transport);
  json.at("first_step").get_to(run.first_step);
  json.at("overflowed").get_to(run.overflowed);
  for (const auto& rank : json.at("ranks")) {
    LiveRecord record;
    for (const auto& e : rank.at("events")) {
      Event event;
      e.at(0).get_to(event.step);
      e.at(1).get_to(event.micro);
      event.phase = static_cast<Phase>(e.at(2).get<int>());
      event.what = static_cast<What>(e.at(3).get<int>());
      event.how = static_cast<How>(e.at(4).get<int>());
      e.at(5).get_to(event.unit);
      e.at(6).get_to(event.bytes);
      record.events.push_back(std::move(event));
    }
    for (const auto& s : rank.at("sent")) {
      auto& rows = record.sent[{s.at(0).get<int>(), s.at(1).get<int>(), static_cast<Phase>(s.at(2).get<int>())}];
      for (const auto& [operation, row] : s.at(3).items())
        rows[operation] = {row.at(0).get<std::uint64_t>(), row.at(1).get<std::uint64_t>()};
    }
    for (const auto& r : rank.at("resting"))
      record.resting[{static_cast<MemoryReport::Tier>(r.at(0).get<int>()),
                      static_cast<MemoryReport::Purpose>(r.at(1).get<int>())}] = r.at(2).get<std::int64_t>();
    run.ranks.push_back(std::move(record));
  }
  return run;
}

}  // namespace zero::cli
