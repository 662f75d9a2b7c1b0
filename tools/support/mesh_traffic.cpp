#include "tools/support/mesh_traffic.h"

namespace zero::cli {

report::Degrees degrees_of(const Mesh& mesh, int expert) {
  return {mesh.size("dp"), mesh.size("sp"), mesh.size("tp"), expert};
}

std::map<std::string, CommStats::Row> counted_between(const CommStats& before, const CommStats& after,
                                                      const report::Degrees& degrees) {
  std::map<std::string, CommStats::Row> rows;
  for (const auto& [name, row] : after.by_op) {
    const auto found = before.by_op.find(name);
    const auto from = found == before.by_op.end() ? CommStats::Row{} : found->second;
    if (row.calls == from.calls) continue;
    auto& sum = rows[report::operation_on_mesh(name, degrees)];
    sum.calls += row.calls - from.calls;
    sum.bytes_sent += row.bytes_sent - from.bytes_sent;
  }
  return rows;
}

report::AxisBytes sent_between(const CommStats& before, const CommStats& after, const report::Degrees& degrees) {
  report::AxisBytes sent;
  for (const auto& [name, row] : counted_between(before, after, degrees)) sent.add(name, row.bytes_sent);
  return sent;
}

}  // namespace zero::cli
