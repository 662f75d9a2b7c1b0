// Each table uses one unit, so that columns can be compared; the JSON has exact bytes.
#include "tools/report/text/memory_phases.h"

#include <algorithm>
#include <cstdio>

#include "tools/report/text/table.h"
#include "tools/report/text/text.h"

namespace zero::report {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

constexpr Phase kAllPhases[] = {Phase::BeforeForward, Phase::AfterForward, Phase::AfterBackward, Phase::AfterStep};

// A column of the table: the purposes that it adds up.
struct Class {
  const char* name;
  const char* key;
  std::vector<Purpose> purposes;
};

const std::vector<Class>& classes() {
  static const std::vector<Class> all = {
      {"parameters", "parameters_bytes", {Purpose::Parameters}},
      {"gathered", "gathered_bytes", {Purpose::GatherBuffers}},
      {"gradients", "gradients_bytes", {Purpose::Gradients}},
      {"reduce buffers", "reduce_buffers_bytes", {Purpose::ReduceBuffers}},
      {"master + optimizer",
       "master_and_optimizer_states_bytes",
       {Purpose::MasterParameters, Purpose::OptimizerStates}},
      {"activations", "activations_bytes", {Purpose::Activations}},
      {"other", "other_bytes", {Purpose::Other}},
  };
  return all;
}

std::uint64_t bytes_of(const MemoryReport& report, const Class& one, Tier tier = Tier::Device) {
  std::uint64_t sum = 0;
  for (const Purpose purpose : one.purposes) sum += report.current(tier, purpose);
  return sum;
}

std::uint64_t total_of(const MemoryReport& report, Tier tier = Tier::Device) {
  std::uint64_t sum = 0;
  for (const Class& one : classes()) sum += bytes_of(report, one, tier);
  return sum;
}

struct Unit {
  const char* name;
  double bytes;
};

// The unit in which the largest number has at most four digits before the point.
Unit unit_for(std::uint64_t largest) {
  constexpr Unit kUnits[] = {{"B", 1}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}, {"TiB", 1099511627776.0}};
  std::size_t i = 0;
  while (i + 1 < std::size(kUnits) && static_cast<double>(largest) >= kUnits[i + 1].bytes) ++i;
  return kUnits[i];
}

std::string amount(std::uint64_t bytes, const Unit& unit) {
  if (bytes == 0 || unit.bytes == 1) return std::to_string(bytes);
  const double value = static_cast<double>(bytes) / unit.bytes;
  if (value < 0.005) return "<0.01";
  return printed("%.2f", value);
}

using Cells = std::vector<std::vector<std::string>>;  // the first row and column are titles

Cells transposed(const Cells& cells) {
  Cells out(cells[0].size(), std::vector<std::string>(cells.size()));
  for (std::size_t r = 0; r < cells.size(); ++r)
    for (std::size_t c = 0; c < cells[r].size(); ++c) out[c][r] = cells[r][c];
  return out;
}

report::Table laid_out(const Cells& cells) {
  std::vector<report::Column> columns;
  for (const std::string& title : cells[0])
    columns.push_back({title, columns.empty() ? report::Align::Left : report::Align::Right});
  report::Table table(std::move(columns));
  for (std::size_t r = 1; r < cells.size(); ++r) table.row(cells[r]);
  return table;
}

std::size_t width_of(const std::string& text) {
  std::size_t widest = 0, begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    widest = std::max(widest, end - begin);
    begin = end + 1;
  }
  return widest;
}

}  // namespace

const char* name(Phase phase) {
  constexpr const char* kNames[] = {"before forward", "after forward", "after backward", "after step"};
  return kNames[MemoryReport::index(phase)];
}

void MemoryPhases::note(Phase phase, const MemoryReport& report) { reports_[MemoryReport::index(phase)] = report; }

std::uint64_t MemoryPhases::total(Phase phase) const {
  const auto& report = reports_[MemoryReport::index(phase)];
  return report ? total_of(*report) : 0;
}

