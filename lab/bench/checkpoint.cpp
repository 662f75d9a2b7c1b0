// `zero bench checkpoint`: the time, memory and bytes of a save, of a save in the background, and of loads at the same
// and at another number of ranks, compared with the rate at which the disk takes the same bytes. Ranks are
// processes, and the measurements alternate in rounds. One rank's work is in checkpoint_rank.h.
#include <zero/library.h>

#include <algorithm>
#include <filesystem>

#include "lab/bench/bench.h"
#include "lab/bench/bench_gpt.h"
#include "lab/bench/bench_ranks.h"
#include "lab/bench/checkpoint_rank.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace checkpoint_bench {
namespace {

constexpr const char* kCheckpointName = "bench checkpoint";

struct CheckpointSetup {
  CheckpointTask task;
  GptChoice model;
  std::int64_t world = 2, rounds = 3;
  std::string worlds, transport = "shm";
};

void declare(Command& c, CheckpointSetup& s) {
  s.model.shape = models::GptConfig::preset("gpt-10m");
  c.section("What is measured");
  c.option("--dir", s.task.folder, "DIR", "folder for the checkpoints, on the disk to measure; emptied afterwards");
  c.option("--world", s.world, "N", "ranks that save, each a process (2)", 1, 64);
  c.option("--load-worlds", s.worlds, "LIST", "numbers of ranks that load, comma-separated (N,2N)");
  c.option("--stage", s.task.stage, "S", "ZeRO stage (2)", 0, 3);
  c.choice("--recipe", s.task.recipe, {"fp32", "bf16"}, "recipe (bf16)");
  c.option("--threads", s.task.threads, "N", "threads per rank (1)", 1, 1024);
  c.option("--rounds", s.rounds, "N", "rounds of every measurement, in new processes (3)", 1, 1000);
  c.option("--steps", s.task.steps, "N", "steps with and without a save, for the stall (6)", 1, 1000000);
  c.option("--rest", s.task.rest, "S",
           "seconds of work without I/O before a save and a load, for a disk that slows down after much work (0)", 0,
           3600);
  c.section("Model");
  s.model.declare(c);
}

// A row of the result: one measurement over all rounds.
struct CheckpointSeries {
  CheckpointTask task;
  std::int64_t world;
  std::vector<Json> results;

  std::string name() const {
    const auto ranks = std::to_string(world);
    return task.what == "load"   ? "load on " + ranks
           : task.what == "save" ? "save by " + ranks
           : task.what == "disk" ? "disk alone, by " + ranks
                                 : "save in background by " + ranks;
  }
  std::vector<double> all(const char* field) const {
    std::vector<double> values;
    for (const auto& result : results) values.push_back(result.at(field).get<double>());
    return values;
  }
  double median(const char* field) const { return quantile(all(field), 0.5); }
  std::int64_t most(const char* field) const {
    std::int64_t most = 0;
    for (const auto& result : results)
      for (const std::int64_t one : result.at(field)) most = std::max(most, one);
    return most;
  }
};

std::string seconds_text(double seconds) { return fixed(seconds * 1e3, 1); }

Json document_of(const CheckpointSetup& setup, const std::vector<CheckpointSeries>& all) {
  Json document = {{"schema", "zero.bench.checkpoint/1"},
                   {"machine", machine()},
                   {"task", setup.task.json()},
                   {"world", setup.world},
                   {"rounds", setup.rounds},
                   {"cache", "dropped before loads"},
                   {"measurements", Json::array()}};
  for (const auto& series : all)
    document["measurements"].push_back(
        {{"what", series.task.what}, {"world", series.world}, {"rounds", series.results}});
  return document;
}

std::string text_of(const CheckpointSetup& setup, const std::vector<CheckpointSeries>& all, std::size_t columns) {
  using report::Align;
  const auto bytes = [](double value) { return report::human_bytes(static_cast<std::uint64_t>(value)); };
  report::Table saves({{"ms, median"},
                       {"call", Align::Right},
                       {"stall", Align::Right},
                       {"complete", Align::Right},
                       {"step", Align::Right},
                       {"/disk", Align::Right},
                       {"peak/rank", Align::Right}});
  report::Table loads({{"ms, median"},
                       {"load", Align::Right},
                       {"/disk", Align::Right},
                       {"read/needed", Align::Right},
                       {"peak/rank", Align::Right}});
  const auto& disk = *std::find_if(all.begin(), all.end(), [](const auto& one) { return one.task.what == "disk"; });
  const auto written = disk.median("write_s"), read = disk.median("read_s"), size = disk.median("bytes");
  for (const auto& series : all) {
    if (series.task.what == "disk") continue;
    if (series.task.what == "load") {
      double ratio = 0;
      const auto& last = series.results.back();
      for (std::size_t r = 0; r < last.at("read_bytes").size(); ++r)
        ratio = std::max(ratio, last["read_bytes"][r].get<double>() / last["needed_bytes"][r].get<double>());
      loads.row({series.name(), seconds_text(series.median("load_s")), fixed(series.median("load_s") / read, 2),
                 fixed(ratio, 2), bytes(static_cast<double>(series.most("peak_bytes")))});
      continue;
    }
    saves.row({series.name(), seconds_text(series.median("call_s")), seconds_text(series.median("stall_s")),
               seconds_text(series.median("durable_s")),
               seconds_text(series.median("without_s") / static_cast<double>(setup.task.steps)),
               fixed(series.median("durable_s") / written, 2), bytes(static_cast<double>(series.most("peak_bytes")))});
  }
  const auto& m = setup.task.model;
  return machine_line() + "\nlibzero " ZERO_VERSION "\nGPT, layers " + std::to_string(m.layers) + ", hidden " +
         std::to_string(m.hidden) + ", stage " + std::to_string(setup.task.stage) + ", " + setup.task.recipe +
         "; a checkpoint has " + bytes(size) +
         "\n/disk: as many bytes in new files by as many ranks with direct I/O alone: written at " +
         bytes(size / written) + "/s, read at " + bytes(size / read) + "/s\n" + std::to_string(setup.rounds) +
         " rounds in turn; stall: " + std::to_string(setup.task.steps) +
         " steps with a save minus as many without; the files are dropped from the cache before loads\n\n" +
         saves.render(columns) + loads.render(columns);
}

std::vector<std::int64_t> worlds_of(const CheckpointSetup& setup) {
  std::vector<std::int64_t> worlds;
  if (setup.worlds.empty()) return {setup.world, 2 * setup.world};
  for (const auto& part : parts_of(setup.worlds)) {
    if (part.empty() || part.size() > 2 || part.find_first_not_of("0123456789") != std::string::npos ||
        std::stoll(part) < 1 || std::stoll(part) > 64)
      throw ConfigError("[--load-worlds] got \"" + setup.worlds +
                        "\", expected whole numbers from 1 to 64 with commas");
    worlds.push_back(std::stoll(part));
  }
  return worlds;
}

// The checkpoints of a round.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(const std::string& in) : path_(std::filesystem::path(in) / "zero-bench-checkpoint") {
    std::error_code error;
    if (!std::filesystem::is_directory(in, error))
      throw ConfigError("[--dir] got \"" + in + "\", expected a folder that exists");
    if (std::filesystem::exists(path_, error))
      throw ConfigError("[--dir] " + path_.string() + " exists. Hint: another run uses it, or left it; remove it.");
  }
  ~CheckpointFolder() { clear(); }
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;
  std::string text() const { return path_.string(); }
  void clear() const noexcept {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

 private:
  std::filesystem::path path_;
};

}  // namespace
}  // namespace checkpoint_bench

