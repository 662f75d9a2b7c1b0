// What a Communicator counted between two moments, by the dimensions of a mesh (report/text/axis_bytes.h).
#pragma once
#include <map>
#include <string>

#include <zero/communicator.h>
#include <zero/mesh.h>

#include "tools/report/text/axis_bytes.h"

namespace zero::cli {

// expert: ranks that share the experts of a layer.
report::Degrees degrees_of(const Mesh& mesh, int expert = 1);

// By the names of report::operation_on_mesh().
std::map<std::string, CommStats::Row> counted_between(const CommStats& before, const CommStats& after,
                                                      const report::Degrees& degrees);
report::AxisBytes sent_between(const CommStats& before, const CommStats& after, const report::Degrees& degrees);

}  // namespace zero::cli
