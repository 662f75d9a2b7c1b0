// `zero report`: reads run folders and writes one HTML file. Reading and drawing are in tools/report.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/commands.h"
#include "tools/report/page/html_page.h"
#include "tools/report/page/run_record.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"
#include "tools/support/whole_file.h"

namespace zero::cli {
namespace {

constexpr std::size_t kMostRuns = 16;
constexpr std::size_t kMostLoads = 60;  // moments of a run in the JSON document

nlohmann::ordered_json json_of(const report::AxisBytes& bytes) {
  return {{"all", bytes.sum()},
          {"zero", bytes.zero},
          {"tensor_parallel", bytes.tensor},
          {"sequence_parallel", bytes.sequence},
          {"expert_parallel", bytes.expert}};
}

nlohmann::ordered_json json_of(const report::ExpertLoad& load) {
  nlohmann::ordered_json json{{"first_step", load.first}, {"last_step", load.last}};
  for (const auto& layer : load.layers)
    json["layers"].push_back({{"block", layer.block},
                              {"load_max", layer.max_over_mean()},
                              {"dropped", layer.dropped()},
                              {"counts", layer.counts},
                              {"kept", layer.kept}});
  return json;
}

nlohmann::ordered_json json_of(const report::RunRecord& run) {
  nlohmann::ordered_json json{
      {"folder", run.folder}, {"label", run.label}, {"steps", run.log.empty() ? 0 : run.log.back().step}};
  for (const auto& load : report::joined(run.loads, kMostLoads)) json["experts"].push_back(json_of(load));
  if (run.stage < 0) return json;
  json["mesh"] = {{"dp", run.mesh.data}, {"sp", run.mesh.sequence}, {"tp", run.mesh.tensor}, {"ep", run.mesh.expert}};
  json["samples_per_step"] = run.samples_per_step;
  json["tokens_per_step"] = run.tokens_per_step;
  if (run.recorded_step == 0) return json;
  json["sent_bytes"] = json_of(report::sent_by_axis(run));
  if (!run.planned.empty()) json["planned_sent_bytes"] = json_of(run.planned_sent);
  return json;
}

// What a run's ranks share and send; empty for data-parallel ranks only.
std::string mesh_line(const report::RunRecord& run) {
  if (!run.mesh.exchange_activations()) return "";
  std::string text = run.label + ": " + report::ranks_text(run);
  if (run.recorded_step == 0) return text + "\n";
  text += "; rank 0 sent in a step: " + report::axes_text(report::sent_by_axis(run), run.mesh);
  if (!run.planned.empty())
    text += report::sent_by_axis(run) == run.planned_sent
                ? ", as planned"
                : "; planned: " + report::axes_text(run.planned_sent, run.mesh);
  return text + "\n";
}

}  // namespace
}  // namespace zero::cli

int zero_report(int argc, char** argv) {
  using namespace zero;
  using namespace zero::cli;
  std::vector<std::string> folders;
  std::string out = "report.html";
  Command command("report", "one HTML page about one or several runs: curves, memory, traffic, groups",
                  "RUN... [options]", "  zero report runs/stage0 runs/stage3 --out report.html\n");
  command.positionals(folders, "RUN", "folder that `zero train --out` wrote", true);
  command.option("--out", out, "FILE", "the page (report.html); it opens offline, in any browser");
  if (!command.parse(argc, argv)) return 0;
  if (folders.size() > kMostRuns)
    throw ConfigError("[zero report] got " + std::to_string(folders.size()) + " runs, expected at most " +
                      std::to_string(kMostRuns) + ": more cannot be told apart on one page");
  std::vector<report::RunRecord> runs;
  for (const std::string& folder : folders) {
    runs.push_back(report::read_run(folder));
    if (runs.back().log.empty() && !runs.back().heldout)
      throw ConfigError("[report] got " + folder + "/log.jsonl without a step, expected at least one");
    if (runs.back().recorded_step == 0)
      print_note("report", LogLevel::Warning, folder + " has no recorded step: only what its log says is shown");
  }
  report::label_runs(runs);
  const std::string page = report::html_page(runs);
  write_whole("--out", out, page);
  if (command.global().json) {
    nlohmann::ordered_json document{{"schema", "zero.report/1"}, {"file", out}, {"bytes", page.size()}};
    for (const auto& run : runs) document["runs"].push_back(json_of(run));
    print_result(document.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
  } else {
    std::string text = out + ": " + std::to_string(runs.size()) + (runs.size() == 1 ? " run, " : " runs, ") +
                       report::human_bytes(page.size()) + "\n";
    for (const auto& run : runs) {
      text += mesh_line(run);
      if (!run.loads.empty()) text += run.label + ": " + report::load_text(run.loads.back());
    }
    print_result(text);
  }
  return 0;
}
