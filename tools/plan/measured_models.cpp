// Searches the largest models of measured_models.h and prints them.
#include "tools/plan/measured_models.h"

#include <zero/errors.h>
#include <zero/plan.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "config/settings.h"
#include "plan/formulas.h"
#include "plan/mesh_parts.h"
#include "tools/report/text/table.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_json.h"
#include "tools/support/gpt_plan.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {
namespace {

using Purpose = MemoryReport::Purpose;
using report::Align;

// The models differ in their number of layers only, so that one more layer is a small step, and units that are
// unsharded for a moment are small. Their width grows with the budget: the largest replicated one has about 80 layers.
constexpr std::int64_t kLayersOfReplica = 80, kWidthStep = 32;
constexpr std::int64_t kMostLayers = 1 << 14;

models::GptConfig shape_for(std::uint64_t budget) {
  const double numel = planning::most_parameters(planning::kMixedAdam, 0, static_cast<double>(budget), 1);
  const double width = std::sqrt(numel / (12.0 * kLayersOfReplica));
  models::GptConfig gpt;
  gpt.hidden = kWidthStep * std::max<std::int64_t>(1, std::llround(width / kWidthStep));
  gpt.heads = 4, gpt.sequence = 64, gpt.vocabulary = 256;
  return gpt;
}

PlanModel plan_model(const models::GptConfig& gpt) {
  PlanModel model;
  model.layers = gpt.layers, model.hidden = gpt.hidden, model.heads = gpt.heads;
  model.sequence = gpt.sequence, model.vocabulary = gpt.vocabulary;
  return with_gpt_pass(std::move(model));
}

// Elements of one tensor-parallel rank, of the largest parts if they are uneven.
std::int64_t parameters_of_rank(const MeasuredTask& task) {
  const auto parts = planning::parts_of(plan_model(task.gpt), task.options().settings());
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& parameter) { return sum + parameter.numel; });
}

// One size that was trained.
struct Trained {
  std::uint64_t states = 0, peak = 0, tensor_sent = 0, zero_sent = 0;
};

// What is compared with the budget.
enum class Criterion { States, Peak };
constexpr Criterion kCriteria[] = {Criterion::States, Criterion::Peak};
const char* name(Criterion criterion) { return criterion == Criterion::States ? "states" : "peak"; }
std::uint64_t bytes_of(Criterion criterion, const Trained& trained) {
  return criterion == Criterion::States ? trained.states : trained.peak;
}

// One degree and stage. All sizes of `trained` were run.
class Cell {
 public:
  Cell(const MeasuredModels& asked, const Global& global, int tensor, int stage)
      : asked_(asked), global_(global), task_{shape_for(asked.budget), stage, tensor} {}

  int tensor() const { return task_.tensor; }
  int stage() const { return task_.stage; }
  std::int64_t ranks() const { return asked_.data * task_.tensor; }
  std::int64_t parameters(std::int64_t layers) const { return layers == 0 ? 0 : of(layers).gpt.num_parameters(); }
  std::int64_t of_rank(std::int64_t layers) const { return layers == 0 ? 0 : parameters_of_rank(of(layers)); }

  // Rows below the first of Table 2 are multiples of it.
  double by_table() const {
    return task_.tensor * planning::most_parameters(planning::kMixedAdam, task_.stage,
                                                    static_cast<double>(asked_.budget),
                                                    static_cast<double>(asked_.data));
  }
  std::int64_t layers_by_parts() const {
    return largest_whole(kMostLayers, [&](std::int64_t layers) {
      return planning::state_bytes(planning::kMixedAdam, task_.stage, static_cast<double>(of_rank(layers)),
                                   static_cast<double>(asked_.data)) <= static_cast<double>(asked_.budget);
    });
  }

  void measure() {
    for (const auto criterion : kCriteria) {
      const auto fits = [&](std::int64_t layers) { return bytes_of(criterion, train(layers)) <= asked_.budget; };
      // The dry run is nearly exact, so this size and the next are usually the only ones to run.
      std::int64_t good = 0, bad = 0, next = std::max<std::int64_t>(1, planned(criterion)), stride = 1;
      while (bad - good != 1) {
        (fits(next) ? good : bad) = next;
        if (bad == 0)
          next = good + std::exchange(stride, 2 * stride);
        else if (good == 0)
          next = std::max<std::int64_t>(bad - std::exchange(stride, 2 * stride), 1);
        else
          next = good + (bad - good) / 2;
      }
      largest_[criterion] = good;
    }
  }
  std::int64_t largest(Criterion criterion) const { return largest_.at(criterion); }
  const Trained& trained(std::int64_t layers) const { return trained_.at(layers); }

