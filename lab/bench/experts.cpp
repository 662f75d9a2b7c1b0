// `zero bench experts`: the time of a training step of layers with experts, by stage, recipe and number of
// expert-parallel ranks, and the bytes that it sends, compared with the formula. Ranks are processes, and
// configurations alternate in rounds. One rank's work is in experts_rank.h.
#include <torch/version.h>
#include <zero/library.h>

#include <algorithm>
#include <cmath>

#include "lab/bench/bench.h"
#include "lab/bench/bench_ranks.h"
#include "lab/bench/experts_rank.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace experts_bench {
namespace {

constexpr const char* kName = "bench experts";

struct Setup {
  ExpertsTask task;  // of all configurations, but stage, recipe and ep
  std::int64_t world = 2, rounds = 3;
  std::string stages = "1,2,3", recipes = "fp32,bf16", transport = "shm", ep = "1,2";
  bool no_drop = false;
};

// One configuration's results over all rounds.
struct Series {
  ExpertsTask task;
  Json last;  // all but the times are the same in every round
  std::vector<double> step, forward, backward, optimizer, floor, round_medians;
  std::vector<std::vector<double>> losses;
  std::int64_t peak = 0;

  void add(const Json& result) {
    const auto append = [&](std::vector<double>& all, const char* name) {
      for (const double value : result.at(name)) all.push_back(value);
    };
    append(step, "step_s");
    append(forward, "forward_s");
    append(backward, "backward_s");
    append(optimizer, "optimizer_s");
    append(floor, "floor_s");
    round_medians.push_back(quantile(result.at("step_s").get<std::vector<double>>(), 0.5));
    losses.push_back(result.at("losses").get<std::vector<double>>());
    for (const std::int64_t one : result.at("peak_pss_bytes")) peak = std::max(peak, one);
    last = result;
  }
  std::string name() const {
    return task.recipe + ", stage " + std::to_string(task.stage) + ", ep " + std::to_string(task.ep);
  }
  double number(const char* field) const { return last.at(field).get<double>(); }
  bool as_formula() const { return number("exchanged_bytes_per_step") == number("formula_bytes_per_step"); }
};

void declare(Command& c, Setup& s) {
  auto& t = s.task;
  c.section("What is measured");
  c.option("--stages", s.stages, "LIST", "stages, comma-separated (1,2,3)");
  c.option("--recipes", s.recipes, "LIST", "fp32, bf16, comma-separated (fp32,bf16)");
  c.option("--ep-world-size,--ep", s.ep, "LIST", "expert-parallel ranks, comma-separated (1,2)");
  c.option("--world", s.world, "N", "ranks, each a process (2); a launcher's are used", 1, 64);
  c.option("--threads", t.threads, "N", "threads per rank (1)", 1, 1024);
  c.option("--transport", s.transport, "NAME", "shm or gloo (shm)");
  c.option("--rounds", s.rounds, "N", "rounds of every configuration, in new processes (3)", 1, 1000);
  c.option("--steps", t.steps, "N", "measured steps per round (20)", 1, 1000000);
  c.option("--warmup", t.warmup, "N", "warm-up steps (5)", 0, 1000000);
  c.section("Model");
  c.option("--layers", t.layers, "N", "layers with experts (2)", 1, 1000);
  c.option("--hidden", t.hidden, "N", "width of tokens (256)", 1, 1 << 20);
  c.option("--inner", t.inner, "N", "width of an expert; 0: the identity, for gate and exchange alone (4 x hidden)", 0,
           1 << 22);
  c.option("--num-experts", t.experts, "N", "experts of a layer (8)", 1, 65536);
  c.option("--top-k", t.top_k, "N", "experts of a token (1)", 1, 65536);
  c.option("--tokens", t.tokens, "N", "tokens per rank and step (1024)", 1, 1 << 24);
  c.option("--capacity-factor", t.capacity_factor, "X", "share of the tokens that an expert takes, over the mean (1)",
           1e-3, 1e6);
  c.flag("--no-drop", s.no_drop, "experts take all their tokens");
  c.option("--skew", t.skew, "X", "4 X is added to expert 0's logits: 0 uniform, 1 most tokens choose it (0)", 0, 100);
  c.flag("--merged-batches", t.merged, "one call of an expert for the tokens of all ranks");
}

std::vector<std::int64_t> numbers_of(const char* option, const std::string& text) {
  std::vector<std::int64_t> numbers;
  for (const auto& part : parts_of(text)) {
    if (part.empty() || part.size() > 5 || part.find_first_not_of("0123456789") != std::string::npos || part == "0")
      throw ConfigError(std::string("[") + option + "] got \"" + text +
                        "\", expected whole numbers of at least 1 with commas between");
    numbers.push_back(std::stoll(part));
  }
  return numbers;
}

std::vector<Series> configurations(Setup& setup) {
  std::vector<Series> all;
  std::string faults;
  auto task = setup.task;
  if (task.top_k > task.experts)
    faults += "\n  --top-k: got " + std::to_string(task.top_k) + ", expected at most --num-experts " +
              std::to_string(task.experts);
  const auto degrees = numbers_of("--ep-world-size", setup.ep);
  for (const auto ep : degrees)
    if (setup.world % ep != 0 || task.experts % ep != 0)
      faults += "\n  --ep-world-size: got " + std::to_string(ep) + ", expected a divisor of " +
                std::to_string(setup.world) + " ranks and of " + std::to_string(task.experts) + " experts";
  if (!faults.empty()) throw ConfigError("[zero bench experts] these options do not fit together:" + faults);
  for (const auto& recipe : list_of("--recipes", setup.recipes, {"fp32", "bf16"}))
    for (const auto& stage : list_of("--stages", setup.stages, {"0", "1", "2", "3"}))
      for (const auto ep : degrees) {
        task.recipe = recipe, task.stage = std::stoll(stage), task.ep = ep;
        all.emplace_back().task = task;
      }
  return all;
}

// All stages and rounds of a recipe and degree have the same losses, in every bit.
std::string different_losses(const std::vector<Series>& all) {
  std::string names;
  for (const auto& series : all)
    for (const auto& other : all)
      if (series.task.recipe == other.task.recipe && series.task.ep == other.task.ep)
        for (const auto& losses : series.losses)
          if (losses != other.losses.front() && names.find(series.name()) == std::string::npos)
            names += (names.empty() ? "" : "; ") + series.name();
  return names;
}

Json document_of(const Setup& setup, const std::vector<Series>& all) {
  Json about = machine();
  about["threads_per_rank"] = setup.task.threads;
  Json document = {{"schema", "zero.bench.experts/1"},
                   {"machine", about},
                   {"model", setup.task.json()},
                   {"world", setup.world},
                   {"transport", setup.transport},
                   {"rounds", setup.rounds},
                   {"equal_losses", different_losses(all).empty()},
                   {"runs", Json::array()}};
  for (const auto* field : {"recipe", "stage", "ep"}) document["model"].erase(field);
  for (const auto& series : all) {
    Json run = {{"recipe", series.task.recipe},
                {"stage", series.task.stage},
                {"ep", series.task.ep},
                {"step_s", spread_of(series.step)},
                {"forward_s", spread_of(series.forward)},
                {"backward_s", spread_of(series.backward)},
                {"optimizer_s", spread_of(series.optimizer)},
                {"round_medians_s", series.round_medians},
                {"samples", {{"step_s", series.step}, {"floor_s", series.floor}}},
                {"peak_pss_bytes", series.peak},
                {"last_loss", series.losses.front().back()}};
    if (!series.floor.empty()) {
      run["floor_s"] = spread_of(series.floor);
      run["step_over_floor"] = quantile(series.step, 0.5) / quantile(series.floor, 0.5);
    }
    for (const auto* field :
         {"bytes_sent_per_step", "exchanged_bytes_per_step", "formula_bytes_per_step", "dropped", "load"})
      run[field] = series.last.at(field);
    document["runs"].push_back(run);
  }
  return document;
}

std::string text_of(const Setup& setup, const std::vector<Series>& all, std::size_t columns) {
  using report::Align;
  const auto& t = setup.task;
  const auto count = [](std::int64_t n) { return std::to_string(n); };
  report::Table times({{"experts"},
                       {"median ms", Align::Right},
                       {"min", Align::Right},
                       {"p99", Align::Right},
                       {"forward", Align::Right},
                       {"backward", Align::Right},
                       {"step()", Align::Right},
                       {"/floor", Align::Right}});
  report::Table bytes({{"all ranks"},
                       {"all-to-all/step", Align::Right},
                       {"formula", Align::Right},
                       {"sent/step", Align::Right},
                       {"dropped", Align::Right},
                       {"max/mean load", Align::Right},
                       {"peak PSS/rank", Align::Right},
                       {"last loss", Align::Right}});
  const auto ms = [](double s) { return fixed(s * 1e3, 2); };
  const auto size = [](double value) { return report::human_bytes(static_cast<std::uint64_t>(value)); };
  for (const auto& s : all) {
    times.row({s.name(), ms(quantile(s.step, 0.5)), ms(quantile(s.step, 0)), ms(quantile(s.step, 0.99)),
               ms(quantile(s.forward, 0.5)), ms(quantile(s.backward, 0.5)), ms(quantile(s.optimizer, 0.5)),
               s.floor.empty() ? "" : fixed(quantile(s.step, 0.5) / quantile(s.floor, 0.5), 2)});
    bytes.row({s.name(), size(s.number("exchanged_bytes_per_step")), s.as_formula() ? "equal" : "DIFFERENT",
               size(s.number("bytes_sent_per_step")), fixed(s.number("dropped") * 100, 1) + " %",
               fixed(s.number("load"), 2), size(static_cast<double>(s.peak)), fixed(s.losses[0].back(), 4)});
  }
  return machine_line() + "\nlibzero " ZERO_VERSION ", libtorch " TORCH_VERSION "\n" + count(t.layers) +
         (t.layers == 1 ? " layer of " : " layers of ") + count(t.experts) + " experts (hidden " + count(t.hidden) +
         ", inner " + count(t.inner) + "), k " + count(t.top_k) + ", " + count(t.tokens) + " tokens a rank\n" +
         count(setup.world) + " ranks (" + setup.transport + "), threads a rank " + count(t.threads) + "; " +
         count(setup.rounds) + " rounds of " + count(t.steps) + " steps after " + count(t.warmup) + "\n\n" +
         times.render(columns) + bytes.render(columns) +
         (different_losses(all).empty() ? "losses equal in all stages and rounds\n" : "LOSSES DIFFER\n");
}

}  // namespace
}  // namespace experts_bench

