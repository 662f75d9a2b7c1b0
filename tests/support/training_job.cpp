#include "support/training_job.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace zero::test {
namespace {

std::string text_file(const std::string& folder) {
  std::ofstream out(folder + "/text.txt");
  for (unsigned i = 0, state = 7; i < 12000; ++i) {
    state = state * 1664525u + 1013904223u;
    out << (state >> 16) % 1000 << (i % 9 ? " " : "\n");
  }
  return folder + "/text.txt";
}

}  // namespace

TrainingJob::TrainingJob(int ranks, const Words& options, const Words& training, const std::string& folder)
    : Process(Settings{
          Words{ZERO_BINARY_DIR "/bin/zero", "run", "-n", std::to_string(ranks)} + options +
              Words{"zero", "train", ZERO_SOURCE_DIR "/configs/stage3-bf16.json", "--text", text_file(folder)} +
              Words{"--dtype", "fp32",  // bf16 takes seven times as long on a CPU
                    "--set", "steps_per_print=1", "--set", "libzero.model.layers=2", "--set", "libzero.model.hidden=48",
                    "--set", "libzero.model.heads=3", "--set", "libzero.model.seq_length=32", "--set",
                    "libzero.data.eval_batches=1"} +
              training,
          {"OMP_NUM_THREADS=1"},
          folder,
          -1}) {}

std::string TrainingJob::run_id() const {
  const std::size_t at = err.find(", run ");
  return at == std::string::npos ? "" : err.substr(at + 6, err.find_first_of(",\n", at + 6) - at - 6);
}

pid_t TrainingJob::pid_of(int rank, int attempt) const {
  const auto run =
      with_environment("ZERO_RUN_ID=" + run_id() + (attempt > 0 ? ".r" + std::to_string(attempt) : std::string()));
  for (const pid_t p : with_environment("RANK=" + std::to_string(rank)))
    if (std::find(run.begin(), run.end(), p) != run.end()) return p;
  throw std::runtime_error("no process of rank " + std::to_string(rank));  // no number: kill(-1) reaches everybody
}

std::map<std::int64_t, std::string> losses_of(const std::string& out) {
  std::map<std::int64_t, std::string> all;
  for (const std::string& line : lines(out)) {
    const auto step = nlohmann::json::parse(line.substr(std::min<std::size_t>(4, line.size())), nullptr, false);
    if (!step.is_object() || !step.contains("loss") || !step.contains("step")) continue;
    all[step["step"]] = step["loss"].dump() + " " + step["grad_norm"].dump();
  }
  return all;
}

}  // namespace zero::test