 private:
  MeasuredTask of(std::int64_t layers) const {
    auto task = task_;
    task.gpt.layers = layers;
    return task;
  }

  std::int64_t planned(Criterion criterion) const {
    PlanMachine machine;
    machine.gpu = false;
    machine.ranks_per_host = static_cast<int>(ranks());
    machine.shared_memory = ranks() > 1;
    return largest_whole(kMostLayers, [&](std::int64_t layers) {
      const auto task = of(layers);
      const auto memory = plan(plan_model(task.gpt), task.options(), machine).memory;
      std::uint64_t bytes = memory.peak(Tier::Device);
      if (criterion == Criterion::States) {
        bytes = 0;
        for (const auto purpose :
             {Purpose::Parameters, Purpose::Gradients, Purpose::MasterParameters, Purpose::OptimizerStates})
          bytes += memory.peak(Tier::Device, purpose);
      }
      return bytes <= asked_.budget;
    });
  }

  const Trained& train(std::int64_t layers) {
    if (const auto it = trained_.find(layers); it != trained_.end()) return it->second;
    const auto task = of(layers);
    const RankProcesses ranks_of{.command = "plan", .world = ranks(), .threads = 1, .transport = "shm"};
    const auto outcome = run_rank_processes(ranks_of, task.json(), global_);
    if (outcome.exit_code != 0)
      throw InternalError(base::join("[zero plan] got exit code ", outcome.exit_code, " from the ranks of stage ",
                                     task.stage, " and t ", task.tensor, ", expected 0"),
                          static_cast<ExitCode>(outcome.exit_code));
    const auto& result = outcome.result;
    const auto& trained = trained_[layers] = {.states = result.at("states_bytes"),
                                              .peak = result.at("peak_bytes"),
                                              .tensor_sent = result.at("tensor_parallel_bytes"),
                                              .zero_sent = result.at("zero_bytes")};
    if (log_threshold(global_) <= LogLevel::Info)
      print_note(
          "plan", LogLevel::Info,
          base::join("t ", task.tensor, ", stage ", task.stage, ": ", layers, " layers, ",
                     report::human_parameters(static_cast<double>(task.gpt.num_parameters())), " parameters: states ",
                     report::human_bytes(trained.states), ", peak ", report::human_bytes(trained.peak)));
    return trained;
  }

  const MeasuredModels& asked_;
  const Global& global_;
  const MeasuredTask task_;
  std::map<std::int64_t, Trained> trained_;      // by layers
  std::map<Criterion, std::int64_t> largest_{};  // layers
};

std::string million(double parameters) { return report::human_parameters(parameters); }

double ratio_of(const Cell& cell, Criterion criterion) {
  return static_cast<double>(cell.parameters(cell.largest(criterion))) / cell.by_table();
}

std::string percent(double ratio) { return fixed(100 * ratio, 1) + " %"; }

std::string largest_table(const std::vector<Cell>& cells, std::size_t columns) {
  report::Table table({{"t", Align::Right},
                       {"ranks", Align::Right},
                       {"stage", Align::Right},
                       {"Table 2", Align::Right},
                       {"by P_t", Align::Right},
                       {"by states", Align::Right},
                       {"ratio", Align::Right},
                       {"by peak", Align::Right},
                       {"ratio", Align::Right}});
  for (const auto& cell : cells) {
    std::vector<std::string> row{std::to_string(cell.tensor()), std::to_string(cell.ranks()),
                                 std::to_string(cell.stage()), million(cell.by_table()),
                                 million(static_cast<double>(cell.parameters(cell.layers_by_parts())))};
    for (const auto criterion : kCriteria) {
      row.push_back(million(static_cast<double>(cell.parameters(cell.largest(criterion)))));
      row.push_back(percent(ratio_of(cell, criterion)));
    }
    table.row(std::move(row));
  }
  return table.render(columns);
}

std::string runs_table(const std::vector<Cell>& cells, std::size_t columns) {
  report::Table table({{"t", Align::Right},
                       {"stage", Align::Right},
                       {"by"},
                       {"layers", Align::Right},
                       {"P_t", Align::Right},
                       {"bytes", Align::Right},
                       {"one layer more", Align::Right},
                       {"tp sends", Align::Right},
                       {"ZeRO sends", Align::Right}});
  for (const auto& cell : cells)
    for (const auto criterion : kCriteria) {
      const auto layers = cell.largest(criterion);
      const auto fits = layers == 0 ? Trained{} : cell.trained(layers);
      table.row({std::to_string(cell.tensor()), std::to_string(cell.stage()), name(criterion), std::to_string(layers),
                 std::to_string(cell.of_rank(layers)), std::to_string(bytes_of(criterion, fits)),
                 std::to_string(bytes_of(criterion, cell.trained(layers + 1))), report::human_bytes(fits.tensor_sent),
                 report::human_bytes(fits.zero_sent)});
    }
  return table.render(columns);
}

