// See gpt_runs.h.
#include "lab/reproduce/gpt_runs.h"

#include <zero/errors.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/check.h"
#include "plan/formulas.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_plan.h"

namespace zero::cli {

std::int64_t GptRun::parameters() const {
  PlanModel model;
  model.layers = gpt.layers, model.hidden = gpt.hidden, model.heads = gpt.heads;
  model.sequence = gpt.sequence, model.vocabulary = gpt.vocabulary;
  return model.num_parameters();
}

Json GptRun::config(const std::string& files) const {
  Json config = {{"train_micro_batch_size_per_gpu", batch},
                 {"gradient_clipping", 1.0},
                 {"memory_breakdown", true},
                 {"steps_per_print", 1},
                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", lr}, {"weight_decay", 0.01}}}}},
                 {"zero_optimization", {{"stage", stage}}},
                 {"libzero",
                  {{"model",
                    {{"layers", gpt.layers},
                     {"hidden", gpt.hidden},
                     {"heads", gpt.heads},
                     {"seq_length", gpt.sequence},
                     {"vocabulary", gpt.vocabulary}}},
                   {"data", {{"eval_batches", 1}}}}}};
  if (recipe != "fp32") config[recipe]["enabled"] = true;
  if (checkpoints) config["activation_checkpointing"]["number_checkpoints"] = gpt.layers;
  if (device_budget > 0) {
    config["memory"] = {{"device", device_budget}, {"host", host_budget}};
    if (reserves) {
      auto free = *this;
      free.device_budget = 0;
      const auto needed =
          plan_of(free, files).memory.peak(MemoryReport::Tier::Device, MemoryReport::Purpose::Activations);
      config["memory"]["activations"] = std::llround(1.25 * static_cast<double>(needed));
    }
    if (file_budget > 0) config["memory"].update({{"file", file_budget}, {"nvme_path", files}});
  }
  config.merge_patch(more);
  return config;
}

double Trained::median_step_s() const {
  std::vector<double> all;
  for (const auto& step : steps)
    if (step.contains("step_ms")) all.push_back(step.at("step_ms").get<double>() / 1e3);
  if (all.size() > 1) all.erase(all.begin());
  return all.empty() ? 0 : quantile(all, 0.5);
}

Trained train(Study& study, const std::string& label, const GptRun& run, bool may_be_refused) {
  namespace fs = std::filesystem;
  const auto folder = fs::path(study.folder) / label;
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  fs::create_directories(folder);
  const auto file = (folder / "config.json").string(), out = (folder / "run").string();
  std::ofstream(file) << run.config(folder.string()).dump(2) << "\n";
  std::vector<std::string> words{"train",    file, "--json", "--quiet", "--steps", std::to_string(run.steps),
                                 "--sample", "0",  "--out",  out};
  if (!study.text.empty()) words.insert(words.end(), {"--text", study.text});
  auto trial = study.trials.run(label, {words, run.ranks, 1}, may_be_refused);
  Trained trained;
  trained.refused = trial.refused(), trained.reason = std::move(trial.reason);
  trained.seconds = trial.seconds, trained.cpu_seconds = trial.cpu_seconds;
  if (trained.refused) return trained;
  for (auto& line : json_lines(trial.out))
    if (line.contains("loss")) trained.steps.push_back(std::move(line));
  std::ifstream in(fs::path(out) / "result.json");
  trained.result = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!trained.result.is_object() || static_cast<std::int64_t>(trained.steps.size()) != run.steps)
    throw InternalError(base::join("[zero reproduce] got ", trained.steps.size(), " steps and ",
                                   trained.result.is_object() ? "" : "no ", "result.json in ", out, ", expected ",
                                   run.steps, " steps and a result"));
  return trained;
}

Plan plan_of(const GptRun& run, const std::string& files, std::uint64_t device_bytes) {
  const auto options = Options::from_json(run.config(files).dump(), "<zero reproduce>");
  PlanMachine machine;
  machine.ranks_per_host = run.ranks, machine.gpu = false, machine.shared_memory = run.ranks > 1;
  machine.device_bytes = device_bytes;
  return plan(with_gpt_pass(PlanModel::of_options(options)), options, machine);
}

bool fits_by_plan(const GptRun& run, const std::string& files) { return plan_of(run, files).refusal.empty(); }

Largest find_largest(Study& study, const std::string& label, GptRun run, std::int64_t most) {
  Largest found;
  const auto sized = [&](std::int64_t layers) {
    auto one = run;
    one.gpt.layers = layers;
    return one;
  };
  found.planned_layers =
      largest_whole(most, [&](std::int64_t layers) { return fits_by_plan(sized(layers), study.folder); });
  // Usually the planned size is trained and the next one refused; else the search continues by training.
  std::int64_t good = 0, bad = 0, stride = 1;
  for (auto next = std::max<std::int64_t>(1, found.planned_layers); bad - good != 1;) {
    auto trained = train(study, label + "-" + std::to_string(next) + "-layers", sized(next), /*may_be_refused=*/true);
    if (trained.refused) {
      bad = next;
      found.refusal = std::move(trained.reason);
      next = good > 0 ? good + (bad - good) / 2 : std::max<std::int64_t>(1, bad - std::exchange(stride, 2 * stride));
    } else {
      good = next;
      found.trained = std::move(trained);
      next = bad == 0 ? good + std::exchange(stride, 2 * stride) : good + (bad - good) / 2;
    }
    if (bad == 1) break;  // nothing fits
  }
  found.layers = good;
  found.parameters = good == 0 ? 0 : sized(good).parameters();
  found.next_parameters = sized(good + 1).parameters();
  return found;
}

std::string megabytes(double bytes) { return fixed(bytes / 1e6, 2); }

std::string shape_text(const models::GptConfig& gpt) {
  return base::join(gpt.layers, " layers, hidden ", gpt.hidden, ", ", gpt.heads, " heads, sequence ", gpt.sequence,
                    ", vocabulary ", gpt.vocabulary);
}

double bytes_per_parameter(const std::string& recipe, int stage, double ranks) {
  constexpr planning::StateWidths kSingleAdam{4, 4, 8};
  return planning::state_bytes(recipe == "fp32" ? kSingleAdam : planning::kMixedAdam, stage, 1, ranks);
}

}  // namespace zero::cli