int bench_experts(int argc, char** argv) {
  using namespace experts_bench;
  Setup setup;
  Command command(kName, "time and traffic of a training step of layers with experts, by expert-parallel ranks",
                  "[options]",
                  "  zero bench experts --ep 1,2 --stages 1,3 --recipes bf16 --num-experts 64 --top-k 2\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  if (!command.given("--inner")) setup.task.inner = 4 * setup.task.hidden;
  setup.task.drop = !setup.no_drop;
  setup.transport = list_of("--transport", setup.transport, {"shm", "gloo"})[0];
  install_log_sink(kName, global);
  const auto own = join_ranks(command, setup.world, 2, &setup.transport);
  if (!command.given("--ep-world-size")) setup.ep = setup.world % 2 == 0 ? "1,2" : "1";
  auto all = configurations(setup);
  const bool speaks = own->rank() == 0;
  const RankProcesses ranks{
      .command = kName, .world = setup.world, .threads = setup.task.threads, .transport = setup.transport};
  for (std::int64_t round = 0; round < setup.rounds; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto& series = all[in_turn(round, i, all.size())];
      const auto outcome =
          measure_on(own, ranks, series.task.json(), global, [&] { return measure_experts(series.task, own); });
      if (outcome.exit_code != 0) return outcome.exit_code;
      series.add(outcome.result);
      if (speaks && log_threshold(global) <= LogLevel::Info)
        print_note(kName, LogLevel::Info,
                   "round " + std::to_string(round + 1) + " of " + std::to_string(setup.rounds) + ": " + series.name() +
                       ": " + fixed(series.round_medians.back() * 1e3, 1) + " ms");
    }
  if (speaks)
    print_result(global.json ? document_of(setup, all).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                             : text_of(setup, all,
                                       static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  std::string faults = different_losses(all);
  if (!faults.empty()) faults = "got losses that differ between stages or rounds in " + faults;
  for (const auto& series : all)
    if (!series.as_formula())
      faults += (faults.empty() ? "got " : "; ") + fixed(series.number("exchanged_bytes_per_step"), 0) +
                " bytes a step in all-to-alls, expected " + fixed(series.number("formula_bytes_per_step"), 0) +
                ", in " + series.name();
  if (!faults.empty()) throw InternalError("[zero bench experts] " + faults);
  return 0;
}

int bench_experts_rank(int argc, char** argv) {
  using namespace experts_bench;
  const auto task = RankTask::from("experts-rank", argc, argv);
  const auto comm = Communicator::from_env();
  const auto result = measure_experts(ExpertsTask::from(task.task), comm);
  if (comm->rank() == 0) task.hand_over(result);
  return 0;
}

}  // namespace zero::cli
