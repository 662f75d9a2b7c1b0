// `zero plan`: estimates memory, traffic and step time of every stage, offload and checkpointing choice before a run,
// and prints the papers' tables. zero/plan.h computes the results; this file formats them as tables and JSON.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "base/log.h"
#include "config/settings.h"
#include "plan/formulas.h"
#include "plan/model.h"
#include "tools/commands.h"
#include "tools/plan/plan_options.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

using Json = nlohmann::ordered_json;
using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;
using report::Align;
using report::human_bytes;

constexpr Tier kAllTiers[] = {Tier::Device, Tier::Host, Tier::File};
constexpr const char* kExample = "\n  Example: zero plan --params 7.5e9 --world 64 --memory 32GB";

std::string underscored(std::string name) {
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

std::string short_bytes(std::uint64_t bytes) { return bytes == 0 ? "-" : human_bytes(bytes); }

const char* recipe_of(const Options& options) {
  switch (options.settings().precision) {
    case config::Precision::Bf16:
      return "bf16";
    case config::Precision::Fp16:
      return "fp16";
    case config::Precision::Fp32:
      break;
  }
  return "fp32";
}

std::string optimizer_of(const Options& options) { return planning::name(options.settings().optimizer.type); }

// --- tables -----------------------------------------------------------------------------------

report::Table table_of(const std::vector<std::string>& names, std::size_t texts) {
  std::vector<report::Column> columns;
  for (const auto& name : names) columns.push_back({name, columns.size() < texts ? Align::Left : Align::Right});
  return report::Table(std::move(columns));
}

std::vector<std::string> start_of(const Plan& plan) {
  return {std::to_string(plan.stage), plan.offload, plan.checkpointing ? "yes" : "no"};
}

std::string fits_text(const Plan& plan) {
  return plan.fits ? "yes" : "no: " + (plan.misses.empty() ? "budget" : plan.misses);
}

std::string by_purpose(const std::vector<Plan>& plans, std::size_t columns) {
  auto table = table_of({"stage", "offload", "ckpt", "params", "grads", "optim", "buffers", "activ", "peak"}, 3);
  for (const auto& plan : plans) {
    const auto peak = [&](std::initializer_list<Purpose> purposes) {
      std::uint64_t sum = 0;
      for (const auto purpose : purposes) sum += plan.memory.peak(Tier::Device, purpose);
      return short_bytes(sum);
    };
    auto row = start_of(plan);
    row.push_back(peak({Purpose::Parameters}));
    row.push_back(peak({Purpose::Gradients}));
    row.push_back(peak({Purpose::MasterParameters, Purpose::OptimizerStates}));
    row.push_back(peak({Purpose::GatherBuffers, Purpose::ReduceBuffers, Purpose::Other}));
    row.push_back(peak({Purpose::Activations}));
    row.push_back(short_bytes(plan.memory.peak(Tier::Device)));
    table.row(std::move(row));
  }
  return table.render(columns);
}

std::string by_tier(const std::vector<Plan>& plans, std::size_t columns) {
  auto table = table_of({"stage", "offload", "ckpt", "device", "host", "file", "fits", "largest", "batch"}, 3);
  for (const auto& plan : plans) {
    auto row = start_of(plan);
    for (const auto tier : kAllTiers) row.push_back(short_bytes(plan.memory.peak(tier)));
    row.push_back(fits_text(plan));
    const auto count = [](std::int64_t value, bool model) {
      return value < 0 ? std::string("-")
             : model   ? report::human_parameters(static_cast<double>(value))
                       : std::to_string(value);
    };
    row.push_back(count(plan.largest_model, true));
    row.push_back(count(plan.largest_micro_batch, false));
    table.row(std::move(row));
  }
  return table.render(columns);
}

std::string by_traffic(const std::vector<Plan>& plans, std::size_t columns) {
  const bool mesh = plans.front().tensor * plans.front().sequence * plans.front().expert > 1;
  std::vector<std::string> names{"stage", "offload", "ckpt", "sent", "volume", "PCIe", "disk", "step", "bound by"};
  if (mesh) names.insert(names.begin() + 4, "activ");
  auto table = table_of(names, 3);
  for (const auto& plan : plans) {
    auto row = start_of(plan);
    char volume[16];
    std::snprintf(volume, sizeof volume, "%.2fx", plan.traffic.volume);
    row.push_back(short_bytes(plan.traffic.sent()));
    if (mesh)
      row.push_back(
          short_bytes(plan.traffic.tensor_parallel + plan.traffic.sequence_parallel + plan.traffic.expert_parallel));
    row.push_back(plan.traffic.volume > 0 ? volume : "-");
    row.push_back(short_bytes(plan.traffic.to_host + plan.traffic.from_host));
    row.push_back(short_bytes(plan.traffic.read + plan.traffic.written));
    row.push_back(plan.time.step > 0 ? report::human_duration(plan.time.step) : "-");
    row.push_back(plan.time.bound.empty() ? "-" : plan.time.bound);
    table.row(std::move(row));
  }
  return table.render(columns);
}

std::string machine_text(const PlanMachine& machine) {
  std::string text = std::to_string(machine.world()) + (machine.world() == 1 ? " rank on " : " ranks on ") +
                     std::to_string(machine.hosts) + (machine.hosts == 1 ? " host" : " hosts") +
                     (machine.gpu ? ", a GPU each" : ", CPUs");
  const auto add = [&](std::uint64_t bytes, const char* what) {
    if (bytes > 0) text += ", " + human_bytes(bytes) + what;
  };
  add(machine.device_bytes, machine.gpu ? " each" : " a rank");
  add(machine.reserved_bytes, " of it set aside");
  add(machine.host_bytes, " of memory a host");
  add(machine.file_bytes, " of files a host");
  return text;
}

// The bytes that ZeRO compares (section 8) for one block, a rank and a micro-batch. tensor_parallel: 0 without.
struct BlockVolumes {
  double tensor_parallel = 0, zero = 0, zero_stage3 = 0;
};

BlockVolumes block_volumes_of(const PlanQuestion& question, const Plan& plan) {
  const auto& model = question.model;
  const double element = question.options.settings().precision == config::Precision::Fp32 ? 4 : 2;
  double numel = 0;
  for (const auto& parameter : planning::parameters_of(model))
    if (parameter.unit == "blocks.0") numel += static_cast<double>(parameter.numel);
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const planning::Transformer shape{.layers = number(model.layers),
                                    .hidden = number(model.hidden),
                                    .heads = number(model.heads),
                                    .sequence = number(model.sequence) / plan.sequence,
                                    .batch = number(plan.micro_batch)};
  return {.tensor_parallel = planning::tensor_parallel_bytes_of_layer(shape, element, plan.tensor),
          .zero = planning::zero_bytes_of_layer(2, numel * element, plan.tensor),
          .zero_stage3 = planning::zero_bytes_of_layer(3, numel * element, plan.tensor)};
}

// What the degrees of parallelism make of the model. One rank without tensor parallelism has all of it.
std::string mesh_text(const PlanQuestion& question, const Plan& plan) {
  if (plan.tensor * plan.sequence == 1) return "";
  const auto& model = question.model;
  const auto micro_batches = plan.accumulation;
  char text[160];
  std::snprintf(text, sizeof text, "mesh     %d dp x %d sp x %d tp; ZeRO shards over %d ranks", plan.data,
                plan.sequence, plan.tensor, plan.data * plan.sequence);
  std::string out = text;
  if (plan.tensor > 1) {
    const auto all = model.num_parameters();
    std::snprintf(text, sizeof text, " %s of %s parameters a rank: 1/%.2f",
                  report::human_parameters(static_cast<double>(plan.parameters)).c_str(),
                  report::human_parameters(static_cast<double>(all)).c_str(),
                  static_cast<double>(all) / static_cast<double>(plan.parameters));
    out += "," + std::string(text);
  }
  out += "\n";
  const auto each = [&](const char* name, std::uint64_t bytes) {
    return std::string(name) + " " + human_bytes(bytes / static_cast<std::uint64_t>(micro_batches));
  };
  out += "         a rank sends in a micro-batch:";
  if (plan.tensor > 1) out += each(" tensor parallelism", plan.traffic.tensor_parallel);
  if (plan.sequence > 1)
    out += each(plan.tensor > 1 ? ", sequence parallelism" : " sequence parallelism", plan.traffic.sequence_parallel);
  out += each(", ZeRO", plan.traffic.gathered + plan.traffic.reduced) + " (stage " + std::to_string(plan.stage) + ")\n";
  if (plan.tensor == 1) return out;
  const auto block = block_volumes_of(question, plan);
  const auto bytes = [](double value) { return human_bytes(static_cast<std::uint64_t>(value)); };
  return out + "         of a block, with recomputation: 12*B*(t-1)/t = " + bytes(block.tensor_parallel) +
         "; ZeRO 2*P/t = " + bytes(block.zero) + ", stage 3 3*P/t = " + bytes(block.zero_stage3) + "\n";
}

// What experts make of the model, and their bytes.
std::string experts_text(const PlanQuestion& question, const Plan& plan) {
  const auto& model = question.model;
  const auto& experts = model.experts;
  if (experts.count == 0) return "";
  const auto count = [](std::int64_t parameters) { return report::human_parameters(static_cast<double>(parameters)); };
  std::string out = "experts  " + std::to_string(experts.count) + " in each of " +
                    std::to_string(planning::expert_layers(model)) + " layers, " + std::to_string(experts.k) +
                    " for a token, which computes with " + count(model.num_active_parameters()) + " of " +
                    count(model.num_parameters()) + " parameters\n";
  if (plan.expert == 1) return out;
  const int ranks = plan.data * plan.sequence;
  return out + "         " + std::to_string(experts.count / plan.expert) + " on each of " +
         std::to_string(plan.expert) + " ranks, their states sharded over " + std::to_string(ranks / plan.expert) +
         " of " + std::to_string(ranks) + "; " + count(plan.parameters) + " parameters a rank\n" +
         "         a rank sends in a micro-batch, if all are chosen equally often: " +
         human_bytes(plan.traffic.expert_parallel / static_cast<std::uint64_t>(plan.accumulation)) + "\n";
}

// The given configuration, unchanged.
std::string configured_text(const Plan& plan) {
  std::string text =
      "given    stage " + std::to_string(plan.stage) + ", device " + human_bytes(plan.memory.peak(Tier::Device));
  for (const auto tier : {Tier::Host, Tier::File})
    if (plan.memory.peak(tier) > 0)
      text += std::string(", ") + MemoryReport::name(tier) + " " + human_bytes(plan.memory.peak(tier));
  if (plan.checkpointing) text += ", activation checkpointing";
  if (plan.time.step > 0) text += ", step " + report::human_duration(plan.time.step);
  if (!plan.refusal.empty()) return text + "; refused: " + plan.refusal + "\n";
  return text + (plan.fits ? "; fits\n" : "; does not fit: " + plan.misses + "\n");
}

std::string what_it_is(const Plan& plan) {
  return "stage " + std::to_string(plan.stage) +
         (plan.offload == "none" ? ", no offload" : ", offload " + plan.offload) +
         (plan.checkpointing ? ", activation checkpointing" : "") + ", micro-batch " + std::to_string(plan.micro_batch);
}

std::string text_of(const PlanQuestion& question, const std::vector<Plan>& plans, int best,
                    const std::optional<Plan>& configured, std::size_t columns) {
  const auto& model = question.model;
  std::string out = "model    " + (model.name.empty() ? std::string() : model.name + ": ") +
                    report::human_parameters(static_cast<double>(model.num_parameters())) + " parameters, " +
                    std::to_string(model.layers) + " layers, hidden " + std::to_string(model.hidden) + ", sequence " +
                    std::to_string(model.sequence) + "\n";
  out += std::string("recipe   ") + recipe_of(question.options) + ", " + optimizer_of(question.options) +
         ", micro-batch " + std::to_string(plans.front().micro_batch) + " x " +
         std::to_string(plans.front().accumulation) + " x " + std::to_string(plans.front().data) + "\n";
  out += mesh_text(question, plans.front()) + experts_text(question, plans.front());
  out += "machine  " + machine_text(question.machine) + "\n";
  if (configured) out += configured_text(*configured);
  out += "\nPeak bytes of one rank's device, by purpose\n" + by_purpose(plans, columns);
  out += "\nPeak bytes by tier; the largest model and micro-batch that would fit\n" + by_tier(plans, columns);
  out += "\nOne step: bytes a rank sends, over PCIe and of files; predicted time\n" + by_traffic(plans, columns);
  if (best >= 0)
    out += "\nrecommended: " + what_it_is(plans[static_cast<std::size_t>(best)]) + "\n" +
           plans[static_cast<std::size_t>(best)].memory.table();
  else
    out +=
        "\nNothing fits. Hint: more ranks, a smaller micro-batch, --host-memory or --nvme for offload, or a smaller "
        "model.\n";
  return out;
}

// --- JSON -------------------------------------------------------------------------------------

Json json_of(const Plan& plan) {
  Json json = {{"stage", plan.stage},
               {"offload", plan.offload},
               {"activation_checkpointing", plan.checkpointing},
               {"mesh", {{"dp", plan.data}, {"sp", plan.sequence}, {"tp", plan.tensor}, {"ep", plan.expert}}},
               {"parameters_per_rank", plan.parameters},
               {"micro_batch_size", plan.micro_batch},
               {"accumulation_steps", plan.accumulation},
               {"fits", plan.fits}};
  if (!plan.fits) json["misses"] = plan.misses.empty() ? "budget" : plan.misses;
  if (!plan.refusal.empty()) json["refusal"] = plan.refusal;
  for (const auto tier : kAllTiers) {
    auto& at = json["memory"][MemoryReport::name(tier)];
    at["rest_bytes"] = plan.memory.current(tier);
    at["peak_bytes"] = plan.memory.peak(tier);
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      const auto purpose = static_cast<Purpose>(p);
      const auto name = underscored(MemoryReport::name(purpose));
      if (plan.memory.peak(tier, purpose) == 0) continue;
      at[name] = {{"rest_bytes", plan.memory.current(tier, purpose)}, {"peak_bytes", plan.memory.peak(tier, purpose)}};
    }
  }
  const auto known = [](std::int64_t value) { return value < 0 ? Json(nullptr) : Json(value); };
  json["largest_model_parameters"] = known(plan.largest_model);
  json["largest_micro_batch_size"] = known(plan.largest_micro_batch);
  json["traffic"] = {{"sent_bytes", plan.traffic.sent()},
                     {"gathered_bytes", plan.traffic.gathered},
                     {"reduced_bytes", plan.traffic.reduced},
                     {"tensor_parallel_bytes", plan.traffic.tensor_parallel},
                     {"sequence_parallel_bytes", plan.traffic.sequence_parallel},
                     {"expert_parallel_bytes", plan.traffic.expert_parallel},
                     {"across_hosts_bytes", plan.traffic.across_hosts},
                     {"volume", plan.traffic.volume},
                     {"to_host_bytes", plan.traffic.to_host},
                     {"from_host_bytes", plan.traffic.from_host},
                     {"read_bytes", plan.traffic.read},
                     {"written_bytes", plan.traffic.written}};
  if (plan.time.step > 0)
    json["time"] = {{"step_s", plan.time.step},      {"compute_s", plan.time.compute}, {"network_s", plan.time.network},
                    {"pcie_s", plan.time.host_link}, {"disk_s", plan.time.disk},       {"update_s", plan.time.update},
                    {"other_s", plan.time.other},    {"bound", plan.time.bound}};
  return json;
}

