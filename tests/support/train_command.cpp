#include "support/train_command.h"

#include <fstream>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test {

TrainedRun train_command(int ranks, const std::vector<std::string>& options, int steps, std::string folder) {
  if (folder.empty()) folder = temporary_folder();
  {
    std::ofstream text(folder + "/text.txt");
    for (unsigned i = 0, state = 7; i < 12000; ++i) {
      state = state * 1664525u + 1013904223u;
      text << (state >> 16) % 100 << (i % 9 ? " " : "\n");
    }
  }
  std::vector<std::string> words{ZERO_BINARY_DIR "/bin/zero",
                                 "run",
                                 "-n",
                                 std::to_string(ranks),
                                 "zero",
                                 "train",
                                 ZERO_SOURCE_DIR "/configs/stage3-bf16.json",
                                 "--text",
                                 folder + "/text.txt",
                                 "--dtype",
                                 "fp32",
                                 "--steps",
                                 std::to_string(steps),
                                 "--micro-batch-size",
                                 "4",
                                 "--out",
                                 folder + "/out",
                                 "--sample",
                                 "20"};
  for (const char* setting : {"libzero.model.layers=2", "libzero.model.hidden=40", "libzero.model.heads=5",
                              "libzero.model.seq_length=33", "libzero.data.eval_batches=2"})
    words.insert(words.end(), {"--set", setting});
  words.insert(words.end(), options.begin(), options.end());
  Process process(Process::Settings{words, {"OMP_NUM_THREADS=1"}, folder, -1});
  TrainedRun run;
  run.folder = folder;
  run.code = process.wait(120);
  run.out = process.out;
  run.err = process.err;
  std::ifstream metrics(folder + "/out/log.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("loss")) run.losses.push_back(row["loss"]);
    run.log.push_back(row);
  }
  std::ifstream result(folder + "/out/result.json");
  run.result = nlohmann::json::parse(result, nullptr, false);
  if (run.result.is_object()) run.heldout = run.result.value("heldout_nats_per_byte", 0.0);
  std::ifstream record(folder + "/out/run.json");
  run.record = nlohmann::json::parse(record, nullptr, false);
  return run;
}

}  // namespace zero::test
