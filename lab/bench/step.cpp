// `zero bench step`: the time of a training step at each stage and recipe, its parts, its memory and bytes sent,
// compared with the same forward and backward without communication. Ranks are processes, and configurations alternate
// in rounds, so that changes of the machine's speed affect all equally. One rank's work is in step_rank.h, starting
// ranks in rank_processes.h.
#include <torch/version.h>
#include <zero/library.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <variant>

#include "config/batch.h"
#include "config/settings.h"
#include "lab/bench/bench.h"
#include "lab/bench/bench_gpt.h"
#include "lab/bench/bench_ranks.h"
#include "lab/bench/step_rank.h"
#include "models/hf_config.h"
#include "tools/report/text/axis_bytes.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_segments.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace step_bench {
namespace {

constexpr const char* kName = "bench step";

struct Setup {
  std::int64_t world = 0, threads = 1, steps = 20, warmup = 5, rounds = 3, batch = 1;
  std::int64_t tensor_parallel = 0, sequence_parallel = 0, segments = 0;
  report::Degrees mesh;  // of world ranks, with the configuration's degrees
  std::string stages = "0,1,2,3", recipes = "fp32,bf16", transport = "shm", device = "cpu", trace;
  bool no_compute = false;
  GptChoice choice;
  std::string llama;  // in the GPT's place
  std::int64_t parameters = 0;
  std::vector<std::string> set;
};

// One configuration's samples over all rounds, in seconds.
struct Series {
  StepTask task;
  std::string transport;
  std::vector<double> step, forward, backward, optimizer, adamw, round_medians;
  std::vector<double> alone;                // by round: a step's collectives of activations, when nothing else runs
  std::vector<std::vector<double>> losses;  // by round
  std::vector<std::uint64_t> peaks;         // by rank, the maximum over rounds
  std::int64_t elements = 0;                // of rank 0's parameters; compute alone
  double bytes_sent = 0, bytes_across = 0;  // of rank 0; across: to other hosts
  Json bytes_by_axis, operations;           // of rank 0, if ranks share samples
  Json without_others;                      // of a rank without the others: ledger and processor time
  Json memory;                              // on a GPU, of the last round
  Json trace;                               // of the first round, if requested
  std::vector<std::string> trace_lines;