Json document_of(const PlanQuestion& question, const std::vector<Plan>& plans, int best,
                 const std::optional<Plan>& configured, const std::string& config) {
  const auto& model = question.model;
  const auto& machine = question.machine;
  Json json = {{"schema", "zero.plan/1"}};
  json["model"] = {{"name", model.name.empty() ? Json(nullptr) : Json(model.name)},
                   {"parameters", model.num_parameters()},
                   {"active_parameters", model.num_active_parameters()},
                   {"layers", model.layers},
                   {"hidden", model.hidden},
                   {"heads", model.heads},
                   {"sequence", model.sequence},
                   {"vocabulary", model.vocabulary}};
  if (model.experts.count > 0)
    json["model"]["experts"] = {{"num_experts", model.experts.count},
                                {"layers", planning::expert_layers(model)},
                                {"k", model.experts.k},
                                {"ep_size", model.experts.ep_size}};
  json["recipe"] = recipe_of(question.options);
  json["optimizer"] = optimizer_of(question.options);
  json["machine"] = {{"world", machine.world()},
                     {"hosts", machine.hosts},
                     {"ranks_per_host", machine.ranks_per_host},
                     {"device", machine.gpu ? "cuda" : "cpu"},
                     {"device_bytes", machine.device_bytes},
                     {"reserved_bytes", machine.reserved_bytes},
                     {"host_bytes", machine.host_bytes},
                     {"file_bytes", machine.file_bytes},
                     {"profile", machine.profile.name}};
  if (configured) json["configured"] = json_of(*configured);
  if (plans.front().tensor > 1) {
    const auto block = block_volumes_of(question, plans.front());
    json["block_volumes"] = {{"tensor_parallel_bytes", block.tensor_parallel},
                             {"zero_bytes", block.zero},
                             {"zero_stage3_bytes", block.zero_stage3}};
  }
  json["plans"] = Json::array();
  for (const auto& plan : plans) json["plans"].push_back(json_of(plan));
  json["recommended"] = best < 0 ? Json(nullptr) : Json(best);
  if (best >= 0) json["config"] = Json::parse(config);
  return json;
}

