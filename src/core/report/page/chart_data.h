// Numbers for the charts of `zero report`, taken from run records: curves thinned to what a screen shows, memory
// samples and slices brought into rows. The tables of the page use the same functions, so that both say the same.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "report/page/run_record.h"

namespace zero::report {

// Steps that a curve shows at most; longer runs are drawn as means of as many neighbours, the last one at its end.
inline constexpr std::size_t kMostPoints = 1500;

struct Curve {
  std::vector<std::int64_t> steps;
  std::vector<std::optional<double>> values;
};
Curve curve_of(const RunRecord& run, std::optional<double> StepPoint::*value);
// The running median over `window` steps (odd; cut at the ends), for times that jump about.
Curve smoothed(const Curve& curve, std::size_t window);

// Of the values that are set; nothing when none is.
std::optional<double> median_of(const RunRecord& run, std::optional<double> StepPoint::*value);
std::optional<double> last_of(const RunRecord& run, std::optional<double> StepPoint::*value);
std::optional<double> highest_of(const RunRecord& run, std::optional<double> StepPoint::*value);

// Forward, backward and step() of the recorded step, in time; those of one name are joined where nothing lies between.
struct StepPart {
  std::string name;
  double begin_ms = 0, end_ms = 0;
};
std::vector<StepPart> step_parts(const RunRecord& run);
double step_end_ms(const RunRecord& run);

// What one group did, or (the last row, "this thread waits") where the rank stood still. Kinds are the script's words.
struct GroupSlice {
  std::size_t row = 0;
  std::string kind;  // fwd bwd upd gat red tie wai who
  double begin_ms = 0, end_ms = 0;
  std::int64_t bytes = -1;
  std::string says;  // empty: the kind's own word
};
struct GroupRows {
  std::vector<std::string> rows;
  std::vector<GroupSlice> slices;
  // Milliseconds of a row by kind.
  double total(std::size_t row, const std::string& kind) const;
};
GroupRows group_rows(const RunRecord& run);

// The device tier; null when it was not noted.
const TierMemory* device_memory(const std::vector<TierMemory>& tiers);
const TierMemory* device_memory(const std::vector<PhaseMemory>& phases, const std::string& phase);
std::uint64_t sum_of(const Bytes& bytes);
std::uint64_t bytes_of(const Bytes& bytes, const std::string& name);
// The highest of the phases' peaks on the device.
std::uint64_t peak_of(const std::vector<PhaseMemory>& phases);

// Operations that any of the runs used, without "control"; bytes that a run sent by one.
std::vector<std::string> operations_of(const std::vector<RunRecord>& runs);
// The variable of the style sheet that an operation is drawn in; as the groups' slices where they are the same thing.
std::string color_of_operation(const std::string& operation);
std::uint64_t sent_by(const RunRecord& run, const std::string& operation);

// One list of purposes for all runs, in samples too: that of another version of the program may differ.
void share_purposes(std::vector<RunRecord>& runs);

// What the script reads, as JSON that may stand in a <script> element.
std::string chart_json(const std::vector<RunRecord>& runs);

}  // namespace zero::report