  explicit Series(StepTask of) : task(std::move(of)) {}
  bool is_compute() const { return task.stage == StepTask::kCompute; }
  std::string name() const {
    return task.recipe + (is_compute() ? ", compute alone" : ", stage " + std::to_string(task.stage));
  }
  void add(const Json& result);
};

void append(std::vector<double>& all, const Json& more) {
  for (const double value : more) all.push_back(value);
}

double alone_of(const Json& operations) {
  double sum = 0;
  for (const auto& [name, row] : operations.items()) sum += row.value("alone_s", 0.0);
  return sum;
}

void Series::add(const Json& result) {
  append(step, result.at("step_s"));
  append(forward, result.at("forward_s"));
  append(backward, result.at("backward_s"));
  round_medians.push_back(quantile(result.at("step_s").get<std::vector<double>>(), 0.5));
  if (is_compute()) {
    result.at("elements").get_to(elements);
    return append(adamw, result.at("adamw_s"));
  }
  append(optimizer, result.at("optimizer_s"));
  losses.push_back(result.at("losses").get<std::vector<double>>());
  transport = result.at("transport").get<std::string>();
  bytes_sent = result.at("bytes_sent_per_step").get<double>();
  if (result.contains("operations")) bytes_by_axis = result.at("bytes_by_axis"), operations = result.at("operations");
  if (!operations.is_null()) alone.push_back(alone_of(operations));
  if (result.contains("alone")) without_others = result.at("alone");
  if (result.contains("memory")) memory = result.at("memory");
  if (result.contains("trace")) {
    trace = result.at("trace");
    result.at("trace_lines").get_to(trace_lines);
  }
  bytes_across = result.at("bytes_across_hosts_per_step").get<double>();
  const auto& found = result.at("peak_pss_bytes");
  peaks.resize(found.size());
  for (std::size_t i = 0; i < peaks.size(); ++i) peaks[i] = std::max(peaks[i], found[i].get<std::uint64_t>());
}

void declare(Command& c, Setup& s) {
  c.section("What is measured");
  c.option("--stages", s.stages, "LIST", "stages, comma-separated (0,1,2,3)");
  c.option("--recipes", s.recipes, "LIST", "fp32, bf16, fp16, comma-separated (fp32,bf16)");
  c.choice("--device", s.device, {"cpu", "cuda"}, "where the model is: the CPU, or a GPU for each rank (cpu)");
  c.option("--world", s.world, "N", "ranks, each a process (2, on GPUs 1); a launcher's are used", 1, 64);
  c.option("--threads", s.threads, "N", "threads per rank (1)", 1, 1024);
  c.option("--transport", s.transport, "NAME", "shm, gloo, or fake: one of --world ranks alone (shm); on GPUs nccl");
  c.option("--tensor-parallel", s.tensor_parallel, "T", "ranks that share one copy of the cut weights (1)", 1, 65536);
  c.option("--sequence-parallel", s.sequence_parallel, "U", "ranks that share the tokens of each sample (1)", 1, 65536);
  c.option("--segments", s.segments, "N", "checkpointed groups of layers, run again in backward (none)", 1, 1000);
  c.option("--rounds", s.rounds, "N", "rounds of every configuration, in new processes (3)", 1, 1000);
  c.option("--steps", s.steps, "N", "measured steps per round (20)", 1, 1000000);
  c.option("--warmup", s.warmup, "N", "warm-up steps (5)", 0, 1000000);
  c.flag("--no-compute", s.no_compute, "do not measure forward and backward without communication");
  c.repeated("--set", s.set, "KEY=VALUE", "set one key of the configuration");
  c.option("--trace", s.trace, "FILE", "write a trace of five more steps for ui.perfetto.dev");
  c.section("Model");
  s.choice.declare(c);
  c.option("--micro-batch-size,--batch", s.batch, "N", "samples per rank and step (1)", 1, 1 << 20);
}

// The GPT's shape; with --model of a Llama, that of its tokens. Sets what else the setup says of the model.
models::GptConfig chosen_model(const Command& command, Setup& setup) {
  const auto names = models::hf_preset_names();
  const auto& name = setup.choice.preset;
  const bool known = std::find(names.begin(), names.end(), name) != names.end();
  const auto config = known ? models::hf_preset(name).config : models::AnyConfig();
  const auto* const llama = std::get_if<models::LlamaConfig>(&config);
  if (llama == nullptr) {
    auto gpt = setup.choice.chosen(command);
    setup.parameters = gpt.num_parameters();
    return gpt;
  }
  for (const char* option :
       {"--layers", "--hidden", "--heads", "--vocabulary", "--tensor-parallel", "--sequence-parallel", "--segments"})
    if (command.given(option))
      throw ConfigError(std::string("[") + option + "] got it with --model " + name +
                        ", expected it with a GPT alone. Hint: a Llama has the sizes of `zero models " + name + "`.");
  if (!setup.no_compute)
    throw ConfigError("[--model] got " + name + ", expected --no-compute with it: compute is measured of the GPT");
  setup.llama = name;
  setup.parameters = llama->num_parameters();
  return {.layers = llama->layers,
          .hidden = llama->hidden,
          .heads = llama->heads,
          .sequence = command.given("--sequence") ? setup.choice.shape.sequence : llama->sequence,
          .vocabulary = llama->vocabulary};
}

// trace.json for one configuration; trace.bf16-stage3.json and so on for several.
void name_traces(const std::string& file, std::vector<Series>& all) {
  if (file.empty()) return;
  const auto path = std::filesystem::absolute(file);
  if (!std::filesystem::is_directory(path.parent_path()))
    throw ConfigError("[--trace] got " + file + ", expected a file in a folder that exists");
  const auto traced = std::count_if(all.begin(), all.end(), [](const Series& s) { return !s.is_compute(); });
  for (auto& series : all) {
    if (series.is_compute()) continue;
    auto name = path;
    if (traced > 1)
      name.replace_filename(path.stem().string() + "." + series.task.recipe + "-stage" +
                            std::to_string(series.task.stage) + path.extension().string());
    series.task.trace = name.string();
  }
}

std::vector<Series> configurations(const Setup& setup, const models::GptConfig& gpt) {
  std::vector<Series> all;
  const auto stages = list_of("--stages", setup.stages, {"0", "1", "2", "3"});
  for (const auto& recipe : list_of("--recipes", setup.recipes, {"fp32", "bf16", "fp16"})) {
    StepTask task{.recipe = recipe,
                  .on_gpu = setup.device == "cuda",
                  .stage = 0,
                  .steps = setup.steps,
                  .warmup = setup.warmup,
                  .batch = setup.batch,
                  .threads = setup.threads,
                  .tensor_parallel = setup.tensor_parallel,
                  .sequence_parallel = setup.sequence_parallel,
                  .segments = setup.segments,
                  .gpt = gpt,
                  .llama = setup.llama,
                  .set = setup.set,
                  .trace = {}};
    if (!setup.no_compute) {
      task.stage = StepTask::kCompute;
      all.emplace_back(task);
    }
    for (const auto& stage : stages) {
      task.stage = std::stoi(stage);
      (void)options_of(task);  // report faults before anything runs
      all.emplace_back(task);
    }
  }
  name_traces(setup.trace, all);
  return all;
}

const Series* compute_of(const std::vector<Series>& all, const std::string& recipe) {
  for (const auto& series : all)
    if (series.is_compute() && series.task.recipe == recipe) return &series;
  return nullptr;
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// Forward, backward and this rank's share of an AdamW step: the minimum for every stage. On a mesh, of the part of the
// computation that is one rank's.
double floor_of(const Series& compute) { return median(compute.step) + median(compute.adamw); }

// A step, divided by its computation and its collectives of activations, each measured by itself.
double over_parts(const Series& series, const Series& compute) {
  return median(series.step) / (floor_of(compute) + median(series.alone));
}

// Whether all stages and rounds of the recipe had the same losses.
bool equal_losses(const std::vector<Series>& all, const std::string& recipe) {
  const std::vector<double>* first = nullptr;
  for (const auto& series : all) {
    if (series.is_compute() || series.task.recipe != recipe) continue;
    for (const auto& losses : series.losses) {
      if (first == nullptr) first = &losses;
      if (losses != *first) return false;
    }
  }
  return true;
}

std::vector<std::string> recipes_of(const std::vector<Series>& all) {
  std::vector<std::string> names;
  for (const auto& series : all)
    if (names.empty() || names.back() != series.task.recipe) names.push_back(series.task.recipe);
  return names;
}

Json document_of(const Setup& setup, const models::GptConfig& gpt, const std::vector<Series>& all) {
  Json about = machine();
  about["threads_per_rank"] = setup.threads;
  about["libtorch"] = TORCH_VERSION;
  const auto options = options_of(all.back().task);  // the last task is never kCompute
  Json document = {{"schema", "zero.bench.step/1"},
                   {"machine", about},
                   {"model",
                    {{"layers", gpt.layers},
                     {"hidden", gpt.hidden},
                     {"heads", gpt.heads},
                     {"sequence_tokens", gpt.sequence},
                     {"vocabulary", gpt.vocabulary},
                     {"parameters_elements", setup.parameters}}},
                   {"device", setup.device},
                   {"world", setup.world},
                   {"transport", setup.transport},
                   {"rounds", setup.rounds},
                   {"steps", setup.steps},
                   {"warmup", setup.warmup},
                   {"micro_batch_size", setup.batch},
                   {"gradient_clipping", options.settings().gradient_clipping},
                   {"equal_losses", Json::object()},
                   {"compute", Json::array()},
                   {"runs", Json::array()}};
  if (setup.mesh.share_samples())
    document["mesh"] = {{"dp", setup.mesh.data}, {"sp", setup.mesh.sequence}, {"tp", setup.mesh.tensor}};
  if (const auto segments = segments_of(options, gpt); segments > 0) document["segments"] = segments;
  for (const auto& recipe : recipes_of(all)) document["equal_losses"][recipe] = equal_losses(all, recipe);
  for (const auto& series : all) {
    Json one = {{"recipe", series.task.recipe}};
    if (!series.is_compute()) one["stage"] = series.task.stage;
    one["step_s"] = spread_of(series.step);
    one["forward_s"] = spread_of(series.forward);
    one["backward_s"] = spread_of(series.backward);
    if (series.is_compute()) {
      one["adamw_share_s"] = spread_of(series.adamw);
      one["floor_s"] = floor_of(series);
      if (setup.mesh.share_samples()) one["parameters_elements"] = series.elements;
      one["samples"] = {{"step_s", series.step},
                        {"forward_s", series.forward},
                        {"backward_s", series.backward},
                        {"adamw_s", series.adamw}};
    } else {
      one["optimizer_s"] = spread_of(series.optimizer);
      if (const auto* compute = compute_of(all, series.task.recipe))
        one["step_over_floor"] = median(series.step) / floor_of(*compute);
      one["peak_pss_bytes"] = {{"highest", *std::max_element(series.peaks.begin(), series.peaks.end())},
                               {"by_rank", series.peaks}};
      one["bytes_sent_per_step"] = series.bytes_sent;
      one["bytes_across_hosts_per_step"] = series.bytes_across;
      if (!series.alone.empty()) {
        one["bytes_by_axis"] = series.bytes_by_axis;
        one["operations"] = series.operations;
        one["collectives_alone_s"] = median(series.alone);
        if (const auto* compute = compute_of(all, series.task.recipe))
          one["step_over_floor_and_collectives"] = over_parts(series, *compute);
      }
      if (!series.without_others.is_null()) one["alone"] = series.without_others;
      if (!series.memory.is_null()) one["memory"] = series.memory;
      if (!series.trace.is_null()) one["trace"] = series.trace;
      one["first_loss"] = series.losses[0].front();
      one["last_loss"] = series.losses[0].back();
      one["samples"] = {{"step_s", series.step},
                        {"forward_s", series.forward},
                        {"backward_s", series.backward},
                        {"optimizer_s", series.optimizer}};
    }
    one["round_medians_s"] = series.round_medians;
    document[series.is_compute() ? "compute" : "runs"].push_back(one);
  }
  return document;
}

// What ranks that share samples send; empty if none do.
std::string axes_of(const std::vector<Series>& all, const std::string& recipe, std::size_t columns) {
  using report::Align;
  report::Table axes({{recipe},
                      {"sent by ZeRO", Align::Right},
                      {"by tp", Align::Right},
                      {"by sp", Align::Right},
                      {"tp, sp alone ms", Align::Right},
                      {"/(floor + alone)", Align::Right}});
  bool any = false;
  const auto* compute = compute_of(all, recipe);
  for (const auto& series : all) {
    if (series.task.recipe != recipe || series.alone.empty()) continue;
    any = true;
    const auto sent = [&](const char* axis) {
      return report::human_bytes(static_cast<std::uint64_t>(series.bytes_by_axis.at(axis).get<double>()));
    };
    axes.row({"stage " + std::to_string(series.task.stage), sent("zero"), sent("tensor_parallel"),
              sent("sequence_parallel"), fixed(median(series.alone) * 1e3, 1),
              compute == nullptr ? "" : fixed(over_parts(series, *compute), 3)});
  }
  return any ? axes.render(columns) : "";
}

// Times, then memory and bytes sent: two tables, so that each fits a narrow terminal.
std::string tables_of(const std::vector<Series>& all, const std::string& recipe, std::size_t columns) {
  using report::Align;
  report::Table times({{recipe},
                       {"median ms", Align::Right},
                       {"min", Align::Right},
                       {"p99", Align::Right},
                       {"forward", Align::Right},
                       {"backward", Align::Right},
                       {"step()", Align::Right},
                       {"/floor", Align::Right}});
  const bool on_gpu = std::any_of(all.begin(), all.end(), [](const Series& s) { return s.task.on_gpu; });
  const auto peak_of = [&](const Series& series) {
    return on_gpu ? series.memory.at("allocated_peak_bytes").get<std::uint64_t>()
                  : *std::max_element(series.peaks.begin(), series.peaks.end());
  };
  report::Table bytes({{recipe},
                       {on_gpu ? "peak on the GPU" : "peak PSS/rank", Align::Right},
                       {"sent/step", Align::Right},
                       {"to other hosts", Align::Right},
                       {"last loss", Align::Right}});
  const auto ms = [](double s) { return fixed(s * 1e3, 1); };
  const auto* compute = compute_of(all, recipe);
  for (const auto& series : all) {
    if (series.task.recipe != recipe || series.is_compute()) continue;
    const std::string name = "stage " + std::to_string(series.task.stage);
    times.row({name, ms(median(series.step)), ms(quantile(series.step, 0)), ms(quantile(series.step, 0.99)),
               ms(median(series.forward)), ms(median(series.backward)), ms(median(series.optimizer)),
               compute == nullptr ? "" : fixed(median(series.step) / floor_of(*compute), 3)});
    bytes.row({name, report::human_bytes(peak_of(series)),
               report::human_bytes(static_cast<std::uint64_t>(series.bytes_sent)),
               series.bytes_across > 0 ? report::human_bytes(static_cast<std::uint64_t>(series.bytes_across)) : "-",
               fixed(series.losses[0].back(), 4)});
  }
  if (compute != nullptr) {
    times.row({"compute", ms(median(compute->step)), ms(quantile(compute->step, 0)), ms(quantile(compute->step, 0.99)),
               ms(median(compute->forward)), ms(median(compute->backward))});
    times.row({"+ AdamW share", ms(floor_of(*compute)), "", "", "", "", ms(median(compute->adamw)), "1"});
  }
  return times.render(columns) + bytes.render(columns) + axes_of(all, recipe, columns);
}

std::string text_of(const Setup& setup, const models::GptConfig& gpt, const std::vector<Series>& all,
                    std::size_t columns) {
  std::string text = machine_line() + "\nlibzero " ZERO_VERSION ", libtorch " TORCH_VERSION "\n";
  text += (setup.llama.empty() ? "GPT" : setup.llama) + " of " +
          report::human_count(static_cast<double>(setup.parameters)) + " parameters (" + std::to_string(gpt.layers) +
          " layers, hidden " + std::to_string(gpt.hidden) + "), " + std::to_string(setup.batch) + " x " +
          std::to_string(gpt.sequence) + " tokens a " + (setup.mesh.share_samples() ? "data-parallel rank" : "rank") +
          "\n" + std::to_string(setup.world) + " ranks (" + setup.transport + "), threads a rank " +
          std::to_string(setup.threads) + "; " + std::to_string(setup.rounds) + " rounds of " +
          std::to_string(setup.steps) + " steps after " + std::to_string(setup.warmup) + "\n";
  if (setup.mesh.share_samples()) text += "mesh " + report::degrees_text(setup.mesh) + "\n";
  if (const auto segments = segments_of(options_of(all.back().task), gpt); segments > 0)
    text +=
        std::to_string(segments) + " checkpointed segments, which run again in backward; compute has no second run\n";
  for (const auto& recipe : recipes_of(all)) {
    text += "\n" + tables_of(all, recipe, columns);
    for (const auto& series : all)
      if (series.task.recipe == recipe)
        for (const auto& line : series.trace_lines) text += series.name() + ": " + line + "\n";
    text += setup.transport == "fake"   ? "one rank without the others: losses mean nothing\n"
            : equal_losses(all, recipe) ? "losses equal in all stages and rounds\n"
                                        : "LOSSES DIFFER\n";
  }
  return text;
}

}  // namespace
}  // namespace step_bench