// --- papers -----------------------------------------------------------------------------------

// Whether the column names do not fit into one line.
bool too_wide(const PaperTable& paper, std::size_t columns) {
  std::size_t total = 0;
  for (std::size_t c = 0; c < paper.header.size(); ++c) {
    auto width = paper.header[c].size();
    for (const auto& row : paper.rows) width = std::max(width, row[c].size());
    total += width + 2;
  }
  return total > columns + 2;
}

int print_papers(const std::string& name, bool json, std::size_t columns, const std::optional<MeasuredText>& measured) {
  const auto names = name == "all" ? paper_names() : std::vector<std::string>{name};
  std::string out;
  Json document = {{"schema", "zero.plan.paper/1"}, {"tables", Json::array()}};
  for (const auto& each : names) {
    std::vector<PaperTable> tables;
    try {
      tables = paper_tables(each);
    } catch (const ConfigError&) {
      const auto near = nearest_name(each, paper_names());
      std::string all;
      for (const auto& known : paper_names()) all += known + ", ";
      throw ConfigError("[--paper] got \"" + each.substr(0, 40) + "\", expected one of " + all + "all" +
                        (near.empty() ? "" : ". Hint: did you mean \"" + near + "\"?") +
                        "\n  Example: zero plan --paper table1");
    }
    for (const auto& paper : tables) {
      document["tables"].push_back({{"name", paper.name},
                                    {"title", paper.title},
                                    {"header", paper.header},
                                    {"rows", paper.rows},
                                    {"notes", paper.notes}});
      // Names are wrapped between words; numbers are never cut.
      std::vector<report::Column> all;
      for (std::size_t c = 0; c < paper.header.size(); ++c) {
        const bool number = !paper.rows.empty() && c > 0 && paper.rows[0][c].find_first_of("0123456789") == 0;
        auto name = paper.header[c];
        if (const auto space = name.find(' '); number && too_wide(paper, columns) && space != std::string::npos)
          name[space] = '\n';
        all.push_back({name, number ? Align::Right : Align::Left, report::Column::Narrow::Wrap,
                       number ? std::size_t{5} : std::size_t{10}});
      }
      report::Table table(std::move(all));
      for (const auto& row : paper.rows) table.row(row);
      for (const auto& line : report::wrap(paper.title, columns)) out += line + "\n";
      out += table.render(columns);
      for (const auto& note : paper.notes)
        for (const auto& line : report::wrap(note, columns)) out += line + "\n";
      out += "\n";
    }
  }
  if (json) {
    if (measured) document["measured"] = measured->json;
    print_result(document.dump(2) + "\n");
  } else {
    out.pop_back();
    if (measured) out += "\n" + measured->text;
    print_result(out);
  }
  return 0;
}

}  // namespace
}  // namespace zero::cli