Json json_of(const Cell& cell) {
  Json json = {{"tp", cell.tensor()},
               {"ranks", cell.ranks()},
               {"stage", cell.stage()},
               {"table2_parameters", cell.by_table()},
               {"by_parts_parameters", cell.parameters(cell.layers_by_parts())}};
  for (const auto criterion : kCriteria) {
    const auto layers = cell.largest(criterion);
    const auto fits = layers == 0 ? Trained{} : cell.trained(layers);
    json[name(criterion)] = {{"layers", layers},
                             {"parameters", cell.parameters(layers)},
                             {"parameters_per_rank", cell.of_rank(layers)},
                             {"ratio", ratio_of(cell, criterion)},
                             {"bytes", bytes_of(criterion, fits)},
                             {"next_bytes", bytes_of(criterion, cell.trained(layers + 1))},
                             {"tensor_parallel_sent_bytes", fits.tensor_sent},
                             {"zero_sent_bytes", fits.zero_sent}};
  }
  return json;
}

}  // namespace

Options MeasuredTask::options() const {
  Json config = {{"train_micro_batch_size_per_gpu", 1},
                 {"bf16", {{"enabled", true}}},
                 {"optimizer", {{"type", "Adam"}, {"params", {{"lr", 1e-3}}}}},
                 {"zero_optimization", {{"stage", stage}}}};
  if (tensor > 1) config["tensor_parallel"] = {{"autotp_size", tensor}, {"preset_model", "gpt"}};
  return Options::from_json(config.dump(), "<zero plan>");
}

Json MeasuredTask::json() const { return {{"stage", stage}, {"tensor", tensor}, {"gpt", gpt}}; }

MeasuredTask MeasuredTask::from(const Json& json) {
  MeasuredTask task;
  json.at("stage").get_to(task.stage);
  json.at("tensor").get_to(task.tensor);
  json.at("gpt").get_to(task.gpt);
  return task;
}

MeasuredText measure_models(const MeasuredModels& asked, const Global& global, std::size_t columns) {
  std::vector<Cell> cells;
  cells.reserve(asked.tensor.size() * asked.stages.size());
  for (const int tensor : asked.tensor)
    for (const int stage : asked.stages) cells.emplace_back(asked, global, tensor, stage).measure();
  const auto shape = shape_for(asked.budget);
  MeasuredText result;
  result.json = {{"machine", machine()},
                 {"budget_bytes", asked.budget},
                 {"data_parallel", asked.data},
                 {"model",
                  {{"hidden", shape.hidden},
                   {"heads", shape.heads},
                   {"sequence_tokens", shape.sequence},
                   {"vocabulary", shape.vocabulary}}},
                 {"rows", Json::array()}};
  for (const auto& cell : cells) result.json["rows"].push_back(json_of(cell));
  const auto paragraph = [&](const std::string& text) {
    std::string out;
    for (const auto& line : report::wrap(text, columns)) out += line + "\n";
    return out;
  };
  result.text =
      paragraph("Measured here: " + machine_line()) +
      paragraph(base::join("Largest GPT within ", asked.budget, " bytes a rank, ", asked.data,
                           " data-parallel ranks for each of t tensor-parallel ones, all on this machine")) +
      largest_table(cells, columns) + "\n" + paragraph("The largest size of each, and one layer more: both were run") +
      runs_table(cells, columns) +
      paragraph(base::join(
          "Table 2: its formula, and t times that. by P_t: the same with what a rank holds, cut parameters / t + whole "
          "ones. by states, by peak: trained for 3 steps in bf16 with Adam; what an engine booked at its peaks as "
          "parameters, gradients, masters and optimizer states, and for everything, with buffers and activations; the "
          "most of any rank. Ratios are to Table 2's column. GPTs of hidden ",
          shape.hidden, ", ", shape.heads, " heads, ", shape.vocabulary,
          " tokens of vocabulary, so that blocks dominate; one sample of ", shape.sequence,
          " tokens a rank, no recomputation. Sent: by rank 0 in a step."));
  return result;
}

}  // namespace zero::cli
