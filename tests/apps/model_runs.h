// Runs of `zero train --model` on data that the tests write, and what they came to.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test::model_runs {

using nlohmann::json;

struct Run {
  int code = -1;
  std::string out, err;
  std::vector<double> losses;
  std::vector<json> evaluations;  // between steps, and the last one
  json result, record;
};

inline void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

// Words of a BERT vocabulary, one a line; and records of who lives where.
inline const Words kNames = {"anna", "ben", "carl", "dora"}, kTowns = {"oslo", "rome", "bern", "lima"};

inline std::string make_folder() {
  const std::string folder = temporary_folder();
  std::filesystem::create_directory(folder + "/words");
  std::string vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n.\n?\nwhere\ndoes\nlive\nlives\nin\n";
  for (const auto* const list : {&kNames, &kTowns})
    for (const auto& word : *list) vocabulary += word + "\n";
  write(folder + "/words/vocab.txt", vocabulary);
  json squad{{"version", "1.1"}, {"data", json::array({{{"title", "towns"}, {"paragraphs", json::array()}}})}};
  std::string lines, labels;
  for (std::size_t i = 0; i < 60; ++i) {
    std::string context;
    json questions = json::array();
    for (std::size_t k = 0; k < 2; ++k) {
      const auto &name = kNames[(i + 2 * k) % 4], &town = kTowns[(i / 4 + k + i) % 4];
      context += (k > 0 ? " " : "") + name + " lives in ";
      questions.push_back({{"id", std::to_string(2 * i + k)},
                           {"question", "where does " + name + " live?"},
                           {"answers", json::array({{{"text", town}, {"answer_start", context.size()}}})}});
      context += town + ".";
    }
    squad["data"][0]["paragraphs"].push_back({{"context", context}, {"qas", questions}});
    lines += context + "\n";
    labels += json{{"text", context}, {"label", kNames[i % 4]}}.dump() + "\n";
  }
  write(folder + "/squad.json", squad.dump());
  write(folder + "/text.txt", lines);
  write(folder + "/labels.jsonl", labels);
  write(folder + "/prompts.jsonl", R"({"prompt": "anna lives in", "completion": " oslo"})"
                                   "\n"
                                   R"({"prompt": "ben lives in", "completion": " rome"})"
                                   "\n");
  write(folder + "/config.json", R"({
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "libzero": {"data": {"holdout": 0.2}}
  })");
  return folder;
}

inline Run train(const std::string& folder, int ranks, const Words& options, int steps) {
  Words words{ZERO_BINARY_DIR "/bin/zero",
              "run",
              "-n",
              std::to_string(ranks),
              "zero",
              "train",
              folder + "/config.json",
              "--steps",
              std::to_string(steps),
              "--out",
              folder + "/out",
              "--sample",
              "6"};
  words.insert(words.end(), options.begin(), options.end());
  Process process(Process::Settings{words, {"OMP_NUM_THREADS=1"}, folder, -1});
  Run run;
  run.code = process.wait(180);
  run.out = process.out;
  run.err = process.err;
  std::ifstream log(folder + "/out/log.jsonl");
  for (std::string line; std::getline(log, line);) {
    const json row = json::parse(line);
    if (row.contains("heldout_loss"))
      run.evaluations.push_back(row);
    else
      run.losses.push_back(row.value("loss", 0.0));
  }
  std::ifstream result(folder + "/out/result.json"), record(folder + "/out/run.json");
  run.result = json::parse(result, nullptr, false);
  run.record = json::parse(record, nullptr, false);
  return run;
}

inline const Words kSmall = {"--set", "libzero.model.layers=2", "--set", "libzero.model.hidden=32",
                             "--set", "libzero.model.heads=4"};
inline const Words kTiny = kSmall + Words{"--seq-length", "32"};

// Stages 0 and 1 add micro-batches in another order than 2 and 3 (docs/numerics.md).
inline const Words kOneMicroBatch = {"--set", "gradient_accumulation_steps=1"};

inline Words llama() { return Words{"--model", "llama-110m", "--task", "lm", "--data", "text.txt"} + kTiny; }
inline Words bert(const std::string& task, const std::string& data) {
  return Words{"--model", "bert-base", "--task", task, "--data", data, "--tokenizer", "words"} + kTiny;
}

inline void expect_same(const Run& a, const Run& b, const std::string& what) {
  ASSERT_EQ(b.code, 0) << what << "\n" << b.err;
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.result["heldout_loss"], b.result["heldout_loss"]) << what;
  EXPECT_EQ(a.result["metrics"], b.result["metrics"]) << what;
}

}  // namespace zero::test::model_runs