std::uint64_t MemoryPhases::peak() const {
  std::uint64_t highest = 0;
  for (const auto& report : reports_)
    if (report) highest = std::max(highest, report->peak(Tier::Device));
  return highest;
}

// Whether the tier has any bytes. Tiers other than the device are shown as sums, and only if they are used.
bool MemoryPhases::uses(Tier tier) const {
  return std::any_of(reports_.begin(), reports_.end(),
                     [&](const auto& report) { return report && report->peak(tier) > 0; });
}

std::string MemoryPhases::table(std::size_t columns) const {
  const bool host = uses(Tier::Host), file = uses(Tier::File);
  std::uint64_t largest = peak();
  for (const Phase phase : kAllPhases) largest = std::max(largest, total(phase));
  for (const auto& report : reports_)
    if (report) largest = std::max({largest, report->peak(Tier::Host), report->peak(Tier::File)});
  const Unit unit = unit_for(largest);
  Cells cells{{unit.name}};
  for (const Class& one : classes()) cells[0].push_back(one.name);
  cells[0].insert(cells[0].end(), {"total", "peak in phase"});
  if (host) cells[0].insert(cells[0].end(), {"on the host", "host, peak"});
  if (file) cells[0].push_back("in files");
  for (const Phase phase : kAllPhases) {
    const auto& report = reports_[MemoryReport::index(phase)];
    if (!report) continue;
    std::vector<std::string> row{name(phase)};
    for (const Class& one : classes()) row.push_back(amount(bytes_of(*report, one), unit));
    row.push_back(amount(total_of(*report), unit));
    row.push_back(amount(report->peak(Tier::Device), unit));
    if (host) row.push_back(amount(total_of(*report, Tier::Host), unit));
    if (host) row.push_back(amount(report->peak(Tier::Host), unit));
    if (file) row.push_back(amount(total_of(*report, Tier::File), unit));
    cells.push_back(std::move(row));
  }
  const std::string wide = laid_out(cells).render(1000);
  if (width_of(wide) <= columns) return wide;
  return laid_out(transposed(cells)).render(columns);
}

std::string MemoryPhases::json() const {
  std::string out;
  for (const Phase phase : kAllPhases) {
    const auto& report = reports_[MemoryReport::index(phase)];
    if (!report) continue;
    std::string key = name(phase);
    std::replace(key.begin(), key.end(), ' ', '_');
    out += (out.empty() ? "{\"" : ", \"") + key + "\": {";
    for (const Class& one : classes())
      out += "\"" + std::string(one.key) + "\": " + std::to_string(bytes_of(*report, one)) + ", ";
    out += "\"total_bytes\": " + std::to_string(total_of(*report)) +
           ", \"peak_bytes\": " + std::to_string(report->peak(Tier::Device));
    out += ", \"host_bytes\": " + std::to_string(total_of(*report, Tier::Host)) +
           ", \"host_peak_bytes\": " + std::to_string(report->peak(Tier::Host));
    out += ", \"file_bytes\": " + std::to_string(total_of(*report, Tier::File)) + "}";
  }
  return out.empty() ? "{}" : out + "}";
}

std::string compare_phases(const std::vector<std::pair<std::string, MemoryPhases>>& setups, const std::string& what,
                           std::size_t columns) {
  std::uint64_t largest = 0;
  for (const auto& [setup, phases] : setups) {
    largest = std::max(largest, phases.peak());
    for (const Phase phase : kAllPhases) largest = std::max(largest, phases.total(phase));
  }
  const Unit unit = unit_for(largest);
  Cells cells{{what + " (" + unit.name + ")"}};
  for (const Phase phase : kAllPhases) cells[0].push_back(name(phase));
  cells[0].push_back("peak");
  for (const auto& [setup, phases] : setups) {
    std::vector<std::string> row{setup};
    for (const Phase phase : kAllPhases) row.push_back(phases.has(phase) ? amount(phases.total(phase), unit) : "-");
    row.push_back(amount(phases.peak(), unit));
    cells.push_back(std::move(row));
  }
  return laid_out(cells).render(columns);
}

}  // namespace zero::report