int bench_checkpoint(int argc, char** argv) {
  using namespace checkpoint_bench;
  CheckpointSetup setup;
  Command command(kCheckpointName, "time, memory and bytes of saves and loads", "[options]",
                  "  zero bench checkpoint --dir /mnt/data --model gpt2 --world 2 --load-worlds 1,2,8\n");
  declare(command, setup);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink(kCheckpointName, global);
  setup.task.model = setup.model.chosen(command);
  const CheckpointFolder folder(setup.task.folder.empty() ? "." : setup.task.folder);
  setup.task.folder = folder.text();
  std::vector<CheckpointSeries> all;
  const auto add = [&](const char* what, std::int64_t world) {
    all.push_back({setup.task, world, {}});
    all.back().task.what = what;
  };
  add("background", setup.world);
  add("save", setup.world);
  add("disk", setup.world);
  for (const auto world : worlds_of(setup)) add("load", world);
  std::int64_t bytes = 0;  // of a checkpoint
  std::string digest;
  for (std::int64_t round = 0; round < setup.rounds; ++round) {
    // Loads need the checkpoint of a save of their round.
    for (auto& series : all) {
      if (series.task.what == "save" || series.task.what == "background") folder.clear();
      series.task.bytes = bytes;
      series.task.digest = digest;
      const RankProcesses ranks{
          .command = kCheckpointName, .world = series.world, .threads = setup.task.threads, .transport = "shm"};
      const auto outcome = run_rank_processes(ranks, series.task.json(), global);
      if (outcome.exit_code != 0) return outcome.exit_code;
      series.results.push_back(outcome.result);
      if (series.task.what == "save") {
        bytes = outcome.result.at("bytes").get<std::int64_t>();
        digest = outcome.result.at("digest").get<std::string>();
      }
      if (log_threshold(global) <= LogLevel::Info)
        print_note(kCheckpointName, LogLevel::Info,
                   "round " + std::to_string(round + 1) + " of " + std::to_string(setup.rounds) + ": " + series.name());
    }
  }
  print_result(global.json
                   ? document_of(setup, all).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                   : text_of(setup, all, static_cast<std::size_t>(report::describe_terminal(1, global.color).columns)));
  return 0;
}

int bench_checkpoint_rank(int argc, char** argv) {
  using namespace checkpoint_bench;
  const auto task = RankTask::from("checkpoint-rank", argc, argv);
  const auto comm = Communicator::from_env();
  const auto result = measure_checkpoint(CheckpointTask::from(task.task), comm);
  if (comm->rank() == 0) task.hand_over(result);
  return 0;
}

}  // namespace zero::cli
