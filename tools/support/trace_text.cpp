// The text and keys of a trace's summary.
#include "tools/support/trace_text.h"

#include "tools/support/measurement.h"

namespace zero::cli {

nlohmann::json trace_json(const TraceSummary& trace) {
  return {{"file", trace.file},
          {"joined", trace.joined},
          {"steps", trace.steps},
          {"step_s", trace.step_s},
          {"compute_s", trace.compute_s},
          {"gather_wait_s", trace.gather_wait_s},
          {"reduce_wait_s", trace.reduce_wait_s},
          {"optimizer_s", trace.optimizer_s},
          {"communication_s", trace.communication_s},
          {"hidden_share", trace.hidden}};
}

std::vector<std::string> trace_lines(const TraceSummary& trace) {
  const auto ms = [](double s) { return fixed(s * 1e3, 2); };
  std::vector<std::string> lines;
  if (trace.steps > 0)
    lines.push_back("trace, rank 0, medians of " + std::to_string(trace.steps) + " steps in ms: step " +
                    ms(trace.step_s) + ", compute " + ms(trace.compute_s) + ", gather wait " + ms(trace.gather_wait_s) +
                    ", reduce wait " + ms(trace.reduce_wait_s) + ", optimizer " + ms(trace.optimizer_s) +
                    "; communication " + ms(trace.communication_s) + ", " + fixed(trace.hidden * 100, 0) + "% hidden");
  lines.push_back("trace in " + trace.file + (trace.joined ? "" : ", one part a rank") +
                  ": open it in ui.perfetto.dev");
  return lines;
}

}  // namespace zero::cli