int bench_step(int argc, char** argv) {
  using namespace step_bench;
  Setup setup;
  setup.choice.models += "; with --no-compute also llama-15m, llama-42m, llama-110m and larger ones";
  setup.choice.shape = {.layers = 8, .hidden = 512, .heads = 8, .sequence = 128, .vocabulary = 8192};
  Command command(kName, "time, memory and traffic of a training step by stage and recipe, compared with compute alone",
                  "[options]", "  zero bench step --stages 0,3 --recipes bf16 --rounds 3 --steps 20\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  const auto gpt = chosen_model(command, setup);
  const bool on_gpu = setup.device == "cuda";
  if (on_gpu && !command.given("--transport")) setup.transport = "nccl";
  setup.transport =
      list_of("--transport", setup.transport,
              on_gpu ? std::vector<std::string>{"nccl"} : std::vector<std::string>{"shm", "gloo", "fake"})[0];
  auto all = configurations(setup, gpt);

  install_log_sink(kName, global);
  const auto own = join_ranks(command, setup.world, on_gpu ? 1 : 2, &setup.transport);
  const auto shape = config::mesh_shape(options_of(all.back().task), static_cast<int>(setup.world));
  const bool alone = setup.transport == "fake";
  for (auto& series : all) series.task.alone_of = alone ? setup.world : 0;
  setup.mesh = {shape.data, shape.sequence, shape.tensor};
  if (!setup.llama.empty() && (setup.mesh.share_samples() || segments_of(options_of(all.back().task), gpt) > 0))
    throw ConfigError("[--set] got ranks that share samples, or checkpointed layers, with --model " + setup.llama +
                      ", expected them with a GPT alone");
  const bool speaks = own->rank() == 0;
  const bool tells = speaks && log_threshold(global) <= LogLevel::Info;

  const RankProcesses ranks{.command = kName,
                            .world = alone ? 1 : setup.world,
                            .threads = setup.threads,
                            .transport = alone ? "auto" : setup.transport};
  for (std::int64_t round = 0; round < setup.rounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      Series& series = all[in_turn(round, i, all.size())];
      if (round > 0) series.task.trace.clear();
      const auto outcome =
          measure_on(own, ranks, series.task.json(), global, [&] { return measure_step(series.task, own); });
      if (outcome.exit_code != 0) return outcome.exit_code;
      series.add(outcome.result);
      if (tells)
        print_note(kName, LogLevel::Info,
                   "round " + std::to_string(round + 1) + " of " + std::to_string(setup.rounds) + ": " + series.name() +
                       ": " + fixed(series.round_medians.back() * 1e3, 1) + " ms");
    }
  }
  if (speaks) {
    if (global.json) {
      print_result(document_of(setup, gpt, all).dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    } else {
      print_result(
          text_of(setup, gpt, all, static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
    }
  }
  std::string different;
  for (const auto& recipe : recipes_of(all))
    if (!equal_losses(all, recipe)) different += (different.empty() ? "" : ", ") + recipe;
  // On a GPU some of libtorch's kernels add in a nondeterministic order (16-bit attention backward): shown, not an
  // error. What a rank without the others computes means nothing.
  if (!different.empty() && !on_gpu && !alone)
    throw InternalError("[zero bench step] got losses that differ between stages or rounds in " + different +
                        ", expected equal ones");
  return 0;
}

int bench_step_rank(int argc, char** argv) {
  using namespace step_bench;
  const auto task = RankTask::from("step-rank", argc, argv);
  const auto comm = Communicator::from_env();
  const auto result = measure_step(StepTask::from(task.task), comm);
  if (comm->rank() == 0) task.hand_over(result);
  return 0;
}

}  // namespace zero::cli
