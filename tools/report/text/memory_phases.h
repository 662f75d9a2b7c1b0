// Bytes of one rank at the phases of a training step, as tables and JSON. The caller measures them (Engine::memory).
// Does not need libtorch.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zero/memory_report.h>

namespace zero::report {

enum class Phase { BeforeForward, AfterForward, AfterBackward, AfterStep };
inline constexpr std::size_t kPhases = 4;
const char* name(Phase phase);  // "before forward"

class MemoryPhases {
 public:
  // Records the report at the end of a phase. Peaks are those since the previous note, so reset them
  // (Engine::reset_peak_memory) after every note. A repeated phase replaces the older record.
  void note(Phase phase, const MemoryReport& report);
  // The same from an Engine, and resets its peaks.
  template <class Engine>
  void note_and_reset(Phase phase, Engine& engine) {
    note(phase, engine.memory());
    engine.reset_peak_memory();
  }

  bool has(Phase phase) const { return reports_[MemoryReport::index(phase)].has_value(); }
  // Current bytes of the device tier; 0 for a phase not noted.
  std::uint64_t total(Phase phase) const;
  // The highest sum of the phases noted.
  std::uint64_t peak() const;

  // Rows: the moments; columns: purposes, total and the peak of the phase that ended there. One unit
  // (B, KiB, MiB, GiB) for the whole table, named in its first line. When it is wider than `columns`
  // rows and columns change places.
  std::string table(std::size_t columns = 80) const;
  // {"before_forward": {"parameters_bytes": ..., "total_bytes": ..., "peak_bytes": ...}, ...}; exact.
  std::string json() const;

 private:
  bool uses(MemoryReport::Tier tier) const;
  std::array<std::optional<MemoryReport>, kPhases> reports_;
};

// A table with one row per setup: the totals at the four phases, and the highest peak.
std::string compare_phases(const std::vector<std::pair<std::string, MemoryPhases>>& setups,
                           const std::string& what = "stage", std::size_t columns = 80);

}  // namespace zero::report