int zero_plan(int argc, char** argv) {
  using namespace zero;
  using namespace zero::cli;
  PlanArguments arguments;
  Command command("plan", "bytes, traffic and time of every stage and offload, before anything is started",
                  "[CONFIG.json] [--params P | --model NAME | --layers N --hidden N] [options]",
                  "  zero plan --params 7.5e9 --world 64 --memory 32GB\n"
                  "  zero plan --model gpt2-xl --world 4 --memory 24GB --host-memory 128GB --write ds.json\n");
  declare_plan(command, arguments);
  PlanQuestion question;
  std::optional<MeasuredModels> asked;
  try {
    if (!command.parse(argc, argv)) return 0;
    if (arguments.measure || !arguments.budget.empty() || command.given("--data-parallel"))
      asked = measured_of(command, arguments);
    if (arguments.paper.empty()) question = question_of(command, arguments);
  } catch (const ConfigError& error) {
    throw ConfigError(error.what() + std::string(kExample), error.code());
  }
  const auto columns = static_cast<std::size_t>(report::describe_terminal(1, command.global().color).columns);
  if (!arguments.paper.empty()) {
    std::optional<MeasuredText> measured;
    if (asked) measured = measure_models(*asked, command.global(), columns);
    return print_papers(arguments.paper, command.global().json, columns, measured);
  }

  const auto plans = plan_all(question.model, question.options, question.machine, question.choices);
  const int best = cheapest(plans);
  std::optional<Plan> configured;
  if (question.from_file) configured = plan(question.model, question.options, question.machine);
  if (!plans.empty())
    for (const auto& notice : plans.front().notices) base::log(LogLevel::Warning, notice);
  std::string config;
  if (best >= 0)
    config = plan_config(question.model, question.options, plans[static_cast<std::size_t>(best)], arguments.nvme_path);
  if (best >= 0 && !arguments.write.empty()) {
    std::ofstream file(arguments.write, std::ios::binary);
    file << config;
    file.close();
    if (!file) throw IoError("[--write] got no file " + arguments.write + ", expected one that can be written");
  }
  print_result(command.global().json ? document_of(question, plans, best, configured, config).dump(2) + "\n"
                                     : text_of(question, plans, best, configured, columns));
  if (best < 0)
    print_note(
        "plan", LogLevel::Warning,
        "nothing fits" + std::string(arguments.write.empty() ? "" : "; " + arguments.write + " was not written"));
  return best < 0 ? static_cast<int>(ExitCode::kOutOfMemory) : 0;
}
