// Data for the charts of `zero report`, computed from run records: curves thinned to the resolution of a screen, memory
// samples, and slices sorted into rows. The tables of the page use the same functions, so charts and tables agree.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/report/page/run_record.h"

namespace zero::report {

// The maximum number of points of a curve. Longer runs are drawn as means of consecutive steps, each at its last step.
inline constexpr std::size_t kMostPoints = 1500;

struct Curve {
  std::vector<std::int64_t> steps;
  std::vector<std::optional<double>> values;
};
Curve curve_of(const RunRecord& run, std::optional<double> StepPoint::*value);
// The running median over `window` steps (odd; shorter at the ends), for noisy times.
Curve smoothed(const Curve& curve, std::size_t window);

// Of the values that are set; nullopt if there is none.
std::optional<double> median_of(const RunRecord& run, std::optional<double> StepPoint::*value);
std::optional<double> last_of(const RunRecord& run, std::optional<double> StepPoint::*value);
std::optional<double> highest_of(const RunRecord& run, std::optional<double> StepPoint::*value);

// Forward, backward and step() of the recorded step, in order of time; adjacent ones with the same name are joined.
struct StepPart {
  std::string name;
  double begin_ms = 0, end_ms = 0;
};
std::vector<StepPart> step_parts(const RunRecord& run);
double step_end_ms(const RunRecord& run);

// An activity of one group, or a wait of the rank (last row). Kinds are those of the page's script.
struct GroupSlice {
  std::size_t row = 0;
  std::string kind;  // fwd bwd upd gat red tie wai who
  double begin_ms = 0, end_ms = 0;
  std::int64_t bytes = -1;
  std::string says;  // text of the slice; empty: the kind's name
};
struct GroupRows {
  std::vector<std::string> rows;
  std::vector<GroupSlice> slices;
  // Milliseconds of a row by kind.
  double total(std::size_t row, const std::string& kind) const;
};
GroupRows group_rows(const RunRecord& run);

// The device tier; null if it was not recorded.
const TierMemory* device_memory(const std::vector<TierMemory>& tiers);
const TierMemory* device_memory(const std::vector<PhaseMemory>& phases, const std::string& phase);
std::uint64_t sum_of(const Bytes& bytes);
std::uint64_t bytes_of(const Bytes& bytes, const std::string& name);
// The highest of the phases' peaks on the device.
std::uint64_t peak_of(const std::vector<PhaseMemory>& phases);

// Operations that any of the runs used, without "control"; bytes that a run sent by one.
std::vector<std::string> operations_of(const std::vector<RunRecord>& runs);
// The colour variable of the style sheet for an operation; the same as of the corresponding slices of groups.
std::string color_of_operation(const std::string& operation);
std::uint64_t sent_by(const RunRecord& run, const std::string& operation);

// The kinds of parallelism, with the colour variable of the style sheet.
struct Axis {
  const char* name;
  const char* color;
  std::uint64_t AxisBytes::*bytes;
  bool (*on)(const Degrees& degrees);  // whether to name it: a run that shares samples, with several ranks along it
};
extern const std::array<Axis, 4> kAxes;

// That of all runs; "nats" if they differ.
std::string loss_unit(const std::vector<RunRecord>& runs);

// Uses one list of purposes for all runs and their samples; runs of another version of the program may have others.
void share_purposes(std::vector<RunRecord>& runs);

// The input of the page's script, as JSON that is safe inside a <script> element.
std::string chart_json(const std::vector<RunRecord>& runs);

}  // namespace zero::report
