// The sums and the text table of MemoryReport.
#include <zero/memory_report.h>

#include <cstdio>
#include <numeric>

namespace zero {

std::uint64_t MemoryReport::current(Tier tier) const {
  const auto& row = current_[index(tier)];
  return std::accumulate(row.begin(), row.end(), std::uint64_t{0});
}

const char* MemoryReport::name(Tier tier) {
  constexpr const char* kNames[] = {"device", "host", "file"};
  return kNames[index(tier)];
}

const char* MemoryReport::name(Purpose purpose) {
  constexpr const char* kNames[] = {"parameters",     "gradients",      "optimizer states", "master parameters",
                                    "gather buffers", "reduce buffers", "activations",      "other"};
  return kNames[index(purpose)];
}

std::string MemoryReport::table() const {
  std::string out;
  char line[128];
  const auto row = [&](const char* label, std::uint64_t now, std::uint64_t peak) {
    std::snprintf(line, sizeof line, "  %-18s %16llu %16llu\n", label, static_cast<unsigned long long>(now),
                  static_cast<unsigned long long>(peak));
    out += line;
  };
  for (std::size_t t = 0; t < kTiers; ++t) {
    const auto tier = static_cast<Tier>(t);
    if (current(tier) == 0 && peak(tier) == 0) continue;
    std::snprintf(line, sizeof line, "%-20s %16s %16s\n", name(tier), "bytes now", "bytes peak");
    out += line;
    for (std::size_t p = 0; p < kPurposes; ++p)
      if (current_[t][p] != 0 || peak_[t][p] != 0) row(name(static_cast<Purpose>(p)), current_[t][p], peak_[t][p]);
    row("all", current(tier), peak(tier));
  }
  if (allocator) {
    out += "CUDA allocator\n";
    row("tensors", allocator->allocated, allocator->allocated_peak);
    row("reserved", allocator->reserved, allocator->reserved_peak);
  }
  return out;
}

}  // namespace zero
